"""Mirror a finished study to Weights & Biases: one W&B run per cell, written after the cell's own files.

Parquet and JSON are the truth, W&B is a copy for its dashboards. So every failure here is caught, counted and told in a line,
and a ledger beside the copies keeps the same cell from being mirrored twice.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .comparison import COLUMNS
from .load_runs import OK, Cell, read_cells, read_requests, run_end, with_latencies

log = logging.getLogger(__name__)

FOLDER = "wandb"  # under the study: W&B's own files, and the ledger
LEDGER = "mirrored.jsonl"  # one line per mirrored cell: its hash, its run
GIVE_UP = 3  # failures in a row, after which the rest is not tried: a full disk or no network does not heal
HISTOGRAMS = ("ttft", "e2e")
FILE = "requests.parquet"


def mirror(
    study_folder: Path,
    cells: Sequence[Cell] | Sequence[Mapping[str, Any]],
    *,
    mode: str = "offline",
    project: str = "lengthwise",
) -> dict[str, Any]:
    """Copy each complete cell into a W&B run under `study_folder`/wandb; upload it when `mode` is online.

    cells: as `read_cells` returns them, or manifest rows. Returns mirrored, skipped (there already), failed (counts) and error
    (the first one, in a line, or None). Never raises for anything W&B does. A run's id is the cell's hash, so that syncing
    twice, or from two copies, is one run.
    """
    done = [cell for cell in _cells(study_folder, cells) if cell.status == OK]
    told: dict[str, Any] = {"mirrored": 0, "skipped": 0, "failed": 0, "error": None}
    try:
        folder = study_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        known = _read_ledger(folder / LEDGER, mode)
        todo = [cell for cell in done if cell.hash not in known]
        told["skipped"] = len(done) - len(todo)
        if todo:
            with _contained(folder, mode):
                _mirror_all(folder, todo, mode, project, told)
    except Exception as error:  # a mirror that breaks must not break what it mirrors
        told["failed"] = len(done) - told["mirrored"] - told["skipped"]
        told["error"] = told["error"] or _one_line(error)
    if told["failed"]:
        log.info("W&B mirror: %d of %d cells failed: %s", told["failed"], len(done), told["error"])
    return told


def _mirror_all(folder: Path, cells: Sequence[Cell], mode: str, project: str, told: dict[str, Any]) -> None:
    import wandb

    if mode == "online" and not wandb.Api().api_key:
        raise ValueError("no W&B API key: `wandb login`, or wandb=offline")
    in_a_row = 0
    for number, cell in enumerate(cells):
        try:
            run_id = _mirror_cell(wandb, folder, cell, mode, project)
            with open(folder / LEDGER, "a") as ledger:
                ledger.write(json.dumps({"hash": cell.hash, "run": run_id, "mode": mode}) + "\n")
            told["mirrored"] += 1
            in_a_row = 0
        except Exception as error:  # counted; the next cell may do
            told["failed"] += 1
            told["error"] = told["error"] or f"{cell.name}: {_one_line(error)}"
            in_a_row += 1
            if in_a_row == GIVE_UP:
                told["failed"] += len(cells) - number - 1
                return


def _mirror_cell(wandb: Any, folder: Path, cell: Cell, mode: str, project: str) -> str:
    """Write one run, closed again whatever happens; what a broken one left offline is removed. Returns its id."""
    settings = wandb.Settings(
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, init_timeout=30
    )
    fields = cell.fields
    run_id = cell.hash or cell.name[:64]
    point = "-".join(str(fields.get(key)) for key in ("workload", "arrivals", "limits")) + f"-load{_load(fields)}"
    run = wandb.init(
        project=project, dir=str(folder.parent), mode=mode, id=run_id, resume="allow" if mode == "online" else None,
        name=cell.name, group=point, job_type=f"{fields.get('policy')}/{fields.get('predictor')}",
        tags=_tags(cell, folder.parent.name), config=_config(cell), settings=settings,
        reinit="create_new",  # never a run that the caller has open
    )  # fmt: skip
    where = Path(run.dir).parent
    try:
        _fill(wandb, run, cell)
        run.finish()
        _verify(where, cell)
    except Exception:
        _abandon(run)
        if mode == "offline":
            shutil.rmtree(where, ignore_errors=True)
        raise
    return str(run_id)


def _fill(wandb: Any, run: Any, cell: Cell) -> None:
    values = {key: value for key, value in cell.metrics.items() if isinstance(value, (bool, int, float, str))}
    requests = with_latencies(read_requests(cell.folder, COLUMNS), run_end(cell))
    histograms = {}
    for name in HISTOGRAMS:
        known = requests[name].dropna().to_numpy()
        if known.size:
            histograms[f"histogram/{name}"] = wandb.Histogram(known, num_bins=64)
    run.log({**values, **histograms})
    copy = Path(run.dir) / FILE  # saving the cell's own file would leave a link that breaks when it moves
    shutil.copyfile(cell.folder / FILE, copy)
    run.save(str(copy), base_path=run.dir, policy="now")


def _verify(where: Path, cell: Cell) -> None:
    """W&B says ok on a full disk too: look whether its files are there. Raises OSError."""
    logs = list(where.glob("run-*.wandb"))
    if not logs or not logs[0].stat().st_size:
        raise OSError(f"W&B wrote no transaction log in {where.name}")
    if (where / "files" / FILE).stat().st_size != (cell.folder / FILE).stat().st_size:
        raise OSError(f"the copy of {FILE} in {where.name} is cut short")


def _tags(cell: Cell, study: str) -> list[str]:
    names = [study, *(cell.fields.get(key) for key in ("policy", "predictor", "workload", "arrivals", "limits", "setting"))]
    tags = [*(str(name) for name in names if name is not None), f"load={_load(cell.fields)}", f"seed={cell.fields.get('seed')}"]
    return list(dict.fromkeys(tag[:64] for tag in tags if tag))


def _config(cell: Cell) -> dict[str, Any]:
    """The cell's resolved config, nested as Hydra composed it, its node names and its provenance."""
    path = cell.folder / ".hydra" / "config.yaml"
    config: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.exists() else {}
    return {**(config if isinstance(config, dict) else {}), "cell": dict(cell.fields), "provenance": dict(cell.provenance)}


def _load(fields: Mapping[str, Any]) -> str:
    load = fields.get("load")
    return f"{load:g}" if isinstance(load, (int, float)) else "none"


def _cells(study_folder: Path, cells: Sequence[Any]) -> list[Cell]:
    if all(isinstance(cell, Cell) for cell in cells):
        return list(cells)
    return read_cells(study_folder, cells)


def _read_ledger(path: Path, mode: str) -> set[str]:
    """Hashes of the cells that were mirrored: offline and online are two mirrors."""
    if not path.exists():
        return set()
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut off by a kill: that cell is mirrored again, under the same id
            continue
    return {row["hash"] for row in rows if row["mode"] == mode}


@contextmanager
def _contained(folder: Path, mode: str) -> Iterator[None]:
    """Keep all that W&B writes inside `folder`, never in the home directory; put the environment back afterwards."""
    names = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR", *(("WANDB_CONFIG_DIR",) if mode == "offline" else ()))
    before = {name: os.environ.get(name) for name in (*names, "WANDB_DIR", "WANDB_SILENT")}
    os.environ.update({name: str(folder / ".wandb") for name in names})
    os.environ.update(WANDB_DIR=str(folder.parent), WANDB_SILENT="true")
    in_use = "WANDB_SERVICE" in os.environ  # the caller has runs of its own
    try:
        yield
    finally:
        if not in_use and "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _abandon(run: Any) -> None:
    """Close a run that broke half-way."""
    try:
        run.finish(exit_code=1)
    except Exception as error:  # already counted
        log.debug("closing the broken W&B run: %s", error)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
