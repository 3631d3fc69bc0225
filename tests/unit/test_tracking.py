"""The W&B mirror: one run per cell, one per predictor, once, inside the study; its failures lose nothing (X7, X8, X9).

W&B cannot go on with an offline run, and syncing two pieces of one id overwrites the first (X7). So nothing is logged while a
cell runs: its Parquet is the log, and a run is written whole, afterwards, under the cell's hash.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import wandb

from lengthwise.experiments.figures.contract import canned_study
from lengthwise.experiments.load_runs import load_runs, read_cells
from lengthwise.experiments.report import finish
from lengthwise.experiments.tracking import config_of, main, mirror
from lengthwise.experiments.wandb_check import check_mirror
from lengthwise.experiments.wandb_log import read_offline
from lengthwise.experiments.wandb_predictors import log_predictor, predictors_of, trained

SCHEDULES = (("fcfs", "none"), ("srpt", "oracle"))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Four cells, and a home directory that nothing may be written to."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "study"
    rows = canned_study(
        folder, num_requests=30, loads=(0.95,), seeds=(0, 1), settings=(("gamma", "seqs64"),), schedules=SCHEDULES
    )
    yield folder, rows
    assert not list(home.iterdir())


def runs_of(folder):
    return sorted(path for path in (folder / "wandb").iterdir() if path.name.startswith("offline-run"))


def test_x8_one_run_per_cell_and_a_second_mirror_adds_nothing(study):
    folder, rows = study
    before = dict(os.environ)
    assert mirror(folder, rows) == {"mirrored": 4, "skipped": 0, "failed": 0, "predictors": 0, "error": None}
    assert dict(os.environ) == before
    runs = runs_of(folder)
    assert sorted(run.name.rsplit("-", 1)[1] for run in runs) == sorted(row["hash"] for row in rows)
    for run in runs:
        row = next(row for row in rows if run.name.endswith(row["hash"]))
        copy = run / "files" / "requests.parquet"
        assert copy.read_bytes() == (folder / row["folder"] / "requests.parquet").read_bytes() and not copy.is_symlink()
    assert mirror(folder, rows) == {"mirrored": 0, "skipped": 4, "failed": 0, "predictors": 0, "error": None}
    assert runs_of(folder) == runs


def test_x8_what_a_run_holds(study, monkeypatch):
    folder, rows = study
    seen, logged = [], []
    init = wandb.init

    def watched(**kwargs):
        run = init(**kwargs)
        seen.append(kwargs)
        log = run.log
        monkeypatch.setattr(run, "log", lambda data: (logged.append(data), log(data)), raising=False)
        return run

    monkeypatch.setattr(wandb, "init", watched)
    assert mirror(folder, rows)["mirrored"] == 4
    assert {kwargs["group"] for kwargs in seen} == {"sharegpt-gamma-seqs64-load0.95"}
    assert [kwargs["job_type"] for kwargs in seen] == ["fcfs/none", "fcfs/none", "srpt/oracle", "srpt/oracle"]
    assert {"study", "srpt", "oracle", "seed=1", "load=0.95"} <= set(seen[3]["tags"])
    assert seen[0]["config"]["policy"] == {"_target_": "x"} and seen[0]["config"]["cell"]["seed"] == 0
    assert logged[0]["e2e_mean"] == load_runs(folder)["e2e_mean"].iloc[0]
    assert isinstance(logged[0]["histogram/ttft"], wandb.Histogram) and sum(logged[0]["histogram/e2e"].histogram) == 30


def test_x8_a_run_that_raises_is_counted_and_the_others_are_mirrored(study, monkeypatch):
    folder, rows = study
    init = wandb.init

    def second_raises(**kwargs):
        if kwargs["id"] == rows[1]["hash"]:
            raise RuntimeError("no space left on device")
        return init(**kwargs)

    monkeypatch.setattr(wandb, "init", second_raises)
    told = mirror(folder, rows)
    assert (
        (told["mirrored"], told["failed"]) == (3, 1) and "no space left" in told["error"] and rows[1]["cell"] in told["error"]
    )
    monkeypatch.setattr(wandb, "init", init)
    assert mirror(folder, rows) == {"mirrored": 1, "skipped": 3, "failed": 0, "predictors": 0, "error": None}
    assert len(runs_of(folder)) == 4


def test_x9_a_run_that_breaks_half_way_leaves_nothing_behind(study, monkeypatch):
    folder, rows = study
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        told = mirror(folder, rows)
    assert told["failed"] == 4 and told["mirrored"] == 0 and wandb.run is None
    assert not runs_of(folder)
    assert mirror(folder, rows)["mirrored"] == 4


def test_x9_a_mirror_that_cannot_start_loses_nothing(study, monkeypatch, capsys):
    folder, rows = study
    monkeypatch.setattr(wandb, "Settings", lambda **_: (_ for _ in ()).throw(RuntimeError("logger is broken")))
    finish(folder, rows, {"name": "x", "wandb": "offline"})
    out = capsys.readouterr().out
    assert "4 FAILED (nothing else is affected)" in out and "logger is broken" in out
    assert json.loads((folder / "study.json").read_text())["num_complete"] == 4 and (folder / "quickstart.pdf").exists()


def test_x9_an_unwritable_place_is_a_failure_not_a_fallback(study):
    folder, rows = study
    (folder / "wandb").write_text("in the way")
    told = mirror(folder, rows)
    assert told["failed"] == 4 and "FileExistsError" in told["error"]


def test_online_without_a_key_fails_at_once(study, monkeypatch):
    folder, rows = study
    monkeypatch.setattr(wandb, "Api", lambda: type("Api", (), {"api_key": None})())
    told = mirror(folder, rows, mode="online")
    assert told["failed"] == 4 and "no W&B API key" in told["error"]


def test_x8_a_run_that_the_caller_has_open_stays_its_own(study, monkeypatch):
    folder, rows = study
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):  # of the caller's run
        monkeypatch.setenv(name, str(folder.parent / "theirs"))
    own = wandb.init(mode="offline", dir=str(folder.parent), settings=wandb.Settings(silent=True, console="off"))
    try:
        assert mirror(folder, rows)["mirrored"] == 4
        assert wandb.run is own
        own.log({"still": "open"})
    finally:
        own.finish()
        wandb.teardown()
    assert len(runs_of(folder)) == 4


def test_cells_without_a_result_are_not_mirrored(study):
    folder, rows = study
    rows[0]["status"] = "failed"
    assert mirror(folder, rows)["mirrored"] == 3


# --- X7: again and again is once -----------------------------------------------------------------------------------------


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_x7_a_second_mirror_adds_no_run_no_row_and_no_file(study):
    folder, rows = study
    learned(folder, rows)
    assert mirror(folder, rows)["predictors"] == 1
    before, files = read_offline(folder), files_of(folder / "wandb")
    assert mirror(folder, rows) == {"mirrored": 0, "skipped": 4, "failed": 0, "predictors": 0, "error": None}
    after = read_offline(folder)
    assert after[0].equals(before[0]) and after[1].equals(before[1]) and len(after[0]) == 5
    assert after[0]["num_segments"].eq(1).all() and files_of(folder / "wandb") == files
    assert check_mirror(folder) == []


KILLED = """
import os, sys
from pathlib import Path
from lengthwise.experiments import tracking
from lengthwise.experiments.load_runs import read_cells
calls = []
whole = tracking._fill
def filled(wandb, run, cell):
    calls.append(1)
    if len(calls) == 3:
        run.log({"half": 1.0})
        os._exit(9)
    whole(wandb, run, cell)
tracking._fill = filled
folder = Path(sys.argv[1])
tracking.mirror(folder, read_cells(folder))
"""


def test_x7_a_mirror_that_was_killed_goes_on_and_has_each_row_once(study):
    folder, rows = study
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert len(runs_of(folder)) == 3  # the third was under way
    assert mirror(folder, rows) == {"mirrored": 2, "skipped": 2, "failed": 0, "predictors": 0, "error": None}
    runs, history = read_offline(folder)
    assert sorted(runs["id"]) == sorted(row["hash"] for row in rows) and runs["problem"].isna().all()
    assert (history["step"] == 0).all() and len(history) == 4 and "half" not in history
    assert check_mirror(folder) == []


def test_x7_a_lost_ledger_costs_nothing(study):
    folder, rows = study
    mirror(folder, rows)
    before = runs_of(folder)
    ledger = folder / "wandb" / "mirrored.jsonl"
    ledger.write_text(ledger.read_text()[:-20])  # a kill in the middle of a line
    assert mirror(folder, rows)["skipped"] == 4 and runs_of(folder) == before
    ledger.unlink()
    assert mirror(folder, rows)["skipped"] == 4 and runs_of(folder) == before
    assert len(ledger.read_text().splitlines()) == 4


def test_x7_an_offline_run_that_was_cut_short_is_written_again(study):
    folder, rows = study
    mirror(folder, rows)
    (folder / "wandb" / "mirrored.jsonl").unlink()
    log, copy = (next(runs_of(folder)[k].glob(name)) for k, name in ((0, "run-*.wandb"), (1, "files/requests.parquet")))
    for path in (log, copy):
        path.write_bytes(path.read_bytes()[:-100])
    assert mirror(folder, rows) == {"mirrored": 2, "skipped": 2, "failed": 0, "predictors": 0, "error": None}
    assert len(runs_of(folder)) == 4 and check_mirror(folder) == []


def test_x7_runs_that_a_sync_cleaned_away_are_not_written_again_and_that_is_said(study, capsys):
    """`wandb sync --clean` removes what it sent: writing it again would send it again."""
    folder, rows = study
    mirror(folder, rows)
    shutil.rmtree(runs_of(folder)[0])
    assert mirror(folder, rows)["skipped"] == 4 and len(runs_of(folder)) == 3
    (line,) = check_mirror(folder)
    assert "not mirrored any more" in line and "mirrored.jsonl" in line
    for run in runs_of(folder):
        shutil.rmtree(run)
    assert main([str(folder)]) == 1
    assert "though 4 were written" in capsys.readouterr().out
    (folder / "wandb" / "mirrored.jsonl").unlink()
    assert mirror(folder, rows)["mirrored"] == 4 and check_mirror(folder) == []


# --- the mirror against the study -----------------------------------------------------------------------------------------


def test_n1_what_is_read_from_wandb_is_checked_against_the_studys_own_files(study):
    """Case N1: own files are the source; if W&B is read, its rows and values are held against them."""
    folder, rows = study
    mirror(folder, rows)
    assert check_mirror(folder) == []
    path = folder / rows[0]["folder"] / "summary.json"
    summary = json.loads(path.read_text())
    summary["metrics"]["e2e_mean"] += 1.0
    summary["metrics"]["new"] = 1
    path.write_text(json.dumps(summary))
    problems = check_mirror(folder)
    assert len(problems) == 4 and all(rows[0]["cell"] in line for line in problems)
    assert sum("e2e_mean is" in line for line in problems) == sum("new is missing" in line for line in problems) == 2
    shutil.rmtree(runs_of(folder)[-1])
    assert any("not mirrored" in line for line in check_mirror(folder))
    left = check_mirror(folder, read_cells(folder)[1:])
    assert any("1 runs of nothing that the study has now" in line for line in left)


def test_n1_a_shortened_copy_of_the_requests_is_told(study):
    import pandas as pd

    folder, rows = study
    mirror(folder, rows)
    copy = runs_of(folder)[0] / "files" / "requests.parquet"
    pd.read_parquet(copy).iloc[:7].to_parquet(copy)
    (problem,) = check_mirror(folder)
    assert "7 requests in W&B's requests.parquet, 30 in the cell's" in problem


def test_the_command_mirrors_and_checks_a_stored_study(study, capsys):
    folder, _ = study
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mirrored 4, skipped 0, failed 0, predictors 0", "the mirror agrees with the study",
    ]  # fmt: skip
    assert main([str(folder), "--check"]) == 0
    shutil.rmtree(runs_of(folder)[0])
    assert main([str(folder), "--check"]) == 1 and "not mirrored" in capsys.readouterr().out
    assert main([str(folder / "nothing")]) == 1 and "no such folder of results" in capsys.readouterr().out


# --- predictors -----------------------------------------------------------------------------------------------------------


def learned(folder, rows, code="c0ffee"):
    """Give all cells but the first the same prepared predictions."""
    made = folder.parent / "prepared" / "predictions" / "abc"
    made.mkdir(parents=True, exist_ok=True)
    np.savez(made / "columns.npz", score=np.arange(5.0))
    (made / "info.json").write_text(json.dumps({"name": "gbdt", "unit": "tokens", "num_folds": 5}))
    (made / "content").write_text(code)
    for row in rows[1:]:
        path = folder / row["folder"] / "summary.json"
        summary = json.loads(path.read_text())
        summary["provenance"]["prepared"] = {"predictions": code, "saturation": "x"}
        path.write_text(json.dumps(summary))


def artefact(folder):
    """A folder as `lengthwise train` leaves it."""
    (folder / "artefact").mkdir(parents=True)
    page = {"name": "ridge", "unit": "tokens", "digests": {"arrays.npz": "0"}, "provenance": {"dataset": "d"}}
    (folder / "artefact" / "artefact.json").write_text(json.dumps(page))
    np.savez(folder / "artefact" / "arrays.npz", a=np.arange(3))
    (folder / "report.json").write_text(
        json.dumps({"metrics": {"kendall_tau": 0.4, "mae": {"mean": 80.5}, "note": "x"}, "workload": "w", "num_rows": 9})
    )
    return folder


def test_prepared_predictions_are_one_artifact_however_many_cells_use_them(study):
    folder, rows = study
    learned(folder, rows)
    assert [kept.hash for kept in predictors_of(read_cells(folder), folder.parent)] == ["c0ffee"]
    assert mirror(folder, rows)["predictors"] == 1
    runs, _ = read_offline(folder)
    (run,) = runs[runs["job_type"] == "predictor"].to_dict("records")
    (made,) = run["artifacts"]
    assert made["type"] == "predictor" and made["name"] == "gbdt-c0ffee" and set(made["files"]) == {"columns.npz", "info.json"}
    assert made["metadata"]["num_folds"] == 5 and run["id"] == "predictor-c0ffee"
    (folder / "wandb" / "mirrored.jsonl").unlink()
    assert mirror(folder, rows)["predictors"] == 0  # found again on disk
    learned(folder, rows, "other")
    assert mirror(folder, rows)["predictors"] == 1  # another content is another artifact
    (left,) = check_mirror(folder)
    assert "1 runs of nothing that the study has now, such as predictor gbdt" in left


def test_a_trained_artefact_that_a_cell_names_is_logged_with_its_reports_metrics(study):
    folder, rows = study
    learned(folder, rows)
    where = artefact(folder.parent / "trained")
    for row in rows[1:]:
        path = folder / row["folder"] / ".hydra" / "config.yaml"
        path.write_text(path.read_text() + f"predictor: {{_target_: x, path: {where / 'artefact'}}}\n")
    assert mirror(folder, rows)["predictors"] == 1
    runs, history = read_offline(folder)
    (run,) = runs[runs["job_type"] == "predictor"].to_dict("records")
    assert run["summary"]["kendall_tau"] == 0.4 and run["summary"]["mae/mean"] == 80.5
    row = history[history["id"] == run["id"]].iloc[0]
    assert (row["kendall_tau"], row["mae/mean"]) == (0.4, 80.5)
    (made,) = run["artifacts"]
    assert set(made["files"]) == {"artefact.json", "arrays.npz", "report.json"}
    assert made["metadata"]["metrics"]["kendall_tau"] == 0.4 and made["metadata"]["report"]["workload"] == "w"
    assert check_mirror(folder) == []


def test_a_trained_artefact_is_logged_alone_and_once(study):
    folder, _ = study
    where = artefact(folder.parent / "trained")
    assert log_predictor(where, folder.parent) == {"mirrored": 1, "skipped": 0, "failed": 0, "error": None}
    assert log_predictor(where / "artefact", folder.parent) == {"mirrored": 0, "skipped": 1, "failed": 0, "error": None}
    assert read_offline(folder.parent)[0]["num_rows"].tolist() == [1]
    assert trained(where).hash == trained(where / "artefact").hash
    with pytest.raises(ValueError, match=r"holds no artefact\.json"):
        log_predictor(folder, folder.parent)


def test_a_predictor_that_cannot_be_logged_costs_no_cell(study, monkeypatch):
    folder, rows = study
    learned(folder, rows)
    monkeypatch.setattr(wandb.Artifact, "add_file", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no artifacts today")))
    told = mirror(folder, rows)
    assert (told["mirrored"], told["failed"], told["predictors"]) == (4, 0, 0) and "no artifacts today" in told["error"]
    assert len(runs_of(folder)) == 4


# --- online ---------------------------------------------------------------------------------------------------------------


class FakeServer:
    """What a W&B server would keep: rows and files by run id. Its module stands in for wandb."""

    def __init__(self, tmp_path):
        self.rows, self.files, self.inits, self.artifacts = {}, {}, [], []
        self.module = types.SimpleNamespace(
            Api=lambda: types.SimpleNamespace(api_key="key"), Settings=lambda **k: k, init=self.init, teardown=lambda: None,
            Histogram=lambda values, num_bins: {"bins": num_bins},
        )  # fmt: skip
        self.tmp = tmp_path

    def init(self, **kwargs):
        self.inits.append(kwargs)
        run_id, server = kwargs["id"], self
        where = self.tmp / f"run-{len(self.inits)}-{run_id}" / "files"
        where.mkdir(parents=True)
        known = run_id in self.rows
        rows = self.rows.setdefault(run_id, [])

        class Run:
            dir, resumed = str(where), known
            step = len(rows)

            def log(self, data):
                rows.append(data)

            def save(self, path, **_):
                server.files[run_id, os.path.basename(path)] = os.path.getsize(path)

            def finish(self, exit_code=0):
                pass

        return Run()


def test_x7_online_one_cell_is_one_run_with_one_row_however_often_it_is_sent(study, tmp_path, monkeypatch):
    folder, rows = study
    server = FakeServer(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", server.module)
    assert mirror(folder, rows, mode="online")["mirrored"] == 4
    assert {kwargs["id"] for kwargs in server.inits} == {row["hash"] for row in rows}
    assert {(kwargs["mode"], kwargs["resume"]) for kwargs in server.inits} == {("online", "allow")}
    assert mirror(folder, rows, mode="online")["skipped"] == 4 and len(server.inits) == 4
    (folder / "wandb" / "mirrored.jsonl").unlink()  # or from another copy of the study
    assert mirror(folder, rows, mode="online")["mirrored"] == 4
    assert len(server.rows) == 4 and all(len(logged) == 1 for logged in server.rows.values()) and len(server.files) == 4
    assert {row["e2e_mean"] for (row,) in server.rows.values()} == set(load_runs(folder)["e2e_mean"])


def test_offline_and_online_are_two_mirrors(study, tmp_path, monkeypatch):
    folder, rows = study
    mirror(folder, rows)
    server = FakeServer(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", server.module)
    assert mirror(folder, rows, mode="online")["mirrored"] == 4


def test_online_without_any_key_says_what_to_do(study):
    folder, rows = study
    told = mirror(folder, rows, mode="online")
    assert told["failed"] == 4 and "no W&B API key" in told["error"] and "`wandb login`, or wandb=offline" in told["error"]


def test_a_config_is_read_as_hydra_wrote_it(study):
    from omegaconf import OmegaConf

    folder, _ = study
    cell = read_cells(folder)[0]
    path = cell.folder / ".hydra" / "config.yaml"
    config = {"a": 1e-05, "b": 1e9, "c": None, "d": {"e": [1, 2.5, "x: y"]}, "f": "1e-5", "g": True, "h": "null", "i": 1e-300}
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    assert config_of(cell) == config == OmegaConf.to_container(OmegaConf.load(path))
