"""Draw: a Dataset, an arrival process and a seed make a Workload.

Cells are compared in pairs: one seed gives the same rows and the same pattern of arrivals at every load and for every
policy, and a longer draw begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from .arrivals.replay import Replay
from .arrivals.summary import describe_arrivals
from .dataset import Dataset, Floats, Ints, Workload


class Arrivals(Protocol):
    """An arrival process."""

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
) -> Workload:
    """`n` requests (all rows when None) arriving at `rate` requests/s, and `extra` more after them, as many as there are rows.

    Rows are drawn whole, without replacement, by the stream "rows" of `seed`; arrivals by the stream "arrivals". resample:
    take the rows again, in another order, as often as n needs; `notes` then count the repeats. A replay keeps the rows and
    the order of the file. `notes` record the process and what it came to. Raises ValueError when the rows do not suffice.
    """
    have = len(dataset)
    n = have if n is None else n
    if n < 1:
        raise ValueError(f"num_requests {n} must be at least 1")
    if n > have and not (resample and not isinstance(arrivals, Replay)):
        how = "a replay cannot repeat them" if isinstance(arrivals, Replay) else "resample=true repeats rows"
        raise ValueError(f"dataset {dataset.name} has {have} rows, {n} requests are asked for: {how}")
    extra = extra if resample else min(extra, have - n)
    rng = stream(seed, "arrivals")
    if isinstance(arrivals, Replay):
        rows: Ints = np.arange(n + extra, dtype=np.int64)
        times = arrivals.of(dataset).times(n + extra, rate, rng)
    else:
        rows = _rows(have, n + extra, stream(seed, "rows"))
        if extra and rate is not None and getattr(arrivals, "normalised", False):  # the first n fill n / rate seconds
            more = arrivals.times(extra, rate, stream(seed, "further arrivals"))
            times = np.concatenate((arrivals.times(n, rate, rng), n / rate + more))
        else:
            times = arrivals.times(n + extra, rate, rng)
    notes = {
        "draw": {"seed": seed, "num_requests": n, "num_repeats": max(n - have, 0)},
        "arrivals": {**arrivals.describe(), "asked_rate": rate, **describe_arrivals(times[:n])},
    }
    return Workload(dataset, rows, times, notes)


def _rows(have: int, n: int, rng: np.random.Generator) -> Ints:
    parts = [rng.permutation(have) for _ in range(-(-n // have))]
    return np.concatenate(parts)[:n].astype(np.int64)
