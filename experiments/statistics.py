"""Statistics: percentiles with their n, paired comparisons over seeds, and the share of a gap closed.

A number without its n, its method and its gaps is no result: everything here returns them together, and says so where n is
too small instead of giving a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}  # label -> level, and nowhere else
LEAST = {"p50": 1, "p99": 100, "p999": 20_000}  # samples below which a percentile is not shown
METHODS = {"linear": "linear", "nearest_rank": "inverted_cdf"}  # ours -> numpy's
LEVEL = 0.95  # of all intervals
WANTED_SEEDS = 5  # what the n/a rule of a gap wants; fewer are used and said


# --- percentiles ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantile:
    """A percentile of `n` pooled samples by `method`; value None where n is below `least`, with the reason in `flag`.

    lower_bound: some samples are only known to be at least their value, and the percentile is then ">= value".
    """

    value: float | None
    label: str
    n: int
    method: str = "linear"
    flag: str | None = None
    lower_bound: bool = False


def percentile(values: ArrayLike, level: float, method: str = "linear") -> float:
    """The `level` quantile (0..1) of values (n,), n >= 1, no NaN; within [min, max] by either method."""
    x = np.asarray(values, dtype=np.float64)
    if method not in METHODS:
        raise ValueError(f"percentile method {method!r}: choose {' or '.join(METHODS)}")
    if not 0.0 <= level <= 1.0:
        raise ValueError(f"quantile level {level} is not within [0, 1]")
    if x.size == 0 or np.isnan(x).any():
        raise ValueError(f"percentile of {x.size} values, {int(np.isnan(x).sum())} of them NaN")
    return float(np.quantile(x, level, method=METHODS[method]))  # type: ignore[call-overload]


def quantile(values: ArrayLike, label: str, open_: ArrayLike | None = None, method: str = "linear") -> Quantile:
    """Percentile `label` (p50, p99, p999) of values (n,). open_ (n,) bool: the true value is at least the one given."""
    x = np.asarray(values, dtype=np.float64)
    level, least = QUANTILES[label], LEAST[label]
    if x.size < least:
        return Quantile(None, label, x.size, method, f"n={x.size}, {label} wants {least}")
    value = percentile(x, level, method)
    if open_ is not None:
        bounds = x[np.asarray(open_, dtype=np.bool_)]
        # exact while no open sample lies below the upper of the two values interpolated between
        if bounds.size and bounds.min() < np.quantile(x, level, method="higher"):
            return Quantile(value, label, x.size, method, f">=: {bounds.size} of {x.size} have not ended", True)
    return Quantile(value, label, x.size, method)


def pooled(parts: Iterable[ArrayLike], label: str, method: str = "linear") -> Quantile:
    """The percentile of all samples of all parts (shards, seeds) together, never a mean of percentiles."""
    return quantile(np.concatenate([np.asarray(p, dtype=np.float64) for p in parts]), label, method=method)


# --- over seeds -------------------------------------------------------------------------------------------------------

Seeds = Mapping[int, float | None]  # seed -> value of the cell; None or NaN: the cell is missing or failed


@dataclass(frozen=True)
class Interval:
    """A mean over `n` seeds and its 95 % Student t interval (None with fewer than 2 seeds). missing: seeds without a value."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    missing: tuple[int, ...] = ()
    method: str = "95 % t interval over seeds"

    def holds(self, value: float) -> bool:
        """Is `value` within? True when there is no interval: nothing is shown to differ."""
        return self.low is None or self.high is None or self.low <= value <= self.high


@dataclass(frozen=True)
class Paired(Interval):
    """Mean of policy - baseline over common seeds; `relative` to the baseline's mean over the same seeds, < 0 is less."""

    relative: float | None = None


@dataclass(frozen=True)
class GapClosed:
    """Share of the baseline-to-oracle gap that a policy closes, with its jackknife interval; None with the reason."""

    share: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    missing: tuple[int, ...] = ()
    reason: str | None = None
    notes: tuple[str, ...] = field(default=())


def _common(columns: Sequence[Seeds]) -> tuple[list[int], tuple[int, ...]]:
    """Seeds for which all columns have a finite value, in order; and the others."""
    seeds = sorted(set().union(*columns))
    bad = tuple(s for s in seeds if any((v := c.get(s)) is None or not math.isfinite(v) for c in columns))
    return [s for s in seeds if s not in bad], bad


def _take(column: Seeds, seeds: Sequence[int]) -> Floats:
    return np.array([column[s] for s in seeds], dtype=np.float64)


def _student(degrees: int) -> float:
    """Half the width of a LEVEL interval, in standard errors."""
    from scipy.stats import t  # half a second of import

    return float(t.ppf(0.5 + LEVEL / 2, degrees))


def _t_interval(x: Floats) -> tuple[float, float | None, float | None]:
    mean = float(x.mean())
    if x.size < 2:
        return mean, None, None
    half = float(_student(x.size - 1) * x.std(ddof=1) / math.sqrt(x.size))
    return mean, mean - half, mean + half


def over_seeds(values: Seeds) -> Interval:
    """Mean and interval of one cell's metric over its seeds; missing ones are listed and not made up for."""
    seeds, bad = _common([values])
    if not seeds:
        return Interval(None, None, None, 0, bad)
    mean, low, high = _t_interval(_take(values, seeds))
    return Interval(mean, low, high, len(seeds), bad)


def paired(policy: Seeds, baseline: Seeds) -> Paired:
    """policy - baseline, paired by seed: same arrivals, prompts and lengths. Seeds that lack either are missing."""
    seeds, bad = _common([policy, baseline])
    if not seeds:
        return Paired(None, None, None, 0, bad)
    a, b = _take(policy, seeds), _take(baseline, seeds)
    mean, low, high = _t_interval(a - b)
    relative = mean / float(b.mean()) if b.mean() != 0 else None
    return Paired(mean, low, high, len(seeds), bad, relative=relative)


def paired_ratio(policy: Seeds, baseline: Seeds) -> Paired:
    """The geometric mean over seeds of policy / baseline, with the interval of its logarithm; values that are not above 0 count
    as missing. `relative` is the ratio less 1."""
    logs = [
        {seed: None if v is None or not v > 0.0 else math.log(v) for seed, v in column.items()} for column in (policy, baseline)
    ]
    found = paired(*logs)
    mean, low, high = (None if x is None else math.exp(x) for x in (found.mean, found.low, found.high))
    return Paired(mean, low, high, found.n, found.missing, relative=None if mean is None else mean - 1.0)


def gap_closed(baseline: Seeds, policy: Seeds, oracle: Seeds) -> GapClosed:
    """(baseline - policy) / (baseline - oracle) of means over common seeds, with a leave-one-seed-out jackknife interval.

    n/a (share None) when the paired 95 % interval of log(baseline / oracle) is not above 0, or there is none: no gap is shown.
    """
    seeds, bad = _common([baseline, policy, oracle])
    n = len(seeds)
    notes = (f"{n} seeds; {WANTED_SEEDS} or more are wanted",) if n < WANTED_SEEDS else ()
    if n < 2:
        return GapClosed(None, n=n, missing=bad, reason=f"n/a: {n} common seeds give no interval", notes=notes)
    base, mine, best = (_take(c, seeds) for c in (baseline, policy, oracle))
    if min(base.min(), best.min()) <= 0:
        raise ValueError(f"the gap rule takes logs: least values {base.min()} and {best.min()} must be > 0")
    log_ratio = np.log(base / best)
    _, low, high = _t_interval(log_ratio)
    assert low is not None and high is not None
    if low <= 0.0:
        shown = "holds 0: no gap shown" if high >= 0.0 else "is below 0: the oracle is worse"
        why = f"n/a: log(baseline / oracle) in [{low:.4f}, {high:.4f}] over {n} seeds {shown}"
        return GapClosed(None, n=n, missing=bad, reason=why, notes=notes)
    share = float((base - mine).mean() / (base - best).mean())
    rest = (n * base.mean() - base, n * mine.mean() - mine, n * best.mean() - best)  # (n - 1) x leave-one-out means
    left_out = (rest[0] - rest[1]) / (rest[0] - rest[2])
    error = math.sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum()))
    half = _student(n - 1) * error
    return GapClosed(share, share - half, share + half, n, bad, None, notes)
