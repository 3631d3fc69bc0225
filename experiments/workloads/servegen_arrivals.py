"""Arrivals of one ServeGen client: a renewal process whose rate and gaps change from window to window.

A gap is a stretch of expected arrivals: one that reaches over a border goes on in the next window, at that window's rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gamma, sqrt

import numpy as np
from scipy.special import gammaincc, gammainccinv

from ..arrivals.weibull import weibull_cv
from ..dataset import Floats

WINDOW = 600.0  # seconds
LEAST = 1e-300  # of a level, so that no gap is infinite


@dataclass(frozen=True)
class Window:
    """Part of one 10 min window: from `start` (s) to `end`, requests/s, and the family (gamma or weibull) and shape of gaps.

    Gaps have mean one. Of those that lie over a border, long ones are found more often, in proportion to their length:
    `level` is how many of them are longer, `gap` the length at that level.
    """

    start: float
    end: float
    rate: float
    family: str
    shape: float

    @property
    def cv(self) -> float:
        return 1.0 / sqrt(self.shape) if self.family == "gamma" else weibull_cv(self.shape)

    def gaps(self, n: int, rng: np.random.Generator) -> Floats:
        if self.family == "gamma":
            return rng.standard_gamma(self.shape, n) / self.shape
        return rng.weibull(self.shape, n) / gamma(1.0 + 1.0 / self.shape)

    def level(self, gap: float) -> float:
        if self.family == "gamma":
            return float(gammaincc(self.shape + 1.0, gap * self.shape))
        return float(gammaincc(1.0 + 1.0 / self.shape, (gap * gamma(1.0 + 1.0 / self.shape)) ** self.shape))

    def gap(self, level: float) -> float:
        level = max(level, LEAST)
        if self.family == "gamma":
            return float(gammainccinv(self.shape + 1.0, level)) / self.shape
        power = gammainccinv(1.0 + 1.0 / self.shape, level) ** (1.0 / self.shape)
        return float(power) / gamma(1.0 + 1.0 / self.shape)


def client_arrivals(windows: list[Window], rng: np.random.Generator) -> Floats:
    """Arrival times (s), sorted, of a client with these windows, in order.

    The process is in equilibrium throughout, so that each window gets its rate in the mean, however bursty it and the one
    before it are. It starts inside a gap. The gap that lies over a border becomes the new window's gap of the same level, and
    the share of it that is over stays the same; where the two windows have one law, that is the same gap. Time counts in
    expected arrivals: silent windows do not count.
    """
    found = [np.empty(0)]
    level, share = float(rng.random()), float(rng.random())  # of the gap over the border, and how much of it is to come
    for window in windows:
        gap = window.gap(level)
        expected = window.rate * (window.end - window.start)
        left = share * gap
        if left < expected:
            at = _points(window, left, expected, rng)
            num = int(np.searchsorted(at, expected))
            found.append(window.start + at[:num] / window.rate)
            left, gap = float(at[num]), float(at[num] - at[num - 1])
        level, share = window.level(gap), (left - expected) / gap
    return np.concatenate(found)


def _points(window: Window, first: float, end: float, rng: np.random.Generator) -> Floats:
    """Renewals from `first` on, on the axis of expected arrivals, at least one of them at or after `end`."""
    parts = [np.array([first])]
    while (last := float(parts[-1][-1])) < end:
        ahead = end - last
        n = ceil(ahead + 2.0 * window.cv * sqrt(ahead) + 4.0)
        parts.append(last + np.cumsum(window.gaps(n, rng)))
    return np.concatenate(parts)
