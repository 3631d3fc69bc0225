"""Latencies: per-request samples from the times that were recorded, and what a request would take alone.

A request that has not ended gives a lower bound, and says so; nobody who was there is left out for being slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from lengthwise.engine.simulated.cost import CostModel
from lengthwise.sched import Chunk

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Idle = Callable[[NDArray[Any], NDArray[Any]], Floats]  # (prompt_len, output_len) -> e2e alone, s

OPEN = ("unfinished", "failed", "timeout")  # statuses whose latencies are lower bounds


@dataclass(frozen=True)
class Sample:
    """One metric over requests: values (n,) in s, and open (n,): the true value is at least the one given. `rows` (n,) says
    whose they are: positions in the table they were taken from."""

    values: Floats
    open: Mask
    rows: NDArray[np.int64]


def is_status(requests: pd.DataFrame, *names: str) -> Mask:
    return np.asarray(requests["status"].isin(names), dtype=np.bool_)


def last_seen(requests: pd.DataFrame, run_end: float) -> Floats:
    """When each request was last known of (s): its end, else the end of the run, never before its arrival."""
    out = requests["finish"].to_numpy(np.float64, copy=True)
    for column in (requests["ended"].to_numpy(np.float64) if "ended" in requests else None, np.full(len(out), run_end)):
        if column is not None:
            out = np.where(np.isnan(out), column, out)
    return np.asarray(np.maximum(out, requests["arrival"].to_numpy(np.float64)))


def samples(requests: pd.DataFrame, run_end: float, idle: Idle | None = None) -> dict[str, Sample]:
    """Per-request latencies of `requests` (columns of requests.parquet): name -> Sample. Pure.

    num_first: tokens that came at once with the first (1 where there is no such column); they have no gaps of their own. Where
    answers came of requests that nobody scheduled, the server does not tell when it does, and nothing is known of waiting.
    """
    column = {name: requests[name].to_numpy() for name in ("arrival", "first_scheduled", "first_token", "prompt_len")}
    arrival, first = column["arrival"].astype(np.float64), column["first_token"].astype(np.float64)
    n, cap = requests["output_len"].to_numpy(np.int64), requests["max_new_tokens"].to_numpy(np.int64)
    finished, still = is_status(requests, "finished"), is_status(requests, *OPEN)
    last = last_seen(requests, run_end)
    e2e = last - arrival
    emitted, scheduled = ~np.isnan(first), ~np.isnan(column["first_scheduled"])
    some = finished | still
    untold = bool(((emitted | finished) & ~scheduled).any())
    lead = requests["num_first"].to_numpy(np.int64) if "num_first" in requests else 1

    def pick(values: Floats, there: Mask, is_open: Mask) -> Sample:
        rows = np.flatnonzero(there)
        return Sample(values[rows], is_open[rows], rows)

    tokens = np.where(finished, n, cap)  # an open one may still generate up to its cap: the least a ratio can be
    decode = np.where(emitted, last - first, 0.0)
    out = {
        "ttft": pick(np.where(emitted, first - arrival, e2e), some & (emitted | still), still & ~emitted),
        "tpot": pick(decode / np.maximum(tokens - lead, 1), some & (emitted | still) & (tokens > lead), still),
        "e2e": pick(e2e, some, still),
        "normalised_latency": pick(e2e / np.maximum(tokens, 1), some & (tokens > 0), still),
        "wait": pick(np.where(scheduled, column["first_scheduled"] - arrival, e2e), some & (not untold), still & ~scheduled),
    }
    if idle is not None:
        alone = np.full(len(n), math.nan)
        rows = np.flatnonzero(some & (tokens > 0))
        alone[rows] = idle(column["prompt_len"][rows], tokens[rows])
        there = alone > 0  # not where prefill is free and one token is all: alone it takes no time
        out["slowdown"] = pick(np.divide(e2e, alone, out=np.full(len(n), math.nan), where=there), some & there, still)
    return out


def idle_latency(cost: CostModel, prompt_len: ArrayLike, output_len: ArrayLike, token_budget: int) -> Floats:
    """E2E (N,) in s of requests alone on an idle engine: prefill in chunks of `token_budget`, then n - 1 decode steps.

    A statistic: equal to a simulation of one request up to rounding.
    """
    p, n = np.asarray(prompt_len, dtype=np.int64), np.asarray(output_len, dtype=np.int64)
    if not p.size:
        return np.empty(0)
    if min(p.min(), n.min()) < 1:
        raise ValueError(f"prompt_len {p.min()} and output_len {n.min()} must be at least 1")
    end = int((p + n).max())
    step = np.zeros(end)  # seconds of a decode step of one row that attends so many tokens
    at = int(p.min()) + 1
    while at < end:
        a, c, limit = cost.decode_line(1, at)
        close = end if limit >= end else max(at + 1, math.ceil(limit))
        step[at:close] = a + c * np.arange(at, close)
        at = close
    before = np.concatenate(([0.0], np.cumsum(step)))  # before[c]: all steps with fewer than c tokens attended
    decode = before[p + n] - before[np.minimum(p + 1, p + n)]

    lens, which = np.unique(p, return_inverse=True)
    full = [0.0]  # seconds of the first k whole chunks
    prefill = np.empty(len(lens))
    for i, length in enumerate(lens.tolist()):
        whole = (length - 1) // token_budget
        while len(full) <= whole:
            start = (len(full) - 1) * token_budget
            full.append(full[-1] + cost.step(0, 0, [Chunk(None, start, token_budget, False)]))  # type: ignore[arg-type]
        start = whole * token_budget
        prefill[i] = full[whole] + cost.step(0, 0, [Chunk(None, start, length - start, True)])  # type: ignore[arg-type]
    return np.asarray(prefill[which] + decode)


def tokens_inside(requests: pd.DataFrame, begin: float, end: float, run_end: float) -> int:
    """Output tokens in [begin, end) when only requests were recorded: evenly spaced from first to last token."""
    first = requests["first_token"].to_numpy(np.float64)
    n = requests["output_len"].to_numpy(np.int64)
    gap = (last_seen(requests, run_end) - first) / np.maximum(n - 1, 1)

    def before(x: float) -> Floats:
        if math.isinf(x):
            return np.where(np.isnan(first), 0, n if x > 0 else 0).astype(np.float64)
        steps = np.divide(x - first, gap, out=np.full(len(n), math.inf), where=gap > 0)
        return np.where(first < x, np.minimum(np.ceil(np.maximum(steps - 1e-9, 1e-9)), n), 0.0)

    return int((before(end) - before(begin)).sum())
