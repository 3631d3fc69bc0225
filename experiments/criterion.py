"""Criterion: what a probe of a capacity search must hold, judged over the requests of all its seeds together.

Pooled, because "99 % of requests" is about requests: the mean of seeds' percentiles is the percentile of nothing. Seeds that
disagree are shown beside, never averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .histogram import Histogram
from .latencies import samples
from .run import Run
from .stability import LIMIT, Growth, allowed, growth, is_steady, pooled
from .statistics import QUANTILES, quantile
from .windows import Window

NAMES = ("ttft", "tpot", "itl", "e2e", "normalised_latency", "wait")


@dataclass(frozen=True)
class Criterion:
    """target: least share of requests that meet every SLO they have; None: not asked. at_most: NAME_p50, _p99 or _p999 of a
    latency -> limit (s). limit: growth of what is in the system, as a share of what comes, see stability.py."""

    target: float | None = 0.99
    at_most: Mapping[str, float] = field(default_factory=dict)
    limit: float = LIMIT

    def __post_init__(self) -> None:
        if self.target is None and not self.at_most:
            raise ValueError("nothing to hold: give criterion.target, or criterion.at_most such as {ttft_p99: 1.0}")
        if self.target is not None and not (_number(self.target) and 0 < self.target <= 1):
            raise ValueError(f"criterion.target={self.target!r} must be a share within (0, 1]")
        if not (_number(self.limit) and 0 < self.limit < 1):
            raise ValueError(f"criterion.growth={self.limit!r} must be a share within (0, 1)")
        known = [f"{name}_{label}" for name in NAMES for label in QUANTILES]
        for key, value in self.at_most.items():
            if key not in known:
                raise ValueError(f"criterion.at_most.{key}: choose of {', '.join(known)}")
            if not (_number(value) and value > 0):
                raise ValueError(f"criterion.at_most.{key}={value!r} must be a number of seconds > 0")

    def describe(self) -> str:
        wanted = [] if self.target is None else [f"{100 * self.target:g} % of requests meet every SLO they have"]
        wanted += [f"{key} <= {value:g} s" for key, value in self.at_most.items()]
        return ", ".join([*wanted, "no queue grows"]) + " (requests of all seeds pooled)"


@dataclass(frozen=True)
class Verdict:
    """What came of one probe. passes: everything holds; `reasons` say what does not. attainment: pooled, None without an SLO;
    by_seed: attainment of each run. growth: of `requests` and `tokens` in the system, as shares of what comes; growth_by_seed:
    the same of each run; growth_allowed: what they were held to."""

    passes: bool
    steady: bool
    attainment: float | None
    by_seed: tuple[float | None, ...]
    growth: Mapping[str, float]
    growth_by_seed: tuple[Mapping[str, float], ...]
    growth_allowed: Mapping[str, float]
    percentiles: Mapping[str, float | None]
    reasons: tuple[str, ...]


def judge(runs: Sequence[Run], criterion: Criterion) -> Verdict:
    """The verdict over runs of one cell that differ in their seed. Pure.

    Raises ValueError when nothing can be said: no SLO for a target, or too few requests for a percentile.
    """
    reasons = []
    attainment, by_seed = _attainment(runs)
    if criterion.target is not None:
        if attainment is None:
            raise ValueError(f"criterion.target={criterion.target}: no counted request has an SLO, or none has been decided")
        if attainment < criterion.target:
            rejected = sum(run.metrics["num_rejected"] or 0 for run in runs)
            door = f", {rejected:,} requests rejected at the door" if rejected else ""
            reasons.append(f"attainment {attainment:.4g} < {criterion.target:g}{door}")
    found = {}
    for key, limit in criterion.at_most.items():
        value, known = _percentile(runs, key)
        found[key] = value
        if not value <= limit:
            reasons.append(f"{key} {value:.4g} s > {limit:g} s")
        elif not known:
            reasons.append(f"{key} is at least {value:.4g} s: some have not ended")
    growths = [growth(run) for run in runs]
    together: dict[str, Growth] = {kind: pooled([one[kind] for one in growths]) for kind in growths[0]}
    bounds = {kind: allowed(one, criterion.limit) for kind, one in together.items()}
    rising = [kind for kind in together if not is_steady([one[kind] for one in growths], criterion.limit)]
    over = [f"{kind} by {together[kind].share:.1%}" for kind in rising]
    if over:
        reasons.append(f"not steady: what is in the system grows, {' and '.join(over)} of those that come")
    return Verdict(
        passes=not reasons,
        steady=not over,
        attainment=attainment,
        by_seed=by_seed,
        growth={kind: one.share for kind, one in together.items()},
        growth_by_seed=tuple({kind: one.share for kind, one in each.items()} for each in growths),
        growth_allowed=bounds,
        percentiles=found,
        reasons=tuple(reasons),
    )


def _attainment(runs: Sequence[Run]) -> tuple[float | None, tuple[float | None, ...]]:
    by_seed = tuple(run.metrics.get("attainment") for run in runs)
    there = [run.metrics for run, value in zip(runs, by_seed, strict=True) if value is not None]
    decided = sum(int(metrics["attainment_n"] or 0) for metrics in there)
    met = sum(int(metrics["num_met"] or 0) for metrics in there)
    return (met / decided if decided else None), tuple(None if value is None else float(value) for value in by_seed)


def _percentile(runs: Sequence[Run], key: str) -> tuple[float, bool]:
    """Its value (s) over the counted requests of all runs, and whether it is exact rather than a lower bound."""
    name, _, label = key.rpartition("_")
    if name == "itl":
        gaps = Histogram()
        for run in runs:
            gaps.merge(run.itl)
        found = gaps.quantile(label)
    else:
        parts = [samples(_counted(run), run.summary["window"]["run_end"])[name] for run in runs]
        values, unended = (np.concatenate([getattr(part, field) for part in parts]) for field in ("values", "open"))
        found = quantile(values, label, unended)
    if found.value is None:
        raise ValueError(f"criterion.at_most.{key}: {found.flag}; raise num_requests")
    return found.value, not found.lower_bound


def _counted(run: Run) -> Any:
    window = run.summary["window"]
    begin = -math.inf if window["begin"] is None else window["begin"]
    end = math.inf if window["end"] is None else window["end"]
    return run.requests[Window(begin, end).counts(run.requests["arrival"].to_numpy())]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
