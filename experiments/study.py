"""Study: a sweep with a beginning (check, prepare, plan), cells that are skipped when complete, and an end (tables, figures).

The manifest `cells.jsonl` says which cells belong to the study: first every planned one, then a row as each ends. Only cells
without a result are launched, by whatever launcher Hydra is told to use; what fails is named at the end and in the exit code.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .job import is_complete, planned
from .manifest import Row, append, read_manifest
from .paths import MANIFEST, describe_error, remove_stale, root
from .prepare import Prepared
from .progress import Progress
from .sweep import Cfg, plain, sweep_cells

log = logging.getLogger(__name__)
LOCK = ".lock"


def run_study(config: DictConfig, overrides: Sequence[str], loader: ConfigLoader, launcher: Launcher) -> Sequence[Any]:
    """Run the cells in the product of `overrides` that have no result yet, then draw from all of them.

    Writes PATH/<name>/ and PATH/prepared/. Raises SystemExit when a cell cannot be run as it is asked for, before the first
    one; when any has no result at the end; when drawing fails. Returns what the launcher returned.
    """
    out = root(str(config.out))
    study = out / str(config.name)
    results: Sequence[Any] = []
    with _refusals(out):
        cells = sweep_cells(config, overrides, loader)
        study.mkdir(parents=True, exist_ok=True)
    with _refusals(out), _locked(study):
        remove_stale(study)
        prepared = Prepared(out)
        _prepare([cfg for _, cfg in cells], prepared)
        rows = [planned(cfg, prepared) for _, cfg in cells]
        todo = _plan(study, rows)
        say(f"{config.name}: {len(rows)} cells, {len(rows) - len(todo)} of them complete, in {study}")
        if todo:
            results = _launch(launcher, [cells[i][0] for i in todo], study)
    rows = finish(study, plain(config, config.hydra.runtime.choices))
    raise_unless_whole(study, rows)
    return results


def _plan(study: Path, rows: list[Row]) -> list[int]:
    """Begin the manifest anew. Returns which rows are to be computed."""
    (study / MANIFEST).write_text("")
    todo = [i for i, row in enumerate(rows) if not is_complete(study / row["folder"], row["hash"])]
    for i, row in enumerate(rows):
        append(study, row if i in todo else {**row, "status": "ok", "cached": True, "seconds": 0.0})
    return todo


def _launch(launcher: Launcher, jobs: list[list[str]], study: Path) -> Sequence[Any]:
    """Run the jobs. A launcher that breaks (a worker killed for memory) ends the sweep, not the study."""
    progress = Progress(study)
    progress.start()
    try:
        results = launcher.launch(jobs, initial_job_idx=0)
        for job, result in zip(jobs, results, strict=True):
            if result.status is JobStatus.FAILED:  # outside of what a job catches itself
                say(f"{' '.join(job)}: {result._return_value!r}")
        return results
    except Exception as error:  # launchers are plug-ins: whatever they raise, the cells that ended are kept and shown
        say(f"the launcher stopped: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        return []
    except BaseException:
        rows = read_manifest(study)
        left = sum(row["status"] != "ok" for row in rows)
        say(f"stopped: {left} of {len(rows)} cells have no result in {study}; the same command again goes on from here")
        raise
    finally:
        progress.stop()


def _prepare(cells: list[Cfg], prepared: Prepared) -> None:
    """Make the inputs that the cells share, each once. Raises what making raises, naming the input."""
    needed: dict[Path, tuple[str, Cfg]] = {}
    for cfg in cells:
        for kind, path in prepared.needed(cfg).items():
            needed.setdefault(path, (kind, cfg))
    for number, (path, (kind, cfg)) in enumerate(needed.items(), 1):
        chosen = cfg["choices"]
        groups = ("workload", "hardware", "limits") if kind == "saturation" else ("predictor", "workload")
        label = f"prepare {number}/{len(needed)}: {kind} of {', '.join(str(chosen.get(group)) for group in groups)}"
        there = (path / "content").exists()
        if not there:
            say(f"{label} ...")
        start = time.perf_counter()
        try:
            prepared.needed(cfg, make=True)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{label} failed: {error}") from error
        found = f"{prepared.saturation_rate(cfg):.2f} requests/s, " if kind == "saturation" else ""
        say(f"{label}: {found}{'found' if there else f'made in {time.perf_counter() - start:.1f} s'}")


def finish(study: Path, cfg: Cfg) -> list[Row]:
    """Draw and print from exactly the manifest's cells. Returns its rows. The results stay whatever drawing raises."""
    rows = read_manifest(study)
    if any(row["status"] == "ok" for row in rows):
        from .report import finish as report

        try:
            report(study, rows, cfg)
        except OSError as error:
            raise SystemExit(f"the cells are kept, their table or figure is not: {describe_error(error, study)}") from error
        except Exception as error:  # any fault in drawing must leave the results and show in the exit code
            log.exception("drawing failed")
            raise SystemExit(
                f"the cells are kept in {study}, their table or figure failed: {type(error).__name__}: {error}"
            ) from error
    return rows


def raise_unless_whole(study: Path, rows: list[Row]) -> None:
    """SystemExit that names every cell without a result."""
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        lines = [f"  {row['cell']}: {row.get('error', 'no result; its worker ended early')}" for row in bad]
        hint = f"tracebacks: {study}/*.failed.txt; the same command again runs only these"
        raise SystemExit("\n".join([f"{len(bad)} of {len(rows)} cells failed", *lines, hint]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _refusals(out: Path) -> Iterator[None]:
    """Turn what makes a study impossible into a SystemExit of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        say(str(error))
        raise SystemExit(1) from error  # as Hydra ends; the application adds the nearest name
    except OSError as error:
        raise SystemExit(f"lengthwise run: {describe_error(error, out)}") from error
    except (ValueError, TypeError, ImportError) as error:
        raise SystemExit(f"lengthwise run: {error}") from error


@contextmanager
def _locked(study: Path) -> Iterator[None]:
    """Hold the study: two sweeps that write one manifest would lose each other's rows."""
    with open(study / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {study}; wait for it, or give this one another name=NAME") from None
        yield
