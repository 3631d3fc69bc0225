"""Study: a sweep with a beginning (check, prepare, plan), cells that are skipped when complete, and an end (tables, figures).

The manifest `cells.jsonl` says which cells belong to the study: first every planned one, then a row as each ends. Only cells
without a result are launched, by whatever launcher Hydra is told to use; what fails is named at the end and in the exit code.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .composer import Cfg, plain
from .job import planned
from .launch import launch, plan, say
from .manifest import Row, read_manifest
from .paths import describe_error, remove_stale, root
from .prepare import Prepared
from .progress import Progress
from .sweep import sweep_cells

log = logging.getLogger(__name__)
LOCK = ".lock"


def run_study(
    config: DictConfig, overrides: Sequence[str], loader: ConfigLoader, launcher: Launcher, at_once: int | None = None
) -> None:
    """Run the cells in the product of `overrides` that have no result yet, then draw from all of them.

    at_once: jobs that the launcher is given at a time; None: `launch.AT_ONCE`, with submitit_local a job per core. Writes
    PATH/<name>/ and PATH/prepared/. Raises SystemExit when a cell cannot be run as it is asked for, before the first one;
    when any has no result at the end; when drawing fails.
    """
    with refusals(root(str(config.out))):
        cells = sweep_cells(config, overrides, loader)
    with opened(config) as (study, prepared):
        make_inputs([cfg for _, cfg in cells], prepared)
        rows = [planned(cfg, prepared) for _, cfg in cells]
        todo = plan(study, rows)
        say(f"{config.name}: {len(rows)} cells, {len(rows) - len(todo)} of them complete, in {study}")
        if todo:
            with Progress(study):
                launch(launcher, [cells[i][0] for i in todo], study, at_once)
    rows = finish(study, plain(config, config.hydra.runtime.choices))
    raise_unless_whole(study, rows)


@contextmanager
def opened(config: DictConfig) -> Iterator[tuple[Path, Prepared]]:
    """(folder of the study, prepared inputs), held against other runs, without what killed ones left."""
    out = root(str(config.out))
    study = out / str(config.name)
    with refusals(out):
        study.mkdir(parents=True, exist_ok=True)
        with _locked(study):
            remove_stale(study)
            yield study, Prepared(out)


def make_inputs(cells: Sequence[Cfg], prepared: Prepared, *, quiet: bool = False) -> None:
    """Make the inputs that the cells share, each once. quiet: say nothing of those that are there.

    Raises what making raises, naming the input.
    """
    needed: dict[Path, tuple[str, Cfg]] = {}
    for cfg in cells:
        for kind, path in prepared.needed(cfg).items():
            needed.setdefault(path, (kind, cfg))
    for number, (path, (kind, cfg)) in enumerate(needed.items(), 1):
        chosen = cfg["choices"]
        groups = ("workload", "hardware", "limits") if kind == "saturation" else ("predictor", "workload")
        label = f"prepare {number}/{len(needed)}: {kind} of {', '.join(str(chosen.get(group)) for group in groups)}"
        if not (path / "content").exists():
            say(f"{label} ...")
        start = time.perf_counter()
        try:
            prepared.needed(cfg, make=True)
        except (ValueError, ImportError, FileNotFoundError) as error:
            raise ValueError(f"{label} failed: {error}") from error
        made = path in prepared.made
        if quiet and not made:
            continue
        found = f"{prepared.saturation_rate(cfg):.2f} requests/s, " if kind == "saturation" else ""
        say(f"{label}: {found}{f'made in {time.perf_counter() - start:.1f} s' if made else 'found'}")


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


@contextmanager
def refusals(out: Path) -> Iterator[None]:
    """Turn what makes a study impossible into a SystemExit of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        say(str(error))
        raise SystemExit(1) from error  # as Hydra ends; the application adds the nearest name
    except (ValueError, TypeError, ImportError, FileNotFoundError) as error:
        raise SystemExit(f"lengthwise run: {error}") from error
    except OSError as error:
        raise SystemExit(f"lengthwise run: {describe_error(error, out)}") from error


@contextmanager
def _locked(study: Path) -> Iterator[None]:
    """Hold the study: two sweeps that write one manifest would lose each other's rows."""
    with open(study / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {study}; wait for it, or give this one another name=NAME") from None
        yield
