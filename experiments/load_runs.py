"""Read stored results back: one row per cell, or one row per request.

The manifest of a study (`cells.jsonl`) decides what belongs to it: a folder left by an earlier study is never picked up, and a
cell that failed, vanished or was made from another config stays in the frame as a marked gap.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .latencies import samples
from .manifest import read_manifest
from .paths import MANIFEST
from .windows import Window

NEEDED = (  # columns that latencies and the window are made of
    "arrival", "first_scheduled", "first_token", "finish", "ended", "prompt_len", "output_len", "max_new_tokens", "status",
)  # fmt: skip
FIELDS = ("system", "policy", "predictor", "workload", "arrivals", "limits", "load", "rate", "seed")
TELLING = (  # kept a request where they differ
    "population", "reshape", "refine", "slo", "batching", "kv", "preemption", "admission", "victim", "executor",
)  # fmt: skip
OK = "ok"


@dataclass(frozen=True)
class Cell:
    """One cell of a study as found on disk.

    status: ok | failed (the job raised) | missing (no summary.json) | stale (made from another config). fields: the `cell`
    section of the summary, or of the manifest where there is no summary. summary: None unless ok.
    """

    name: str
    hash: str
    status: str
    folder: Path
    fields: Mapping[str, Any]
    summary: Mapping[str, Any] | None = None

    @property
    def metrics(self) -> Mapping[str, Any]:
        return {} if self.summary is None else self.summary["metrics"]

    @property
    def provenance(self) -> Mapping[str, Any]:
        return {} if self.summary is None else self.summary.get("provenance", {})


def read_cells(source: Path | str | Sequence[Path | str], manifest: Iterable[Mapping[str, Any]] | None = None) -> list[Cell]:
    """The cells of a study folder, of one cell folder, or of a list of cell folders, in the order of the manifest.

    manifest: rows {cell, hash, status, folder}; read from the folder's cells.jsonl when not given. Without either, the folders
    under `source` that look like cells, sorted by name. Raises ValueError when nothing is there.
    """
    if isinstance(source, (str, Path)):
        root = Path(source)
        if not root.is_dir():
            raise ValueError(f"no such folder of results: {root}")
        if manifest is None and (root / MANIFEST).exists():
            manifest = read_manifest(root)
        if manifest is not None:
            cells = list(_from_manifest(root, manifest))
        elif _is_cell(root):
            cells = [_read(root)]
        else:
            cells = [_read(path) for path in sorted(root.iterdir()) if path.is_dir() and _is_cell(path)]
        if not cells:
            raise ValueError(f"{root} holds no cell: neither {MANIFEST} nor a folder with summary.json")
        return cells
    cells = [_read(Path(path)) for path in source]
    if not cells:
        raise ValueError("an empty list of cell folders")
    return cells


def load_runs(source: Path | str | Sequence[Path | str] | list[Cell]) -> pd.DataFrame:
    """One row per cell: name, hash, status, folder, num_requests, marks, is_oracle, then FIELDS and every metric by its name.

    source: what `read_cells` takes, or its cells. Metrics of cells that are not ok are NaN.
    """
    rows = []
    for cell in _cells(source):
        row: dict[str, Any] = {"name": cell.name, "hash": cell.hash, "status": cell.status, "folder": str(cell.folder)}
        row |= {"num_requests": num_requests(cell), "marks": "; ".join(marks(cell)), "is_oracle": is_oracle(cell)}
        row |= {key: cell.fields.get(key) for key in FIELDS}
        row["rate"] = np.nan if row["rate"] is None else row["rate"]  # a cell without a result does not know it
        row |= {key: value for key, value in cell.fields.items() if key not in row}
        rows.append(row | {key: np.nan if value is None else value for key, value in cell.metrics.items() if _scalar(value)})
    return pd.DataFrame(rows)


def load_requests(source: Path | str | Sequence[Path | str] | list[Cell], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """One row per request of every complete cell: the columns of requests.parquet; ttft, tpot, e2e, wait (s) and
    normalised_latency (s a token), NaN where undefined or not ended; counted: whether the cell's metrics count it; the cell's
    FIELDS, and those of TELLING that tell cells apart. columns: of these, the ones to keep beside FIELDS. Raises ValueError
    without a complete cell."""
    cells = [cell for cell in _cells(source) if cell.status == OK]
    if not cells:
        raise ValueError("no complete cell among the results")
    stored = None if columns is None else (*columns, *NEEDED)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # files are read without Python's lock
        tables = list(pool.map(lambda cell: _table(cell.folder, stored), cells))
    counts = [len(table) for table in tables]
    ends: Any = np.repeat([run_end(cell) for cell in cells], counts)
    requests = with_latencies(_joined(tables), ends)
    arrival, stops = requests["arrival"].to_numpy(), np.cumsum(counts)
    parts = (arrival[stop - n : stop] for stop, n in zip(stops, counts, strict=True))
    counted = np.concatenate([window_of(cell).counts(part) for cell, part in zip(cells, parts, strict=True)])
    requests = requests.assign(counted=counted)
    keys = [key for key in (*FIELDS, "setting", "hardware") if any(key in cell.fields for cell in cells)]
    keys += [key for key in TELLING if len({str(cell.fields.get(key)) for cell in cells}) > 1]
    fields = pd.DataFrame([{key: cell.fields.get(key) for key in keys} for cell in cells])
    rows = np.repeat(np.arange(len(cells)), counts)
    kept = requests if columns is None else requests[list(columns)]
    return kept.assign(**{key: fields[key].array.take(rows) for key in keys})


def read_requests(folder: Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows of a cell. columns: the ones to read. Raises KeyError on one that is not stored."""
    frame: pd.DataFrame = _table(folder, columns).to_pandas()
    return frame if columns is None else frame[list(columns)]


def _table(folder: Path, columns: Sequence[str] | None) -> Any:
    """The Arrow table of a cell's requests; of `columns` those that are stored."""
    with pq.ParquetFile(folder / "requests.parquet") as file:
        wanted = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        return file.read(columns=wanted, use_threads=False)


def _joined(tables: list[Any]) -> pd.DataFrame:
    """One frame of all rows; a column of names that some table has no names in is one of names."""
    names = {
        field.name: field.type
        for table in tables
        for field in table.schema
        if pa.types.is_dictionary(field.type) and not pa.types.is_null(field.type.value_type)
    }
    for i, table in enumerate(tables):
        for at, field in enumerate(table.schema):
            if pa.types.is_dictionary(field.type) and pa.types.is_null(field.type.value_type) and field.name in names:
                tables[i] = tables[i].set_column(at, field.name, pa.nulls(len(table), names[field.name]))
    frame: pd.DataFrame = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().to_pandas()
    return frame


def run_end(cell: Cell) -> float:
    """When the run stopped, s."""
    return float(cell.summary["window"]["run_end"]) if cell.summary else math.nan


def window_of(cell: Cell) -> Window:
    """The window of requests that the cell's metrics count."""
    found = cell.summary["window"] if cell.summary else {}
    begin, end = found.get("begin"), found.get("end")
    return Window(-math.inf if begin is None else begin, math.inf if end is None else end, bool(found.get("whole", True)))


def with_latencies(requests: pd.DataFrame, run_end: float) -> pd.DataFrame:
    """The same rows with ttft, tpot, e2e, normalised_latency, wait (see metrics.py); NaN where undefined or not ended."""
    columns = {}
    for name, sample in samples(requests, run_end).items():
        columns[name] = np.full(len(requests), np.nan)
        columns[name][sample.rows[~sample.open]] = sample.values[~sample.open]
    return requests.assign(**columns)


def num_requests(cell: Cell) -> int:
    """Requests of the cell, 0 where it is not known."""
    return int(cell.fields.get("num_requests") or cell.metrics.get("num_counted") or 0)


def num_plans(cell: Cell) -> int:
    """Plans that the scheduler of a complete cell made; one may stand for many equal steps."""
    return int(pq.read_metadata(cell.folder / "steps.parquet").num_rows)


def marks(cell: Cell) -> list[str]:
    """What the cell's provenance warns of: transfer of a predictor, results outside the cost model's range, ..."""
    found = cell.provenance.get("marks") or ()
    return [found] if isinstance(found, str) else [str(mark) for mark in found]


def is_oracle(cell: Cell) -> bool:
    """Whether the predictor was handed the true lengths."""
    info = cell.provenance.get("predictor")
    declared = isinstance(info, Mapping) and bool(info.get("oracle"))
    return declared or "oracle" in str(cell.fields.get("predictor"))


def _cells(source: Any) -> list[Cell]:
    if isinstance(source, list) and source and all(isinstance(item, Cell) for item in source):
        return source
    return read_cells(source)


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_cell(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("summary.json", "requests.parquet", ".hydra"))


def _from_manifest(root: Path, manifest: Iterable[Mapping[str, Any]]) -> Iterator[Cell]:
    for row in manifest:
        folder = Path(row["folder"]) if row.get("folder") else root / str(row["cell"])
        yield _read(folder if folder.is_absolute() or folder.is_dir() else root / folder, row)


def _read(folder: Path, row: Mapping[str, Any] | None = None) -> Cell:
    row = row or {}
    listed = row.get("cell")
    fields = dict(listed) if isinstance(listed, Mapping) else dict(row.get("fields") or {})
    name = listed if isinstance(listed, str) else folder.name
    expected = str(row.get("hash", ""))
    if row.get("status") == "failed":
        return Cell(name, expected, "failed", folder, fields)
    path = folder / "summary.json"
    if not path.exists():
        return Cell(name, expected, "missing", folder, fields)
    summary = json.loads(path.read_text())
    found = str(summary.get("provenance", {}).get("config_hash", ""))
    if expected and found and expected != found:
        return Cell(name, expected, "stale", folder, fields)
    return Cell(name, expected or found, OK, folder, {**fields, **summary["cell"]}, summary)
