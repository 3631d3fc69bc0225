"""Draw: a Dataset, an arrival process and a seed make a Workload.

Cells are compared in pairs: one seed gives the same rows and the same pattern of arrivals at every load and for every
policy, and a longer draw begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from .arrivals.replay import Replay
from .arrivals.summary import describe_arrivals
from .dataset import Dataset, Floats, Ints, Workload
from .population import Population


class Arrivals(Protocol):
    """An arrival process. One whose requests wait for answers has `lay(dataset, rows, rate, rng) -> Workload` instead of
    `times`, and `order(dataset, n, rng) -> rows` where rows may not be drawn one by one."""

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times in seconds, sorted, from 0; `rate` in requests/s."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Its name and parameters, for the record."""
        ...


def stream(seed: int, name: str) -> np.random.Generator:
    """The random generator of one named purpose: streams of different names are independent, and one more shifts none."""
    if seed < 0:
        raise ValueError(f"seed {seed} must not be negative")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(crc32(name.encode()),)))


def draw(
    dataset: Dataset,
    arrivals: Arrivals,
    n: int | None,
    rate: float | None,
    seed: int,
    *,
    resample: bool = False,
    extra: int = 0,
    population: Population | None = None,
) -> Workload:
    """`n` requests (all rows when None) arriving at `rate` requests/s, and `extra` more after them, as many as there are rows.

    Rows are drawn whole, without replacement, by the stream "rows" of `seed`; arrivals by the stream "arrivals". resample:
    take the rows again, in another order, as often as n needs; `notes` then count the repeats. A replay keeps the rows and
    the order of the file; requests that wait for answers (sessions, closed loops) come without extra ones. population: who
    asks, drawn by the stream "population". `notes` record the process and what it came to. Raises ValueError when the rows do
    not suffice.
    """
    have, replays = len(dataset), isinstance(arrivals, Replay)
    n = have if n is None else n
    if n < 1:
        raise ValueError(f"num_requests {n} must be at least 1")
    may_repeat = not replays and not hasattr(arrivals, "order")
    if n > have and not (resample and may_repeat):
        how = "resample=true repeats rows" if may_repeat else f"a {arrivals.describe()['process']} cannot repeat them"
        raise ValueError(f"dataset {dataset.name} has {have} rows, {n} requests are asked for: {how}")
    rng, row_rng = stream(seed, "arrivals"), stream(seed, "rows")
    waits = hasattr(arrivals, "lay") or (replays and ("after" in dataset.columns or dataset.notes.get("users") is not None))
    extra = 0 if waits else extra if resample and may_repeat else min(extra, have - n)
    if isinstance(arrivals, Replay):
        workload = arrivals.of(dataset).workload(dataset, n, rate, rng, extra)
    elif hasattr(arrivals, "lay"):
        rows = arrivals.order(dataset, n, row_rng) if hasattr(arrivals, "order") else _rows(have, n, row_rng)
        workload = arrivals.lay(dataset, rows, rate, rng)
    else:
        rows = _rows(have, n + extra, row_rng)
        if extra and rate is not None and getattr(arrivals, "normalised", False):  # the first n fill n / rate seconds
            more = arrivals.times(extra, rate, stream(seed, "further arrivals"))
            times = np.concatenate((arrivals.times(n, rate, rng), n / rate + more))
        else:
            times = arrivals.times(n + extra, rate, rng)
        workload = Workload(dataset, rows, times)
    # where requests wait for answers nobody knows yet what they come to
    came_to = describe_arrivals(workload.arrival[:n]) if workload.is_open else {"rate": None}
    notes: dict[str, Any] = {
        "draw": {"seed": seed, "num_requests": n, "num_repeats": max(n - have, 0)},
        "arrivals": {**arrivals.describe(), "asked_rate": rate, **came_to},
        **workload.notes,
    }
    columns = dict(workload.columns)
    if population is not None:
        columns |= population.columns(workload, stream(seed, "population"))
        notes["population"] = population.describe(columns)
    return replace(workload, notes=notes, columns=columns)


def _rows(have: int, n: int, rng: np.random.Generator) -> Ints:
    parts = [rng.permutation(have) for _ in range(-(-n // have))]
    return np.concatenate(parts)[:n].astype(np.int64)
