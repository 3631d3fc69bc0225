"""The W&B mirror: one run per cell, once, offline, inside the study; its failures lose nothing (cases X7, X8, X9)."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import wandb

from lengthwise.experiments.figures.contract import canned_study
from lengthwise.experiments.load_runs import load_runs
from lengthwise.experiments.report import finish
from lengthwise.experiments.tracking import mirror

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
    assert mirror(folder, rows) == {"mirrored": 4, "skipped": 0, "failed": 0, "error": None}
    assert dict(os.environ) == before
    runs = runs_of(folder)
    assert sorted(run.name.rsplit("-", 1)[1] for run in runs) == sorted(row["hash"] for row in rows)
    for run in runs:
        row = next(row for row in rows if run.name.endswith(row["hash"]))
        copy = run / "files" / "requests.parquet"
        assert copy.read_bytes() == (folder / row["folder"] / "requests.parquet").read_bytes() and not copy.is_symlink()
    assert mirror(folder, rows) == {"mirrored": 0, "skipped": 4, "failed": 0, "error": None}
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
    assert mirror(folder, rows) == {"mirrored": 1, "skipped": 3, "failed": 0, "error": None}
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
