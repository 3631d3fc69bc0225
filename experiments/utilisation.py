"""Utilisation: how much of the device's operations and bandwidth the steps used, by the cost model's sizes, not by measurement.

work / (peak x duration), with the work of `engine.simulated.work.Work`: weights read once a step, KV read for every token
attended and written for every token computed, products and attention of every token; activations, the head's products, padding
rows and communication are not counted. A lower bound of what a device would show, and for a fitted roofline never above 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from lengthwise.engine.simulated.cost import CostModel
from lengthwise.engine.simulated.work import Work

NAMES = ("flops_utilisation", "bandwidth_utilisation")
NEEDED = ("start", "end", "num_steps", "num_decode", "context_tokens", "prefill_tokens", "prefill_pairs")


def why_not(cost: CostModel | None) -> str | None:
    """Why utilisation cannot be told with this cost model; None where it can."""
    if cost is None:
        return "no cost model"
    return None if cost.work is not None else f"{type(cost).__name__.lower()} states no work (its node's `work`)"


def utilisation(steps: pd.DataFrame, cost: CostModel) -> pd.DataFrame:
    """Per plan: flops, bytes, flops_utilisation, bandwidth_utilisation; indexed as `steps`. NaN where a plan took no time.

    steps: rows of steps.parquet; prefill_pairs: sum over a plan's chunks of length x (start + length / 2). Raises ValueError
    naming a column that is absent, or a cost model that states no work.
    """
    work, rows = _work(cost), _columns(steps)
    flops, moved = _amounts(work, rows)
    duration = rows["end"] - rows["start"]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [np.where(duration > 0, amount / (peak * duration), math.nan) for amount, peak in _pairs(work, flops, moved)]
    return pd.DataFrame({"flops": flops, "bytes": moved, **dict(zip(NAMES, shares, strict=True))}, index=steps.index)


def window_utilisation(
    steps: pd.DataFrame, cost: CostModel | None, begin: float = -math.inf, end: float = math.inf, seconds: float | None = None
) -> tuple[dict[str, float | None], str | None]:
    """({flops_utilisation, bandwidth_utilisation}, why they are None) over [begin, end) s, idle time counting as unused.

    A plan that crosses a border counts by the share of its time inside. seconds: what to divide by (default: end - begin, with
    an open border taken from the steps). None with the reason where the cost model states no work, or no time passed.
    """
    nothing: dict[str, float | None] = dict.fromkeys(NAMES)
    reason = why_not(cost)
    if reason is not None or cost is None or cost.work is None:
        return nothing, reason
    rows = _columns(steps)
    if not len(steps):
        return nothing, "no steps"
    begin, end = max(begin, float(rows["start"].min())), min(end, float(rows["end"].max()))
    seconds = end - begin if seconds is None else seconds
    if not seconds > 0:
        return nothing, "no time passed"
    duration = rows["end"] - rows["start"]
    inside = np.clip(np.minimum(rows["end"], end) - np.maximum(rows["start"], begin), 0.0, None)
    share = np.divide(inside, duration, out=np.zeros(len(duration)), where=duration > 0)
    flops, moved = _amounts(cost.work, rows)
    totals = [float((amount * share).sum()) / (peak * seconds) for amount, peak in _pairs(cost.work, flops, moved)]
    return dict(zip(NAMES, totals, strict=True)), None


def _work(cost: CostModel) -> Work:
    if cost.work is None:
        raise ValueError(f"utilisation: {why_not(cost)}")
    return cost.work


def _columns(steps: pd.DataFrame) -> dict[str, Any]:
    missing = [name for name in NEEDED if name not in steps]
    if missing:
        raise ValueError(f"steps lack the columns {missing}")
    return {name: steps[name].to_numpy(np.float64) for name in NEEDED}


def _amounts(work: Work, rows: dict[str, Any]) -> tuple[Any, Any]:
    sizes = (rows["num_decode"], rows["context_tokens"], rows["prefill_tokens"])
    return work.flops(*sizes, rows["prefill_pairs"], rows["num_steps"]), work.bytes_moved(*sizes, rows["num_steps"])


def _pairs(work: Work, flops: Any, moved: Any) -> list[tuple[Any, float]]:
    return [(flops, work.peak_flops), (moved, work.bandwidth)]
