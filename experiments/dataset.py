"""Dataset and Workload: rows of (prompt, output length), and the requests drawn from them with arrival times.

A loader returns a Dataset; an arrival process and a seed make it a Workload. Prompt and output stay joined: rows are drawn
whole, never column by column. What the two carry (prefix hashes, sessions, units) is what a saved workload keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.predictors.prompts import Prompts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
COLLECTING = (
    "`lengthwise collect model=smollm2 workload=prompts workload.answers=null samples=4 kv=prefix` collects some, "
    "workload.answers=FILE names them"
)
UNANSWERED = "unanswered"  # the unit of rows that stand for prompts alone, whose output_len is 1


@dataclass(frozen=True)
class Dataset:
    """Rows that can be asked of an engine. All columns have N rows; lengths in tokens, times in seconds.

    censored: the true answer is at least output_len long (it was cut off); never an exact label. group: rows of one
    conversation, or with near-duplicate prompts, share a group and are never split between training and test.
    unit: how lengths were counted. arrival: the trace's own arrival times, from 0, sorted, if it has any.
    dropped: reason -> number of source rows left out. columns: further per-row request fields (client, session, turn, program,
    priority, weight, timeout, slo_ttft, slo_tpot, slo_e2e), and `gap`: seconds between the end of a session's previous turn and
    this one (thinking, a tool at work).

    block_hashes: per row, the names of its prompt's pieces of hash_tokens tokens, in order, chained: two rows with the same
    name at a place share the prompt up to the end of that piece. Only whole pieces can be reused. A `range` names the pieces
    of a conversation by their place, answers included, for as far as it will ever go. samples (N, k): all measured output
    lengths of a row's prompt, of which output_len is one. prompt_ids: per row, the prompt as tokens of the model that is asked.
    answers_before: per row, the tokens of each earlier answer in its conversation, oldest first: known when it is asked.
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
    block_hashes: Sequence[Sequence[int]] | None = None
    hash_tokens: int = 0
    samples: Ints | None = None
    prompt_ids: Sequence[Sequence[int]] | None = None
    answers_before: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        n = len(self.prompt_len)
        columns = {
            "output_len": self.output_len, "censored": self.censored, "group": self.group, "prompts": self.prompts,
            "arrival": self.arrival, "block_hashes": self.block_hashes, "samples": self.samples,
            "prompt_ids": self.prompt_ids, "answers_before": self.answers_before, **self.columns,
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
        asked = np.asarray(self.columns.get("max_new_tokens", 1))
        if asked.dtype.kind not in "iu" or asked.min() < 1:
            numbers = np.array([np.nan if value is None else value for value in asked.ravel().tolist()], dtype=np.float64)
            bad = np.flatnonzero(~(numbers >= 1) | (numbers != np.floor(numbers)))
            if bad.size:
                row = int(bad[0])
                raise ValueError(f"dataset {self.name}: max_new_tokens of row {row} is {numbers[row]}, not a whole number >= 1")
        if self.block_hashes is not None and self.hash_tokens < 1:
            raise ValueError(f"dataset {self.name}: block_hashes of pieces of hash_tokens={self.hash_tokens}, the least is 1")

    def __len__(self) -> int:
        return len(self.prompt_len)

    def asked(self, rows: ArrayLike | None = None) -> Prompts:
        """What a predictor may see of the rows (n,), by default of all N."""
        client = self.columns.get("client")
        names = None if client is None else [None if name is None or name != name else str(name) for name in client]
        whole = Prompts(self.prompt_len.astype(np.float64), self.prompts, names, self.answers_before)
        return whole if rows is None else whole.take(rows)

    @property
    def cut(self) -> NDArray[np.bool_]:
        """`censored`, all False where nothing is known of it."""
        return np.zeros(len(self), dtype=bool) if self.censored is None else np.asarray(self.censored, dtype=bool)

    def refuse_unanswered(self) -> None:
        """Raise ValueError where nobody has answered the prompts, so that there are no lengths to learn from."""
        if self.unit == UNANSWERED:
            raise ValueError(f"workload {self.name} has prompts and no answers: {COLLECTING}")


@dataclass(frozen=True)
class Workload:
    """N requests: `rows` into `dataset`, `arrival` in seconds, sorted, from 0. Request i has rid i.

    columns: request fields drawn for these N requests (client, priority, ...); they go before the dataset's. after (N,): the
    request that i waits for, a lower index, or -1; it arrives `gap` (N,) seconds after that one has ended, and `arrival` is
    then the earliest it can (as if all before it took no time). users: a closed loop of so many users, each of whom takes the
    next request in order, `gap` seconds after its last one has ended.
    """

    dataset: Dataset
    rows: Ints
    arrival: Floats
    notes: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    after: Ints | None = None
    gap: Floats | None = None
    users: int | None = None

    def __post_init__(self) -> None:
        n = len(self.rows)
        if self.rows.shape != self.arrival.shape:
            raise ValueError(f"{len(self.rows)} rows and {len(self.arrival)} arrivals")
        for name, column in {**self.columns, "after": self.after, "gap": self.gap}.items():
            if column is not None and len(column) != n:
                raise ValueError(f"{name} has {len(column)} rows, there are {n} requests")
        if self.after is not None:
            bad = np.flatnonzero(self.after >= np.arange(n))
            if bad.size:
                raise ValueError(f"request {bad[0]} waits for request {self.after[bad[0]]}, which does not come before it")
        if self.gap is not None:
            bad = np.flatnonzero(~np.isfinite(self.gap) | (self.gap < 0))
            if bad.size:
                raise ValueError(f"gap of request {bad[0]} is {self.gap[bad[0]]} s: not a finite number >= 0")
        if (self.after is not None or self.users is not None) and self.gap is None:
            raise ValueError("requests that wait for others need `gap`, seconds")
        if self.users is not None and not (self.after is None and self.users >= 1):
            raise ValueError(f"a closed loop of {self.users} users: at least 1, and no `after` beside it")
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
        if n == len(self):
            return self
        return replace(
            self,
            rows=self.rows[:n],
            arrival=self.arrival[:n],
            columns={name: column[:n] for name, column in self.columns.items()},
            after=None if self.after is None else self.after[:n],
            gap=None if self.gap is None else self.gap[:n],
        )

    @property
    def is_open(self) -> bool:
        """Whether every arrival is known beforehand; else some wait for answers."""
        return self.after is None and self.users is None

    def column(self, name: str) -> NDArray[Any] | None:
        """A request field (N,): as drawn for these requests, else as the dataset has it by row; None when neither does."""
        if name in self.columns:
            return self.columns[name]
        by_row = self.dataset.columns.get(name)
        return None if by_row is None else np.asarray(by_row)[self.rows]

    @property
    def prompt_len(self) -> Ints:
        return self.dataset.prompt_len[self.rows]

    @property
    def output_len(self) -> Ints:
        """The truth, for executors and oracles only; for a censored row the observed length."""
        return self.dataset.output_len[self.rows]
