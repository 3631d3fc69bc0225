"""Stability: does what is in the system grow for as long as requests come?

A cell that cannot keep up may meet every SLO when its horizon is short, so latencies alone do not show it. Two things are
followed: the number of requests, and the output tokens that they ask for. Shortest-first keeps the number nearly still in an
overload, by leaving a few long ones behind; their tokens pile up under any order. Both are looked at only within the window,
so that filling up an empty engine is not taken for growth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .latencies import is_status
from .run import Run
from .windows import Window

LIMIT = 0.02  # share of what comes that may stay behind
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """share: of what comes in the window, how much stays behind: 0 keeps up, 1 completes nothing. arrivals: requests in the
    window. cv: coefficient of variation of what comes in the time of one arrival."""

    share: float
    arrivals: int
    cv: float = 1.0


def in_system(arrival: ArrayLike, ended: ArrayLike, weight: ArrayLike | None = None) -> Floats:
    """The weight (default: the number) of requests in the system just after each arrival, itself included, in order of arrival
    (N,). ended: s, NaN not ended."""
    at, gone = np.asarray(arrival, dtype=np.float64), np.asarray(ended, dtype=np.float64)
    each = np.ones(len(at)) if weight is None else np.asarray(weight, dtype=np.float64)
    gone = np.where(np.isnan(gone), math.inf, gone)
    coming, going = np.argsort(at, kind="stable"), np.argsort(gone, kind="stable")
    left = np.concatenate(([0.0], np.cumsum(each[going])))
    return np.asarray(np.cumsum(each[coming]) - left[np.searchsorted(gone[going], at[coming], side="right")])


def growth(run: Run) -> dict[str, Growth]:
    """What is in the system -> its growth: of `requests` and of `tokens`, by the least-squares line through what is there at
    the arrivals that the run's window counts."""
    requests, window = run.requests, run.summary["window"]
    arrival, ended = (requests[name].to_numpy(np.float64) for name in ("arrival", "ended"))
    counts = Window(-math.inf if window["begin"] is None else window["begin"], window["end"] or math.inf).counts
    inside, counted = counts(arrival), counts(np.sort(arrival))
    gaps = run.summary["metrics"].get("arrival_cv")
    cv, tokens = 1.0 if gaps is None else float(gaps), _tokens(run)
    out = {}
    for name, weight, spread in (("requests", np.ones(len(arrival)), 0.0), ("tokens", tokens, _cv(tokens[inside]))):
        there, came = in_system(arrival, ended, weight)[counted], float(weight[inside].sum())
        out[name] = Growth(_slope(there) * len(there) / came if came else 0.0, len(there), math.hypot(cv, spread))
    return out


def pooled(growths: Sequence[Growth]) -> Growth:
    """The growth of several runs of one cell together."""
    n = sum(one.arrivals for one in growths)
    share = sum(one.share * one.arrivals for one in growths) / n if n else 0.0
    return Growth(share, n, math.sqrt(sum(one.arrivals * one.cv**2 for one in growths) / n) if n else 1.0)


def allowed(found: Growth, limit: float = LIMIT) -> float:
    """The share that may stay behind before that is called growth: `limit`, or what chance alone makes the arrivals differ by
    (a standard deviation), whichever is more."""
    return max(limit, max(found.cv, 1.0) / math.sqrt(found.arrivals)) if found.arrivals else limit


def is_steady(growths: Sequence[Growth], limit: float = LIMIT) -> bool:
    """Whether several runs of one cell, pooled, grow by no more than is allowed."""
    found = pooled(growths)
    return found.share <= allowed(found, limit)


def describe(limit: float = LIMIT) -> str:
    """The rule in words."""
    return (
        "steady: over the window, seeds pooled, the lines through the requests in the system and through their output tokens "
        f"rise by at most {limit:g} of those that come, or by one standard deviation of what chance lets come"
    )


def _tokens(run: Run) -> Floats:
    """Output tokens of each request (N,); of those cut off, whose length nobody saw, at least the mean of the others."""
    tokens = run.requests["output_len"].to_numpy(np.float64)
    finished = is_status(run.requests, "finished")
    mean = float(tokens[finished].mean()) if finished.any() else 1.0
    return np.asarray(np.where(finished, tokens, np.maximum(tokens, mean)))


def _slope(values: Floats) -> float:
    if len(values) < 2:
        return 0.0
    x = np.arange(len(values)) - (len(values) - 1) / 2
    return float((x * values).sum() / (x * x).sum())


def _cv(values: Floats) -> float:
    return float(values.std() / values.mean()) if len(values) else 0.0
