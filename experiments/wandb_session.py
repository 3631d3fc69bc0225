"""What every mirror to W&B needs: W&B kept inside one folder and quiet, runs that are closed whatever happens, a ledger.

Nothing here knows what is mirrored; `tracking` writes cells, `wandb_predictors` writes predictors.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .wandb_log import read_segment

log = logging.getLogger(__name__)

LEDGER = "mirrored.jsonl"  # one line per mirrored thing: its hash, its run, offline or online
PATIENCE = 10.0  # s


class Ledger:
    """Hashes of what was mirrored in `mode`: offline and online are two mirrors. A line is added when a run is whole."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.path, self.mode = folder / LEDGER, mode
        self.known: set[str] = set()
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut off by a kill: looked for on disk again, under the same id
                continue
            if row["mode"] == mode:
                self.known.add(row["hash"])

    def add(self, code: str, run_id: str) -> None:
        text = self.path.read_text() if self.path.exists() else ""
        with open(self.path, "a") as file:
            file.write("\n" * bool(text and not text.endswith("\n")))  # after a line that a kill cut off
            file.write(json.dumps({"hash": code, "run": run_id, "mode": self.mode}) + "\n")
        self.known.add(code)


@contextmanager
def contained(folder: Path, mode: str) -> Iterator[Any]:
    """The wandb module, with all that it writes kept inside `folder`, never in the home directory; the environment is put back
    afterwards. Raises ValueError when `mode` is online and there is no key."""
    names = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR", *(("WANDB_CONFIG_DIR",) if mode == "offline" else ()))
    before = {name: os.environ.get(name) for name in (*names, "WANDB_DIR", "WANDB_SILENT")}
    os.environ.update({name: str(folder / ".wandb") for name in names})
    os.environ.update(WANDB_DIR=str(folder.parent), WANDB_SILENT="true")
    in_use = "WANDB_SERVICE" in os.environ  # the caller has runs of its own
    try:
        import wandb

        if mode == "online":
            _require_key(wandb)
        yield wandb
    finally:
        if not in_use and "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _require_key(wandb: Any) -> None:
    try:
        key = wandb.Api().api_key
    except Exception as error:  # W&B's own error for no key, or one of its network
        raise ValueError(f"no W&B API key ({one_line(error)}): `wandb login`, or wandb=offline") from error
    if not key:
        raise ValueError("no W&B API key: `wandb login`, or wandb=offline")


@contextmanager
def open_run(wandb: Any, folder: Path, run_id: str, mode: str, **facts: Any) -> Iterator[Any]:
    """A W&B run of this id in `folder`, finished at the end; when anything raises it is closed, and offline its files go.

    Online the id is resumed where it exists, so that one thing is one run however often it is sent. facts: for wandb.init.
    """
    settings = wandb.Settings(
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, init_timeout=30
    )
    run = wandb.init(
        dir=str(folder.parent), mode=mode, id=run_id, resume="allow" if mode == "online" else None, settings=settings,
        reinit="create_new",  # never a run that the caller has open
        **facts,
    )  # fmt: skip
    where = Path(run.dir).parent
    try:
        yield run
        run.finish()
    except Exception:
        _abandon(run)
        if mode == "offline":
            shutil.rmtree(where, ignore_errors=True)
        raise


def log_once(run: Any, values: Mapping[str, Any]) -> None:
    """Log one row, unless the run is one that was resumed and has it."""
    if not (getattr(run, "resumed", False) is True and run.step > 0):
        run.log(dict(values))


def whole_run(folder: Path, run_id: str, num_rows: int = 1) -> Path | None:
    """The offline run of this id in `folder` that ended, with this many rows; what a kill left of it is removed."""
    found = None
    for path in sorted(folder.glob(f"offline-run-*-{run_id}")):
        if found is None and why_broken(path, num_rows) is None:
            found = path
        else:
            shutil.rmtree(path)
    return found


def why_broken(where: Path, num_rows: int = 1, patience: float = 0.0) -> str | None:
    """Why the offline run in folder `where` is not whole; None when it is. W&B says ok on a full disk too, so it is read.

    patience: s to wait for what W&B's own process has yet to write after a run was finished.
    """
    deadline = time.monotonic() + patience
    while (why := _why_broken(where, num_rows)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return why


def _why_broken(where: Path, num_rows: int) -> str | None:
    logs = list(where.glob("run-*.wandb"))
    if not logs or not logs[0].stat().st_size:
        return f"W&B wrote no transaction log in {where.name}"
    try:
        segment = read_segment(logs[0])
    except ValueError as error:
        return str(error)
    if segment.problem:
        return segment.problem
    return None if len(segment.rows) == num_rows else f"{logs[0].name}: {len(segment.rows)} rows, {num_rows} were logged"


def one_line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]


def _abandon(run: Any) -> None:
    """Close a run that broke half-way."""
    try:
        run.finish(exit_code=1)
    except Exception as error:  # already counted
        log.debug("closing the broken W&B run: %s", error)
