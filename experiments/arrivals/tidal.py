"""Tidal arrivals: a rate that goes up and down with the time of day, random around it.

Gaps of mean one are laid on the axis of expected arrivals and mapped back to time, so all loads share their random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gamma import Gamma
from .renewal import Floats, check_rate
from .weibull import Weibull

NUM_PIECES = 1440  # straight pieces of the sinusoid: one a minute of a day, within 3e-6 of the mean rate
GAPS: dict[str, type[Gamma] | type[Weibull]] = {"gamma": Gamma, "weibull": Weibull}


@dataclass(frozen=True)
class Tidal:
    """The curve, by exactly one of:

    peak_over_trough: a sinusoid, greatest over least rate (>= 1); its trough is the start of the period, its peak the middle.
    profile: relative rates (>= 0) at equal distances over the period, such as 24 for a day, joined by straight lines, the last
    to the first.

    period: seconds. phase: where in the period time 0 lies, a share in [0, 1). cv: of the gaps on the axis of expected
    arrivals, 1 is a Poisson process of changing rate; gaps: their family, gamma or weibull.
    """

    peak_over_trough: float | None = None
    profile: Sequence[float] | None = None
    period: float = 86400.0
    phase: float = 0.0
    cv: float = 1.0
    gaps: str = "gamma"

    def __post_init__(self) -> None:
        curve = {"peak_over_trough": self.peak_over_trough, "profile": self.profile}
        if sum(value is not None for value in curve.values()) != 1:
            raise ValueError(f"give peak_over_trough or profile, one of them: {curve}")
        if self.peak_over_trough is not None and not 1.0 <= self.peak_over_trough < float("inf"):
            raise ValueError(f"peak_over_trough {self.peak_over_trough} must be a finite number >= 1")
        if self.profile is not None:
            levels = np.asarray(self.profile, dtype=np.float64)
            if not levels.size or not np.all(np.isfinite(levels) & (levels >= 0)) or not levels.any():
                raise ValueError(f"profile {list(self.profile)} must be finite numbers >= 0, one of them above 0")
        if not 0 < self.period < float("inf"):
            raise ValueError(f"period {self.period} must be a finite number above 0 (s)")
        if not 0 <= self.phase < 1:
            raise ValueError(f"phase {self.phase} is not within [0, 1)")
        if self.gaps not in GAPS:
            raise ValueError(f"gaps {self.gaps!r} must be one of {', '.join(GAPS)}")
        GAPS[self.gaps](cv=self.cv)  # raises on a CV it cannot have

    def levels(self) -> Floats:
        """The curve at equal distances over a period, first value again at its end; its mean is 1."""
        if self.profile is not None:
            curve = np.asarray(self.profile, dtype=np.float64)
        else:
            assert self.peak_over_trough is not None
            swing = (self.peak_over_trough - 1.0) / (self.peak_over_trough + 1.0)
            curve = 1.0 - swing * np.cos(2.0 * np.pi * np.arange(NUM_PIECES) / NUM_PIECES)
        curve = curve / curve.mean()  # of a closed curve of straight pieces, the mean of its corners
        return np.concatenate((curve, curve[:1]))

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s), sorted. rate: mean over a period, requests/s; another one keeps curve, period and random
        numbers, so the same requests come sooner or later."""
        expected = GAPS[self.gaps](cv=self.cv).times(n, 1.0, rng)  # arrivals expected until each one
        curve = self.levels()
        width = 1.0 / (len(curve) - 1)
        ends = np.concatenate(([0.0], np.cumsum((curve[:-1] + curve[1:]) * (width / 2.0))))
        rounds, within = np.divmod(expected / (check_rate(rate) * self.period) + _area(curve, ends, self.phase), ends[-1])
        last = np.flatnonzero(np.diff(ends))[-1]  # rounding may put a point on the very end of the round
        piece = np.minimum(np.searchsorted(ends, within, side="right") - 1, last)
        low, high, area = curve[piece], curve[piece + 1], within - ends[piece]
        root = low + np.sqrt(np.maximum(low * low + 2.0 * (high - low) * area / width, 0.0))
        inside = np.divide(2.0 * area, root, out=np.zeros(n), where=root > 0)  # low x + (high - low) x^2 / 2 width = area
        share = rounds + piece * width + np.minimum(inside, width) - self.phase
        return np.maximum.accumulate(np.maximum(share, 0.0) * self.period)

    def describe(self) -> dict[str, Any]:
        curve = self.levels()
        return {
            "process": "tidal poisson" if self.cv == 1.0 else f"tidal {self.gaps}",
            "period": self.period,
            "phase": self.phase,
            "cv_on_expected_axis": self.cv,
            "peak_over_mean": float(curve.max()),
            "trough_over_mean": float(curve.min()),
        }


def _area(curve: Floats, ends: Floats, share: float) -> float:
    """What lies below the curve up to `share` of the period."""
    pieces = len(curve) - 1
    piece = min(int(share * pieces), pieces - 1)
    x = share - piece / pieces
    slope = (curve[piece + 1] - curve[piece]) * pieces
    return float(ends[piece] + curve[piece] * x + slope * x * x / 2.0)
