"""Dataset and Workload: rows of (prompt, output length), and the requests drawn from them with arrival times.

A loader returns a Dataset; an arrival process and a seed make it a Workload. Prompt and output stay joined: rows are drawn
whole, never column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Dataset:
    """Rows that can be asked of an engine. All columns have N rows; lengths in tokens, times in seconds.

    censored: the true answer is at least output_len long (it was cut off); never an exact label. group: rows of one
    conversation, or with near-duplicate prompts, share a group and are never split between training and test.
    unit: how lengths were counted. arrival: the trace's own arrival times, from 0, sorted, if it has any.
    dropped: reason -> number of source rows left out. columns: further per-row request fields (client, priority, ...).
    """

    name: str
    prompt_len: Ints
    output_len: Ints
    unit: str
    source: str
    licence: str
    censored: NDArray[np.bool_] | None = None
    group: Ints | None = None
    prompts: Sequence[str] | None = None
    arrival: Floats | None = None
    max_new_tokens: int = 2048
    dropped: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.prompt_len)
        columns = {
            "output_len": self.output_len, "censored": self.censored, "group": self.group, "prompts": self.prompts,
            "arrival": self.arrival, **self.columns,
        }  # fmt: skip
        for name, column in columns.items():
            if column is not None and len(column) != n:
                raise ValueError(f"dataset {self.name}: {name} has {len(column)} rows, prompt_len has {n}")
        if n == 0:
            raise ValueError(f"dataset {self.name} is empty; dropped: {dict(self.dropped)}")
        for name, lens in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            if lens.min() < 1:
                row = int(lens.argmin())
                raise ValueError(f"dataset {self.name}: {name} of row {row} is {lens[row]}, the least is 1")

    def __len__(self) -> int:
        return len(self.prompt_len)


@dataclass(frozen=True)
class Workload:
    """N requests: `rows` into `dataset`, `arrival` in seconds, sorted, from 0. Request i has rid i."""

    dataset: Dataset
    rows: Ints
    arrival: Floats
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows.shape != self.arrival.shape:
            raise ValueError(f"{len(self.rows)} rows and {len(self.arrival)} arrivals")
        bad = np.flatnonzero(~np.isfinite(self.arrival) | (self.arrival < 0))
        if bad.size:
            raise ValueError(f"arrival of row {bad[0]} is {self.arrival[bad[0]]}: not a finite number >= 0")
        back = np.flatnonzero(np.diff(self.arrival) < 0)
        if back.size:
            raise ValueError(f"arrival of row {back[0] + 1} is before that of row {back[0]}: sort them")

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, n: int) -> Workload:
        """The first n requests."""
        return self if n == len(self) else Workload(self.dataset, self.rows[:n], self.arrival[:n], self.notes)

    @property
    def prompt_len(self) -> Ints:
        return self.dataset.prompt_len[self.rows]

    @property
    def output_len(self) -> Ints:
        """The truth, for executors and oracles only; for a censored row the observed length."""
        return self.dataset.output_len[self.rows]
