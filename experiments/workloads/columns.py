"""Columns of a trace as arrays: lengths and times are checked value by value, and a refusal names the row and the value.

Rows are numbered from 0, headers and blank lines not counted. No unit is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..dataset import Floats, Ints

TIME_UNITS = {"s": 1e0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # per second
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def refuse(column: pd.Series, bad: Any, rule: str) -> None:
    """Raise ValueError for the first row that is True in `bad`, with its value."""
    rows = np.flatnonzero(np.asarray(bad))
    if rows.size:
        value = column.iloc[rows[0]]
        value = value.item() if isinstance(value, np.generic) else value
        more = f" (and {rows.size - 1} more rows)" if rows.size > 1 else ""
        raise ValueError(
            f"{column.name} of row {rows[0]} is {'NaN (missing)' if _absent(value) else repr(value)}: {rule}{more}"
        )


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value) or value is pd.NaT or value is pd.NA


def lengths(column: pd.Series) -> Ints:
    """Token counts (N,), 0 included. Raises ValueError on what is no whole number >= 0."""
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    refuse(column, ~np.isfinite(numbers) | (numbers < 0) | (numbers != np.floor(numbers)), "not a whole number of tokens >= 0")
    return np.asarray(numbers, dtype=np.int64)


def numbers(column: pd.Series, least: float | None = None) -> Floats:
    """Numbers (N,), NaN where there is none. Raises ValueError on what is no number, or below `least`."""
    found = np.asarray(pd.to_numeric(column, errors="coerce"), dtype=np.float64)
    refuse(column, np.isnan(found) & column.notna().to_numpy(), "not a number")
    if least is not None:
        refuse(column, found < least, f"below {least:g}")
    return found


def whole(column: pd.Series, least: int | None = None) -> Ints:
    """Whole numbers (N,). Raises ValueError on anything else, or below `least`."""
    found = np.asarray(pd.to_numeric(column, errors="coerce"), dtype=np.float64)
    bad = ~np.isfinite(found) | (found != np.floor(found)) | (False if least is None else found < least)
    refuse(column, bad, "not a whole number" + ("" if least is None else f" >= {least}"))
    return np.asarray(pd.to_numeric(column), dtype=np.int64)


def times(column: pd.Series, unit: str) -> tuple[Floats, Any]:
    """(seconds since the first row's time, that time as recorded). Differences are taken before scaling: no digit is lost.

    unit: s, ms, us, ns, or datetime for text: ISO 8601, with or without a fraction and a zone, mixed as they come.
    """
    if unit == "datetime":
        if pd.api.types.is_numeric_dtype(column):
            raise ValueError(f"{column.name} is numeric, not text: declare time_unit s, ms, us or ns")
        stamps = _stamps(column)
        refuse(column, stamps.isna(), "not a date and time")
        ticks = stamps.astype("int64").to_numpy()
        return (ticks - ticks[0]) / 1e9, str(stamps.iloc[0].tz_localize(None).isoformat())
    numbers = pd.to_numeric(column, errors="coerce")
    if pd.api.types.is_datetime64_any_dtype(column):
        raise ValueError(f"{column.name} holds dates: declare time_unit datetime")
    floats = numbers.astype("float64")
    refuse(column, ~np.isfinite(floats) | (floats < 0), f"not a finite time >= 0 in {unit}")
    values = numbers.to_numpy() if pd.api.types.is_integer_dtype(numbers) else floats.to_numpy()
    return (values - values[0]) / TIME_UNITS[unit], float(values[0] / TIME_UNITS[unit])


def _stamps(column: pd.Series) -> pd.Series:
    """Times of day in ns. A fraction that is 0 is often left out, so rows of one file differ in form; other formats than ISO
    8601 must be of one form."""
    stamps = pd.to_datetime(column, errors="coerce", utc=True, format="ISO8601")
    if stamps.isna().any():
        guessed = pd.to_datetime(column, errors="coerce", utc=True)
        stamps = guessed if guessed.isna().sum() < stamps.isna().sum() else stamps
    return stamps.astype("datetime64[ns, UTC]")


def in_time_order(seconds: Floats, recorded: Any, rows: Ints, unit: str) -> tuple[Ints, Floats, dict[str, Any]]:
    """(`rows` sorted by time, ties in file order; their arrivals from 0; notes on what was changed, none without rows)."""
    if not rows.size:
        return rows, np.zeros(0), {}
    num_back = int((np.diff(seconds[rows]) < 0).sum())
    rows = rows[np.argsort(seconds[rows], kind="stable")]
    first = seconds[rows[0]]
    notes = {"arrival_offset": plus(recorded, first), "time_unit": unit, "num_out_of_order": num_back}
    return rows, seconds[rows] - first, notes


def plus(recorded: Any, seconds: float) -> Any:
    """The recorded time `seconds` later: in s, or a date when that is how it was recorded."""
    if isinstance(recorded, str):
        return (pd.Timestamp(recorded) + pd.Timedelta(seconds, unit="s")).isoformat() if seconds else recorded
    return recorded + float(seconds)


def kept(lens: Mapping[str, Ints], zero_len: str, prompt_len: str, max_prompt_len: int | None) -> tuple[Flags, dict[str, int]]:
    """(rows to keep (N,), reason -> number left out). zero_len: "error" raises ValueError on a length of 0, "drop" counts it.

    lens: column name -> lengths; prompt_len: the name of the prompts' column, which max_prompt_len is about. Raises ValueError
    on another zero_len.
    """
    if zero_len not in ("error", "drop"):
        raise ValueError(f"zero_len {zero_len!r} must be error or drop")
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


def at_cap(output_len: Ints, max_output: int | None) -> Flags | None:
    """Rows whose output reached `max_output` tokens (N,): cut off there, so the true answer is at least that long (censored).

    None without a cap. Raises ValueError when an output is longer, since that was no cap.
    """
    if max_output is None:
        return None
    over = np.flatnonzero(output_len > max_output)
    if over.size:
        raise ValueError(f"{over.size} outputs are longer than max_output={max_output}, the longest {output_len.max()}")
    return np.asarray(output_len == max_output, dtype=np.bool_)


def cap_notes(max_output: int | None, censored: Flags | None) -> dict[str, Any]:
    """What a Dataset's notes say of `at_cap`."""
    return {"max_output": max_output, "censored": 0 if censored is None else int(censored.sum())}
