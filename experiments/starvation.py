"""Starvation and fairness: who waited, who was passed by whom, and how evenly clients were served.

Overtaking is counted exactly: j passes i if a_j > a_i and j is first scheduled or resumed while i is eligible and not running.
All starts are sorted by time once; a wavelet matrix over the arrivals then answers "how many starts in this stretch of time
belong to later arrivals" for every wait at once, in O(N log N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Overtakes:
    """Per request i (N,): `count` of the starts that passed it (a request that resumes can pass again), `lead` the greatest
    a_j - a_i among them in s (0 when none), `over_bound` the passes with a_j - a_i >= the declared lead (None: no bound)."""

    count: Ints
    lead: Floats
    over_bound: Ints | None = None


def overtakes(
    arrival: ArrayLike,
    eligible: ArrayLike,
    first_scheduled: ArrayLike,
    *,
    ended: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    left: ArrayLike | None = None,
    back: ArrayLike | None = None,
    bound: ArrayLike | None = None,
) -> Overtakes:
    """Count overtaking for N requests; all times in s.

    arrival, eligible, first_scheduled (N,): NaN in the last where never scheduled; such a request waits until `ended` (N,),
    or for ever. rows, left, back (P,): preemptions, by request index; back NaN where it never came back. A wait is
    [from, to): a start at the instant i becomes eligible or is preempted passes it, one in the plan that starts i does not.
    bound (N,): declared leads, seconds; only requests with a_j < a_i + bound_i may pass i.
    """
    a = np.asarray(arrival, dtype=np.float64)
    begin = np.asarray(eligible, dtype=np.float64)
    first = np.asarray(first_scheduled, dtype=np.float64)
    n = a.size
    gone = np.full(n, math.inf) if ended is None else np.where(np.isnan(e := np.asarray(ended, dtype=np.float64)), math.inf, e)
    who = np.empty(0, np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
    off = np.empty(0) if left is None else np.asarray(left, dtype=np.float64)
    on = np.empty(0) if back is None else np.asarray(back, dtype=np.float64)
    if n == 0:
        return Overtakes(np.zeros(0, np.int64), np.zeros(0), None if bound is None else np.zeros(0, np.int64))

    # starts, by time
    starter = np.concatenate((np.flatnonzero(~np.isnan(first)), who[~np.isnan(on)]))
    start = np.concatenate((first[~np.isnan(first)], on[~np.isnan(on)]))
    by_time = np.argsort(start, kind="stable")
    start, start_arrival = start[by_time], a[starter[by_time]]

    # waits [from, to) of request `waiter`, as stretches [lo, hi) of the starts
    waiter = np.concatenate((np.arange(n), who))
    to = np.concatenate((np.where(np.isnan(first), gone, first), np.where(np.isnan(on), gone[who], on)))
    lo = np.searchsorted(start, np.concatenate((begin, off)), side="left")
    hi = np.maximum(np.searchsorted(start, to, side="left"), lo)

    levels = np.unique(a)
    rank = np.searchsorted(levels, start_arrival)
    passes = _count_at_least(rank, lo, hi, np.searchsorted(levels, a[waiter], side="right"), len(levels))
    count = np.bincount(waiter, weights=passes, minlength=n).astype(np.int64)
    lead = np.zeros(n)
    np.maximum.at(lead, waiter, _range_max(start_arrival, lo, hi) - a[waiter])
    over = None
    if bound is not None:
        limit = np.searchsorted(levels, a + np.asarray(bound, dtype=np.float64), side="left")
        limit = np.maximum(limit, np.searchsorted(levels, a, side="right"))  # nobody but later arrivals passes
        beyond = _count_at_least(rank, lo, hi, limit[waiter], len(levels))
        over = np.bincount(waiter, weights=beyond, minlength=n).astype(np.int64)
    return Overtakes(count, lead, over)


def _count_at_least(values: Ints, lo: Ints, hi: Ints, least: Ints, size: int) -> Ints:
    """For each query q: how many of values[lo_q:hi_q] are >= least_q; values in [0, size). A wavelet matrix, top bit first."""
    lo, hi = lo.copy(), hi.copy()
    out = np.zeros(len(lo), np.int64)
    for bit in reversed(range(max(int(size).bit_length(), 1))):
        ones = (values >> bit) & 1
        ones_before = np.concatenate(([0], np.cumsum(ones)))
        num_zeros = len(values) - int(ones_before[-1])
        lo_ones, hi_ones = ones_before[lo], ones_before[hi]
        up = ((least >> bit) & 1).astype(np.bool_)
        out += np.where(up, 0, hi_ones - lo_ones)  # a one where `least` has a zero: greater, whatever follows
        lo = np.where(up, num_zeros + lo_ones, lo - lo_ones)
        hi = np.where(up, num_zeros + hi_ones, hi - hi_ones)
        values = np.concatenate((values[ones == 0], values[ones == 1]))
    return out + (hi - lo)  # those equal to `least`


def _range_max(values: Floats, lo: Ints, hi: Ints) -> Floats:
    """max(values[lo_q:hi_q]) for each query, -inf for an empty one. A sparse table of which one level lives at a time."""
    out = np.full(len(lo), -math.inf)
    width = hi - lo
    level, table = 0, values
    while True:
        span = 1 << level
        mine = (width >= span) & (width < 2 * span)
        out[mine] = np.maximum(table[lo[mine]], table[hi[mine] - span])
        if 2 * span > len(values):
            return out
        table = np.maximum(table[:-span], table[span:])
        level += 1


# --- tables -----------------------------------------------------------------------------------------------------------


def ccdf(values: ArrayLike) -> tuple[Floats, Floats]:
    """Sorted distinct values w and P(W > w), both (m,). With waits that have not ended, a lower bound of it."""
    x, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    return x, 1.0 - np.cumsum(counts) / max(counts.sum(), 1)


def by_decile(values: ArrayLike, size: ArrayLike) -> pd.DataFrame:
    """Mean and greatest of values (n,), NaN left out, by decile of size (n,): decile 1 the shortest; equal sizes together.

    Columns decile, n, least_size, greatest_size, mean, max. A decile without rows (all sizes equal) is left out.
    """
    x, s = np.asarray(values, dtype=np.float64), np.asarray(size, dtype=np.float64)
    there = ~np.isnan(x)
    x, s = x[there], s[there]
    if not x.size:
        return pd.DataFrame({name: [] for name in ("decile", "n", "least_size", "greatest_size", "mean", "max")})
    edges = np.quantile(s, np.arange(1, 10) / 10)
    decile = 1 + np.searchsorted(edges, s, side="left")
    groups = pd.DataFrame({"decile": decile, "size": s, "value": x}).groupby("decile")
    return groups.agg(
        n=("value", "size"),
        least_size=("size", "min"),
        greatest_size=("size", "max"),
        mean=("value", "mean"),
        max=("value", "max"),
    ).reset_index()


def by_class(wait: ArrayLike, classes: ArrayLike, over_bound: ArrayLike | None = None) -> pd.DataFrame:
    """Greatest wait (s) and number of starved requests per class (n,): priority, client, size band.

    starved: requests passed at least once from beyond their declared bound; NaN where none is declared.
    """
    w = np.asarray(wait, dtype=np.float64)
    starved = np.full(w.size, math.nan) if over_bound is None else (np.asarray(over_bound) > 0).astype(np.float64)
    groups = pd.DataFrame({"class": np.asarray(classes), "wait": w, "starved": starved}).groupby("class", sort=True)
    return groups.agg(
        n=("wait", "size"), max_wait=("wait", "max"), num_starved=("starved", lambda x: x.sum(min_count=1))
    ).reset_index()


def jain(shares: ArrayLike) -> float:
    """Jain's index (sum x)^2 / (k sum x^2) of k >= 1 shares >= 0: 1 when all are equal, 1 / k when one has everything."""
    x = np.asarray(shares, dtype=np.float64)
    if x.size == 0 or (x < 0).any() or not np.isfinite(x).all():
        raise ValueError(f"Jain's index wants one finite share >= 0 or more, got {x}")
    squares = float((x * x).sum())
    return 1.0 if squares == 0 else float(x.sum()) ** 2 / (x.size * squares)
