"""Cases of people who run sweeps and draw them (groups X and N), on real cells of a few requests."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import wandb

from lengthwise.experiments import app
from lengthwise.experiments.figures import latency_vs_load, quickstart, style
from lengthwise.experiments.figures.contract import canned_study, check_figure
from lengthwise.experiments.figures.sources.points import load_points
from lengthwise.experiments.load_runs import load_runs, read_cells
from lengthwise.experiments.manifest import read_manifest
from lengthwise.experiments.report import finish
from lengthwise.experiments.run import Run
from lengthwise.experiments.simulate import simulate
from lengthwise.experiments.tracking import mirror

QUICK = ("rate=20", "num_requests=60", "workload.num_rows=200", "wandb=off")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run `lengthwise run ARGS` here with out=tmp_path/runs; gives (exit code or message, everything printed)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["lengthwise", *args, f"out={tmp_path / 'runs'}"])
        try:
            app.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, f"{code}\n{out}\n{err}"

    return call


def cells(tmp_path, name="adhoc"):
    study = tmp_path / "runs" / name
    return {row["cell"]: Run.load(study / row["folder"]) for row in read_manifest(study) if row["status"] == "ok"}


# --- X3, X5: seeds ------------------------------------------------------------------------------------------------------

ONE_CELL = """
import sys
from pathlib import Path
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.simulate import simulate
from lengthwise.predictors.contract import synthetic_rows
from lengthwise.predictors.gbdt import GBDT
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.noisy_oracle import NoisyOracle
asked, lengths, censored = synthetic_rows(150)
lens = asked.prompt_len.astype(int)
rows = Dataset("made_up", lens, lengths, "tokens", "a generator", "none", censored=censored, prompts=asked.texts)
for name, predictor in (("learned", GBDT(num_rounds=10, latency=LatencyModel(0.001, 0.0))), ("noisy", NoisyOracle(tau=0.5))):
    run = simulate("srpt", predictor, rows, rate=50.0, num_requests=150, max_num_seqs=4, seed=3)
    run.summary.pop("volatile")
    run.save(Path(sys.argv[1]) / name)
"""


def test_x3_a_learned_and_a_random_prediction_are_the_same_bytes_in_another_process(tmp_path):
    found = []
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", ONE_CELL, str(tmp_path / seed)], check=True, env=env)
        files = sorted((tmp_path / seed).rglob("*.*"))
        found.append({str(file.relative_to(tmp_path / seed)): file.read_bytes() for file in files})
    assert len(found[0]) == 8 and found[0] == found[1]


def test_x3_another_seed_is_another_result():
    a, b, c = (simulate(rate=20.0, num_requests=60, seed=seed) for seed in (0, 0, 1))
    pd.testing.assert_frame_equal(a.requests, b.requests)
    assert a.requests["arrival"].tolist() != c.requests["arrival"].tolist()
    assert a.requests["row"].tolist() != c.requests["row"].tolist()


def test_x5_repeats_are_seeds_and_the_same_for_every_policy(run, tmp_path):
    """Paired: within a seed all policies see the same rows at the same times; each seed has its own."""
    args = ["-m", "policy=fcfs,srpt,sjf", "predictor=oracle", "seed=0,1,2", *QUICK]
    code, text = run(*args)
    assert code == 0, text
    drawn = {}
    for result in cells(tmp_path).values():
        key = result.summary["cell"]["seed"]
        drawn.setdefault(key, []).append(result.requests[["row", "arrival", "prompt_len", "output_len"]])
    assert {seed: len(frames) for seed, frames in drawn.items()} == {0: 3, 1: 3, 2: 3}
    for frames in drawn.values():
        assert all(frame.equals(frames[0]) for frame in frames)
    assert len({frames[0]["arrival"].iloc[-1] for frames in drawn.values()}) == 3
    code, text = run("-m", "repeat=3", *QUICK)  # seeds are the repeats; another word for them is refused
    assert code != 0 and "repeats are seeds" in text and len(read_manifest(tmp_path / "runs/adhoc")) == 9


# --- X4, X6: configs ----------------------------------------------------------------------------------------------------


def test_x4_numbers_of_a_sweep_arrive_as_numbers_and_are_stored(run, tmp_path):
    code, text = run("-m", "kv.watermark=1e-2,5E-3", *QUICK)
    assert code == 0, text
    stored = [path.read_text() for path in sorted((tmp_path / "runs/adhoc").glob("*/.hydra/config.yaml"))]
    assert len(stored) == 2 and all("watermark: 0.0" in page and "'" not in page.split("watermark")[1][:12] for page in stored)
    code, text = run("name=1E234", *QUICK)  # a name that reads as a number
    assert code != 0 and "name=1e+234" in text and "Traceback" not in text
    code, text = run("-m", "kv.watermark=0.01,1e-2", *QUICK)
    assert code != 0 and "comes twice" in text


def test_x6_the_default_cell_runs_here_without_a_network(run, tmp_path, monkeypatch):
    """No cluster, no host, no key: nothing connects, and no folder is changed."""

    def refused(self, address):
        raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: refused(None, args))
    here = os.getcwd()
    code, text = run("num_requests=60", "workload.num_rows=200")
    assert code == 0, text
    assert os.getcwd() == here and len(list((tmp_path / "runs/adhoc").glob("*/summary.json"))) == 1


def test_x6_two_cells_that_differ_in_a_key_outside_the_name_have_two_folders(run, tmp_path):
    code, text = run("-m", "kv.watermark=0.01,0.02", *QUICK)
    assert code == 0, text
    folders = [path for path in (tmp_path / "runs/adhoc").iterdir() if path.is_dir()]
    assert len(folders) == 2 == len({path.name.rsplit("-", 1)[0] for path in folders}) + 1
    assert "several cells share this row and a seed" in text  # the table has no column for that key, and says so


# --- P7 in the prepare stage --------------------------------------------------------------------------------------------


def test_p7_a_predictor_that_always_raises_ends_the_study_before_its_first_cell(run, tmp_path, monkeypatch):
    (tmp_path / "always_wrong.py").write_text(
        "from lengthwise.predictors.prompt_length import PromptLength\n"
        "class AlwaysWrong(PromptLength):\n"
        "    name = 'always_wrong'\n"
        "    def predict_columns(self, prompts):\n"
        "        raise RuntimeError('the model file is gone')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, text = run("-m", "policy=sjf", "predictor._target_=always_wrong.AlwaysWrong", "seed=0,1", *QUICK)
    assert code != 0 and "predictions of" in text and "no usable prediction for any of 200 rows" in text
    assert "the model file is gone" in text and "Traceback" not in text
    assert not list((tmp_path / "runs").rglob("summary.json")) and not list((tmp_path / "runs/prepared").rglob("info.json"))


# --- X8, X9: loggers and disks ------------------------------------------------------------------------------------------


def test_x8_cells_of_one_process_and_of_three_are_a_run_each(run, tmp_path, monkeypatch):
    started, logged = [], []
    init = wandb.init

    def watched(**kwargs):
        run = init(**kwargs)
        started.append(kwargs)
        log = run.log
        monkeypatch.setattr(run, "log", lambda data: (logged.append((kwargs["id"], data)), log(data)), raising=False)
        return run

    monkeypatch.setattr(wandb, "init", watched)
    monkeypatch.setenv("HOME", str(tmp_path))
    several = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=3")
    for seeds, launcher in (("0,1,2", ("hydra/launcher=basic",)), ("3,4,5", several)):
        code, text = run("-m", f"seed={seeds}", *launcher, *QUICK[:-1], "wandb=offline")
        assert code == 0 and "3 runs mirrored" in text, text
    assert [kwargs["config"]["cell"]["seed"] for kwargs in started] == [0, 1, 2, 3, 4, 5]
    assert len({kwargs["id"] for kwargs in started}) == 6 and wandb.run is None
    assert [run_id for run_id, _ in logged] == [kwargs["id"] for kwargs in started]
    assert len({data["e2e_mean"] for _, data in logged}) == 6
    logs = list((tmp_path / "runs/adhoc/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) == 6 and all(path.stat().st_size > 0 for path in logs)


def test_x9_a_logger_that_raises_at_its_fifth_step_is_counted_and_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "study"
    schedules = (("fcfs", "none"), ("srpt", "oracle"))
    rows = canned_study(folder, num_requests=20, loads=(0.95,), seeds=(0, 1), schedules=schedules)
    calls = []
    init = wandb.init

    def watched(**kwargs):
        run = init(**kwargs)
        log = run.log

        def logged(data):
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("planted at step 5")
            log(data)

        monkeypatch.setattr(run, "log", logged, raising=False)
        return run

    monkeypatch.setattr(wandb, "init", watched)
    finish(folder, rows, {"name": "x", "wandb": "offline"})
    out = capsys.readouterr().out
    assert "7 runs mirrored" in out and "1 FAILED (nothing else is affected)" in out and "planted at step 5" in out
    assert json.loads((folder / "study.json").read_text())["num_complete"] == 8 and (folder / "quickstart.pdf").exists()
    assert mirror(folder, rows) == {"mirrored": 1, "skipped": 7, "failed": 0, "predictors": 0, "error": None}


def test_x9_a_disk_that_is_full_while_preparing_leaves_nothing_half_made(run, tmp_path, monkeypatch):
    def full(file, **columns):
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    args = ["-m", "policy=sjf", "predictor=constant", "seed=0,1", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        code, text = run(*args)
    assert code != 0 and "columns.npz" in text and "No space left" in text and "bytes free" in text and "Traceback" not in text
    assert not list((tmp_path / "runs/prepared/predictions").glob("*/")) and not cells(tmp_path)
    code, text = run(*args)
    assert code == 0 and len(cells(tmp_path)) == 2, text


# --- N2, N4: figures of what is there -----------------------------------------------------------------------------------


def texts(ax):
    return [text.get_text() for panel in ax.child_axes for text in panel.texts]


def test_n4_two_of_three_seeds_are_shown_as_two_and_the_failed_one_is_listed(tmp_path, capsys):
    folder = tmp_path / "study"
    schedules = (("fcfs", "none"), ("srpt", "gbdt"), ("srpt", "oracle"))
    rows = canned_study(folder, num_requests=30, loads=(0.95,), settings=(("gamma", "seqs64"),), schedules=schedules)
    next(r for r in rows if r["fields"]["predictor"] == "gbdt" and r["fields"]["seed"] == 1)["status"] = "failed"
    (folder / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = load_runs(folder)
    drawn = check_figure(quickstart.draw, runs).set_index("predictor")
    assert (drawn.loc["gbdt", "difference_seeds"], drawn.loc["gbdt", "num_cells"]) == (2, 3)
    _, ax = style.page(quickstart.size(runs))
    quickstart.draw(runs, ax)
    assert sum(text.endswith(" n=2") for text in texts(ax)) == 1 and "8 of 9 cells" in style.footer(runs, "x")
    points = load_points(read_cells(folder))
    lines = check_figure(lambda p, a: latency_vs_load.draw(p, a, statistic="p50"), points).set_index("predictor")
    assert lines.loc["gbdt", "num_seeds"] == 2 and lines.loc["gbdt", "low"] < lines.loc["gbdt", "value"]
    finish(folder, rows, {"name": "x", "wandb": "off"})
    assert "2 of 3 seeds (seed 1: failed)" in " ".join(capsys.readouterr().out.split())


def test_n2_a_gap_in_a_line_is_a_gap(tmp_path):
    """Three loads, the middle one gone: no line is drawn across it, and no zero."""
    folder = tmp_path / "study"
    rows = canned_study(
        folder, num_requests=30, seeds=(0,), settings=(("gamma", "seqs64"),), schedules=(("fcfs", "none"), ("srpt", "oracle"))
    )
    gone = next(r for r in rows if r["fields"]["policy"] == "srpt" and r["fields"]["load"] == 0.95)
    (folder / gone["folder"] / "summary.json").unlink()
    runs = load_runs(folder)
    drawn = check_figure(lambda p, a: latency_vs_load.draw(p, a, statistic="p50"), load_points(read_cells(folder)))
    values = drawn[drawn["policy"] == "srpt"].set_index("load")["value"]
    assert np.isnan(values[0.95]) and values.drop(0.95).gt(0).all() and "5 of 6 cells" in style.footer(runs, "x")


def test_n2_a_page_without_a_value_says_why(tmp_path):
    """A P99 of 30 requests is not shown: the figure is blank, and tells so."""
    canned_study(tmp_path, num_requests=30, loads=(0.5,), seeds=(0,), settings=(("gamma", "seqs64"),))
    points = load_points(read_cells(tmp_path))
    _, ax = style.page(latency_vs_load.size(points))
    assert latency_vs_load.draw(points, ax)["value"].isna().all()
    assert [text for text in texts(ax) if "enough requests" in text] == ["no ttft_p99: no complete cell has enough requests"]


def test_a_sweep_of_rates_is_drawn_over_rates(run, tmp_path):
    code, text = run("-m", "load=null", "rate=20,40", "num_requests=120", "workload.num_rows=200", "wandb=off")
    assert code == 0, text
    assert pd.read_csv(tmp_path / "runs/adhoc/latency_vs_load.csv", comment="#")["rate"].tolist() == [20.0, 40.0]


def test_the_figure_has_no_negative_zero():
    assert [quickstart.percent(x) for x in (-0.0, -0.004, -0.2, 0.004, 0.5, 1.0)] == ["0%", "0%", "-20%", "0%", "50%", "100%"]
