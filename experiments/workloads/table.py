"""Table: any CSV, Parquet or JSONL file (also .gz) as a workload, by named columns and declared units.

Nothing is guessed: a time column without its unit is refused, and so is every value that is not a time or a length, by row
and value. Rows are numbered from 0, headers and blank lines not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..dataset import Dataset, Floats, Ints
from .files import find_file
from .reading import read_columns

TIME_UNITS = {"s": 1e0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # per second


def load(
    path: str,
    *,
    prompt_len: str,
    output_len: str,
    unit: str,
    arrival: str | None = None,
    time_unit: str | None = None,
    prompt: str | None = None,
    group: str | None = None,
    censored: str | None = None,
    columns: Mapping[str, str] | None = None,
    zero_len: str = "error",
    max_prompt_len: int | None = None,
    limit: int | None = None,
    name: str | None = None,
    source: str | None = None,
    licence: str = "not stated",
    max_new_tokens: int = 2048,
) -> Dataset:
    """The rows of a file as a Dataset. `path` as in `find_file`; nothing is downloaded.

    prompt_len, output_len, arrival, prompt (text), group, censored (true or false): names of the file's columns. columns:
    further request fields, field -> column (client, session, priority, weight, timeout in s, max_new_tokens, ...). unit:
    what the lengths count, such as "llama-2 tokens". time_unit: s, ms, us or ns of a numeric arrival column, or datetime of
    a text one. zero_len: what to do with rows of length 0 (failed calls): "error" or "drop", counted. max_prompt_len: leave
    out longer prompts, counted. limit: only the first rows of the file.

    Arrivals are moved to start at 0 (`notes["arrival_offset"]`) and sorted, ties in file order. Raises FileNotFoundError,
    or ValueError naming the column, or the row and its value.
    """
    if not unit:
        raise ValueError("declare unit: what the lengths count, such as 'llama-2 tokens'")
    if zero_len not in ("error", "drop"):
        raise ValueError(f"zero_len {zero_len!r} must be error or drop")
    if (arrival is None) != (time_unit is None):
        raise ValueError(f"arrival column {arrival!r} and time_unit {time_unit!r} go together: one of them is missing")
    if time_unit is not None and time_unit not in (*TIME_UNITS, "datetime"):
        raise ValueError(f"time_unit {time_unit!r} must be one of {', '.join(TIME_UNITS)}, datetime")
    file = find_file(path)
    extra = dict(columns or {})
    asked = [c for c in (prompt_len, output_len, arrival, prompt, group, censored, *extra.values()) if c is not None]
    table = read_columns(file, list(dict.fromkeys(asked)), limit)
    if table.empty:
        raise ValueError(f"{file.name} has no rows")

    lens = {what: _lengths(table[what]) for what in (prompt_len, output_len)}
    times = offset = None
    if arrival is not None and time_unit is not None:
        times, offset = _times(table[arrival], time_unit)
    keep, dropped = _kept(lens, zero_len, prompt_len, max_prompt_len)
    order = np.flatnonzero(keep)
    notes: dict[str, Any] = {"file": file.name, "lengths": f"{prompt_len}, {output_len}"}
    if times is not None and order.size:
        num_back = int((np.diff(times[order]) < 0).sum())
        order = order[np.argsort(times[order], kind="stable")]
        first = times[order[0]]
        times = times[order] - first
        notes.update(arrival_offset=_plus(offset, first), time_unit=time_unit, num_out_of_order=num_back)
    rows = table.iloc[order]
    return Dataset(
        name=name or file.name.split(".")[0],
        prompt_len=lens[prompt_len][order],
        output_len=lens[output_len][order],
        unit=unit,
        source=source or file.name,
        licence=licence,
        censored=None if censored is None else _flags(table[censored])[order],
        group=None if group is None else pd.factorize(rows[group], use_na_sentinel=False)[0].astype(np.int64),
        prompts=None if prompt is None else _texts(table[prompt], order),
        arrival=times,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        columns={field: rows[column].to_numpy() for field, column in extra.items()},
        notes=notes,
    )


# --- columns ----------------------------------------------------------------------------------------------------------


def _refuse(column: pd.Series, bad: Any, rule: str) -> None:
    """Raise ValueError for the first row that is True in `bad`, with its value."""
    rows = np.flatnonzero(np.asarray(bad))
    if rows.size:
        value = column.iloc[rows[0]]
        more = f" (and {rows.size - 1} more rows)" if rows.size > 1 else ""
        raise ValueError(
            f"{column.name} of row {rows[0]} is {'NaN (missing)' if _absent(value) else repr(value)}: {rule}{more}"
        )


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value) or value is pd.NaT or value is pd.NA


def _lengths(column: pd.Series) -> Ints:
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    _refuse(column, ~np.isfinite(numbers) | (numbers < 0) | (numbers != np.floor(numbers)), "not a whole number of tokens >= 0")
    return np.asarray(numbers, dtype=np.int64)


def _times(column: pd.Series, unit: str) -> tuple[Floats, Any]:
    """(seconds since the first row's time, that time as recorded). Differences are taken before scaling: no digit is lost."""
    if unit == "datetime":
        if pd.api.types.is_numeric_dtype(column):
            raise ValueError(f"{column.name} is numeric, not text: declare time_unit s, ms, us or ns")
        stamps = pd.to_datetime(column, errors="coerce", utc=True).astype("datetime64[ns, UTC]")
        _refuse(column, stamps.isna(), "not a date and time")
        ticks = stamps.astype("int64").to_numpy()
        return (ticks - ticks[0]) / 1e9, str(stamps.iloc[0].tz_localize(None).isoformat())
    numbers = pd.to_numeric(column, errors="coerce")
    if pd.api.types.is_datetime64_any_dtype(column):
        raise ValueError(f"{column.name} holds dates: declare time_unit datetime")
    floats = numbers.astype("float64")
    _refuse(column, ~np.isfinite(floats) | (floats < 0), f"not a finite time >= 0 in {unit}")
    values = numbers.to_numpy() if pd.api.types.is_integer_dtype(numbers) else floats.to_numpy()
    return (values - values[0]) / TIME_UNITS[unit], float(values[0] / TIME_UNITS[unit])


def _plus(offset: Any, first: float) -> Any:
    """The recorded time at which the replay begins: s, or a date when that is how it was recorded."""
    if isinstance(offset, str):
        return (pd.Timestamp(offset) + pd.Timedelta(first, unit="s")).isoformat() if first else offset
    return offset + float(first)


def _kept(
    lens: Mapping[str, Ints], zero_len: str, prompt_len: str, max_prompt_len: int | None
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], dict[str, int]]:
    keep = np.ones(len(lens[prompt_len]), dtype=bool)
    dropped: dict[str, int] = {}
    for column, values in lens.items():
        zero = np.flatnonzero(values == 0)
        if zero.size and zero_len == "error":
            raise ValueError(f"{zero.size} rows with zero {column}, the first is row {zero[0]}: zero_len=drop leaves them out")
        if zero.size:
            dropped[f"rows_zero_{column}"] = int(zero.size)
            keep[zero] = False
    if max_prompt_len is not None:
        over = keep & (lens[prompt_len] > max_prompt_len)
        dropped[f"rows_prompt_over_{max_prompt_len}"] = int(over.sum())
        keep &= ~over
    return keep, dropped


def _flags(column: pd.Series) -> np.ndarray[Any, np.dtype[np.bool_]]:
    _refuse(column, ~column.isin([True, False]), "not true or false")
    return np.asarray(column, dtype=np.bool_)


def _texts(column: pd.Series, order: np.ndarray[Any, Any]) -> list[str]:
    _refuse(column, [not isinstance(v, str) for v in column], "not a text")
    return [str(column.iloc[i]) for i in order]
