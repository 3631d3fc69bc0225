"""Named columns out of a CSV, Parquet or JSONL file, as they stand there: no dates, no units guessed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd


def read_columns(file: Path, columns: list[str], limit: int | None, optional: Sequence[str] = ()) -> pd.DataFrame:
    """The named columns as the file has them, and those of `optional` that are there; a value that a JSONL line lacks is None.

    limit: only the first rows, at least 1. Raises ValueError on a missing column (naming those there are), on a file without
    rows and on a file type not known.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} must be at least 1 row")
    suffixes = [s.lower() for s in file.suffixes if s.lower() != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    read = READERS.get(kind)
    if read is None:
        raise ValueError(f"{file.name} is not one of {', '.join(READERS)} (or those with .gz)")
    table = read(file, limit)
    missing = [c for c in columns if c not in table.columns]
    if missing:
        raise ValueError(f"{file.name} has no column {missing[0]!r}; it has {', '.join(map(str, table.columns))}")
    if table.empty:
        raise ValueError(f"{file.name} has no rows")
    return table[[*columns, *(c for c in optional if c in table.columns)]].reset_index(drop=True)


def _read_csv(file: Path, limit: int | None) -> pd.DataFrame:
    try:
        return pd.read_csv(file, nrows=limit, low_memory=False)
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{file.name} is empty") from error


def _read_parquet(file: Path, limit: int | None) -> pd.DataFrame:
    table = pd.read_parquet(file)
    return table if limit is None else table.head(limit)


def _read_jsonl(file: Path, limit: int | None) -> pd.DataFrame:
    # Line by line: pandas' own reader takes a column called "timestamp" for dates and guesses its unit.
    opener = gzip.open if file.suffix.lower() == ".gz" else open
    records: list[dict[str, Any]] = []
    with opener(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            if limit is not None and len(records) >= limit:
                break
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file.name}: row {len(records)} is not JSON: {error.msg}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{file.name}: row {len(records)} is not an object: {line.strip()[:40]}")
            records.append(record)
    names = list(dict.fromkeys(key for record in records for key in record))
    # Whole numbers stay whole: a float column would round epoch times in ns.
    return pd.DataFrame({n: pd.Series([record.get(n) for record in records], dtype=object).infer_objects() for n in names})


READERS: dict[str, Callable[[Path, int | None], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
}
