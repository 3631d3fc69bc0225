"""Table: any CSV, Parquet or JSONL file (also .gz) as a workload, by named columns and declared units.

Nothing is guessed: a time column without its unit is refused, and so is every value that is not a time or a length, by row
and value. Rows are numbered from 0, headers and blank lines not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..dataset import Dataset
from .columns import TIME_UNITS, in_time_order, kept, lengths, numbers, refuse, times
from .files import find_file
from .reading import read_columns

# fields that must be numbers, and the least each may be
NUMBERS = {
    "priority": None, "weight": 0.0, "turn": 0.0, "gap": 0.0, "timeout": 0.0, "slo_ttft": 0.0, "slo_tpot": 0.0, "slo_e2e": 0.0,
}  # fmt: skip


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
    if (arrival is None) != (time_unit is None):
        raise ValueError(f"arrival column {arrival!r} and time_unit {time_unit!r} go together: one of them is missing")
    if time_unit is not None and time_unit not in (*TIME_UNITS, "datetime"):
        raise ValueError(f"time_unit {time_unit!r} must be one of {', '.join(TIME_UNITS)}, datetime")
    file = find_file(path)
    extra = dict(columns or {})
    asked = [c for c in (prompt_len, output_len, arrival, prompt, group, censored, *extra.values()) if c is not None]
    table = read_columns(file, list(dict.fromkeys(asked)), limit)
    lens = {what: lengths(table[what]) for what in (prompt_len, output_len)}
    seconds = recorded = starts = None
    if arrival is not None and time_unit is not None:
        seconds, recorded = times(table[arrival], time_unit)
    keep, dropped = kept(lens, zero_len, prompt_len, max_prompt_len)
    order = np.flatnonzero(keep)
    notes: dict[str, Any] = {"file": file.name, "lengths": f"{prompt_len}, {output_len}"}
    if seconds is not None and time_unit is not None:
        order, starts, changed = in_time_order(seconds, recorded, order, time_unit)
        notes.update(changed)
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
        arrival=starts,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        columns={field: _field(field, table[column])[order] for field, column in extra.items()},
        notes=notes,
    )


def _field(field: str, column: pd.Series) -> np.ndarray[Any, Any]:
    if field in NUMBERS:
        numbers(column, NUMBERS[field])
    return np.asarray(column)


def _flags(column: pd.Series) -> np.ndarray[Any, np.dtype[np.bool_]]:
    refuse(column, ~column.isin([True, False]), "not true or false")
    return np.asarray(column, dtype=np.bool_)


def _texts(column: pd.Series, order: np.ndarray[Any, Any]) -> list[str]:
    refuse(column, [not isinstance(v, str) for v in column], "not a text")
    return [str(column.iloc[i]) for i in order]
