"""Check an offline W&B mirror against the files it was made from: rows, metrics and requests, cell by cell.

The study's own files are the truth; this says where a copy of them would mislead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .load_runs import OK, Cell, read_cells
from .tracking import FILE, FOLDER, run_id, scalars
from .wandb_log import offline_files, read_offline
from .wandb_predictors import TYPE, predictors_of
from .wandb_session import LEDGER, Ledger

GONE = (
    "`wandb sync --clean` or a hand removed what was mirrored; it is written again once its line, or the file, "
    f"{FOLDER}/{LEDGER} is removed"
)


def check_mirror(study: Path | str, cells: list[Cell] | None = None) -> list[str]:
    """What does not agree between the study in folder `study` and its offline runs: a line each, none when all is well.

    Compared are: one ended run per complete cell with one row, the row's and the summary's metrics with those of summary.json,
    exactly, the rows of the copied requests.parquet with the cell's; one run per learned predictor with its files. Runs of
    cells that the study no longer has are told too. Raises ValueError when there is no study or no mirror.
    """
    study = Path(study)
    cells = read_cells(study) if cells is None else cells
    known = Ledger(study / FOLDER, "offline").known
    if known and not offline_files(study / FOLDER):
        raise ValueError(f"no offline W&B run under {study / FOLDER} any more, though {len(known)} were written: {GONE}")
    runs, history = read_offline(study / FOLDER)
    found = {row["id"]: row for row in runs.to_dict("records")}
    rows = {str(key): group for key, group in history.groupby("id")}
    done = [cell for cell in cells if cell.status == OK]
    problems: list[str] = []
    for cell in done:
        run = found.pop(run_id(cell), None)
        gone = run is None and cell.hash in known
        problems += [f"{cell.name}: not mirrored any more: {GONE}"] if gone else _of_cell(cell, run, rows.get(run_id(cell)))
    for kept in predictors_of(done, study.parent):
        problems += _of_predictor(
            kept.name, {file.name: file.stat().st_size for file in kept.files}, found.pop(kept.run_id, None)
        )
    left = [row["name"] for row in found.values()]
    if left:
        problems.append(f"{len(left)} runs of nothing that the study has now, such as {left[0]}: remove them before a sync")
    return problems


def _of_cell(cell: Cell, run: dict[str, Any] | None, rows: Any) -> Iterator[str]:
    if run is None:
        yield f"{cell.name}: not mirrored"
        return
    if run["problem"]:
        yield f"{cell.name}: {run['problem']}"
    if run["num_rows"] != 1:
        yield f"{cell.name}: {run['num_rows']} rows in W&B, 1 was logged"
        return
    logged = {key: value for key, value in rows.iloc[0].dropna().items() if key not in {"id", "step"}}
    for where, values in (("row", logged), ("summary", run["summary"])):
        for key, value in scalars(cell).items():
            if key not in values:
                yield f"{cell.name}: {key} is missing in W&B's {where}"
            elif values[key] != value:
                yield f"{cell.name}: {key} is {values[key]} in W&B's {where}, {value} in summary.json"
    copy = Path(run["folder"]) / "files" / FILE
    counts = [pq.read_metadata(path).num_rows if path.is_file() else 0 for path in (copy, cell.folder / FILE)]
    if counts[0] != counts[1]:
        yield f"{cell.name}: {counts[0]} requests in W&B's {FILE}, {counts[1]} in the cell's"


def _of_predictor(name: str, files: dict[str, int], run: dict[str, Any] | None) -> Iterator[str]:
    if run is None:
        yield f"predictor {name}: not mirrored"
        return
    artifacts = [artifact for artifact in run["artifacts"] if artifact["type"] == TYPE]
    if len(artifacts) != 1:
        yield f"predictor {name}: {len(artifacts)} artifacts in W&B, 1 was logged"
    elif artifacts[0]["files"] != files:
        yield f"predictor {name}: W&B's artifact holds {artifacts[0]['files']}, the study {files}"
