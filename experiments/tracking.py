"""Mirror a finished study to Weights & Biases: one W&B run per cell, one per predictor, written after the study's own files.

Parquet and JSON are the truth, W&B is a copy for its dashboards. So every failure here is caught, counted and told in a line. A
run's id is the hash of what it shows, a ledger says what is there already, and offline runs are read back: mirroring twice, or
going on after a kill, leaves each run and each of its rows once.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .comparison import COLUMNS
from .load_runs import OK, Cell, read_cells, read_requests, run_end, with_latencies
from .prepare import locked
from .stored import config_of
from .wandb_predictors import mirror_predictors, predictors_of
from .wandb_session import PATIENCE, Ledger, contained, log_once, one_line, open_run, whole_run, why_broken

log = logging.getLogger(__name__)

FOLDER = "wandb"  # under the study: W&B's own files, and the ledger
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
    """Copy each complete cell into a W&B run under `study_folder`/wandb, and each learned predictor into an artifact of its
    own run; upload them when `mode` is online.

    cells: as `read_cells` returns them, or manifest rows. Returns of the cells mirrored, skipped (there already), failed
    (counts); predictors (mirrored now) and error (the first one, in a line, or None). Never raises for anything W&B does.
    """
    done = [cell for cell in _cells(study_folder, cells) if cell.status == OK]
    told: dict[str, Any] = {"mirrored": 0, "skipped": 0, "failed": 0, "predictors": 0, "error": None}
    try:
        folder = study_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            _mirror(folder, done, mode, project, told)
    except Exception as error:  # a mirror that breaks must not break what it mirrors
        told["failed"] = len(done) - told["mirrored"] - told["skipped"]
        told["error"] = told["error"] or one_line(error)
    if told["error"]:
        log.info("W&B mirror: %d of %d cells failed: %s", told["failed"], len(done), told["error"])
    return told


def _mirror(folder: Path, done: Sequence[Cell], mode: str, project: str, told: dict[str, Any]) -> None:
    ledger = Ledger(folder, mode)
    predictors = [kept for kept in predictors_of(done, folder.parent.parent) if kept.hash not in ledger.known]
    todo = [cell for cell in done if cell.hash not in ledger.known]
    if mode == "offline":  # a ledger that was lost, or a kill between a run and its line
        todo = [cell for cell in todo if not _adopted(folder, cell, ledger)]
    told["skipped"] = len(done) - len(todo)
    if not todo and not predictors:
        return
    with contained(folder, mode) as wandb:
        _mirror_all(wandb, folder, todo, ledger, mode, project, told)
        if told["error"] is None:
            try:
                told["predictors"] = mirror_predictors(
                    wandb, folder, predictors, ledger, mode=mode, project=project, group=f"{folder.parent.name} predictors"
                )
            except Exception as error:  # the cells are there
                told["error"] = f"predictors: {one_line(error)}"


def _mirror_all(
    wandb: Any, folder: Path, cells: Sequence[Cell], ledger: Ledger, mode: str, project: str, told: dict[str, Any]
) -> None:
    in_a_row = 0
    for number, cell in enumerate(cells):
        try:
            _mirror_cell(wandb, folder, cell, mode, project)
            ledger.add(cell.hash, run_id(cell))
            told["mirrored"] += 1
            in_a_row = 0
        except Exception as error:  # counted; the next cell may do
            told["failed"] += 1
            told["error"] = told["error"] or f"{cell.name}: {one_line(error)}"
            in_a_row += 1
            if in_a_row == GIVE_UP:
                told["failed"] += len(cells) - number - 1
                return


def _mirror_cell(wandb: Any, folder: Path, cell: Cell, mode: str, project: str) -> None:
    fields = cell.fields
    point = "-".join(str(fields.get(key)) for key in ("workload", "arrivals", "limits")) + f"-load{_load(fields)}"
    with open_run(
        wandb, folder, run_id(cell), mode, project=project, name=cell.name, group=point,
        job_type=f"{fields.get('policy')}/{fields.get('predictor')}", tags=_tags(cell, folder.parent.name),
        config={**config_of(cell), "cell": dict(cell.fields), "provenance": dict(cell.provenance)},
    ) as run:  # fmt: skip
        where = Path(run.dir).parent
        _fill(wandb, run, cell)
    if mode == "offline" and (why := _why_broken(where, cell, PATIENCE)):
        shutil.rmtree(where, ignore_errors=True)
        raise OSError(why)


def _fill(wandb: Any, run: Any, cell: Cell) -> None:
    requests = with_latencies(read_requests(cell.folder, COLUMNS), run_end(cell))
    histograms = {}
    for name in HISTOGRAMS:
        known = requests[name].dropna().to_numpy()
        if known.size:
            histograms[f"histogram/{name}"] = wandb.Histogram(known, num_bins=64)
    log_once(run, {**scalars(cell), **histograms})
    copy = Path(run.dir) / FILE  # saving the cell's own file would leave a link that breaks when it moves
    shutil.copyfile(cell.folder / FILE, copy)
    run.save(str(copy), base_path=run.dir, policy="now")


def _adopted(folder: Path, cell: Cell, ledger: Ledger) -> bool:
    """Whether a whole offline run of this cell is there; the ledger then has it. What a kill left is removed."""
    where = whole_run(folder, run_id(cell))
    if where is None:
        return False
    if _why_broken(where, cell):
        shutil.rmtree(where)
        return False
    ledger.add(cell.hash, run_id(cell))
    return True


def _why_broken(where: Path, cell: Cell, patience: float = 0.0) -> str | None:
    """Why the offline run in `where` is no whole copy of the cell; None when it is."""
    if why := why_broken(where, patience=patience):
        return why
    copy = where / "files" / FILE
    if not copy.is_file() or copy.stat().st_size != (cell.folder / FILE).stat().st_size:
        return f"the copy of {FILE} in {where.name} is cut short"
    return None


def run_id(cell: Cell) -> str:
    """The id of the cell's W&B run: its hash, so that syncing twice, or from two copies, is one run."""
    return cell.hash or cell.name[:64]


def scalars(cell: Cell) -> dict[str, Any]:
    """The metrics that a W&B run shows; those that may not be shown are left out."""
    return {key: value for key, value in cell.metrics.items() if isinstance(value, (bool, int, float, str))}


def _tags(cell: Cell, study: str) -> list[str]:
    names = [study, *(cell.fields.get(key) for key in ("policy", "predictor", "workload", "arrivals", "limits", "setting"))]
    tags = [*(str(name) for name in names if name is not None), f"load={_load(cell.fields)}", f"seed={cell.fields.get('seed')}"]
    return list(dict.fromkeys(tag[:64] for tag in tags if tag))


def _load(fields: Mapping[str, Any]) -> str:
    load = fields.get("load")
    return f"{load:g}" if isinstance(load, (int, float)) else "none"


def _cells(study_folder: Path, cells: Sequence[Any]) -> list[Cell]:
    if all(isinstance(cell, Cell) for cell in cells):
        return list(cells)
    return read_cells(study_folder, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m lengthwise.experiments.tracking STUDY [--online] [--check]`: mirror a stored study again, or check its mirror.

    Returns 1 when anything failed or does not agree, else 0.
    """
    from .wandb_check import check_mirror

    parser = argparse.ArgumentParser(prog="lengthwise.experiments.tracking", description="Mirror a stored study to W&B.")
    parser.add_argument("study", type=Path, help="folder of a study: PATH/<name>")
    parser.add_argument("--online", action="store_true", help="upload; needs a network and `wandb login`")
    parser.add_argument("--project", default="lengthwise")
    parser.add_argument("--check", action="store_true", help="only compare the offline mirror with the study's own files")
    args = parser.parse_args(argv)
    problems: list[str] = []
    try:
        if not args.check:
            told = mirror(args.study, read_cells(args.study), mode="online" if args.online else "offline", project=args.project)
            problems += [told["error"]] if told["error"] else []
            print(", ".join(f"{key} {told[key]}" for key in ("mirrored", "skipped", "failed", "predictors")))
        if not args.online:
            problems += check_mirror(args.study)
    except ValueError as error:
        problems.append(str(error))
    print("\n".join(problems) if problems else "the mirror agrees with the study" if not args.online else "sent")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
