"""Histogram: token gaps of a whole run in a few numbers, fine enough for percentiles and fit to be pooled over cells."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .statistics import LEAST, QUANTILES, Quantile

Floats = NDArray[np.float64]


class Histogram:
    """Weighted log-spaced histogram of durations (s): bins 1 % wide from 1 microsecond, sum, least and greatest exact.

    Percentiles interpolate within a bin: off by at most 1 %. Histograms of one kind add up, so that cells can be pooled.
    """

    LOW = 1e-6
    RATIO = 1.01
    SIZE = 2600  # up to about 1.7e5 s; what is beyond is counted in the last bin

    def __init__(self) -> None:
        self.counts = np.zeros(self.SIZE)
        self.total = 0.0
        self.least, self.greatest = math.inf, -math.inf

    @property
    def n(self) -> int:
        return round(float(self.counts.sum()))

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else math.nan

    def add(self, values: Floats, weights: NDArray[np.integer] | Floats) -> None:
        """Count values (m,) with weights (m,) >= 0. Mutates self."""
        there = weights > 0
        if not there.any():
            return
        v, w = values[there], weights[there]
        bins = np.log(np.maximum(v, self.LOW) / self.LOW) / math.log(self.RATIO)
        self.counts += np.bincount(np.clip(bins.astype(np.int64), 0, self.SIZE - 1), weights=w, minlength=self.SIZE)
        self.total += float((v * w).sum())
        self.least, self.greatest = min(self.least, float(v.min())), max(self.greatest, float(v.max()))

    def merge(self, other: Histogram) -> None:
        """Add what `other` has counted. Mutates self."""
        self.counts += other.counts
        self.total += other.total
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)

    def quantile(self, label: str) -> Quantile:
        if self.n < LEAST[label]:
            return Quantile(None, label, self.n, "histogram", f"n={self.n}, {label} wants {LEAST[label]}")
        below = np.cumsum(self.counts)
        target = QUANTILES[label] * below[-1]
        i = int(np.searchsorted(below, target))
        share = (target - (below[i] - self.counts[i])) / self.counts[i]
        value = self.LOW * self.RATIO ** (i + share)
        return Quantile(min(max(value, self.least), self.greatest), label, self.n, "histogram")

    def to_json(self) -> dict[str, object]:
        used = np.flatnonzero(self.counts)
        n = self.n
        return {
            "low": self.LOW, "ratio": self.RATIO, "bins": used.tolist(), "counts": self.counts[used].tolist(),
            "total": self.total, "least": self.least if n else None, "greatest": self.greatest if n else None,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Histogram:
        if (data["low"], data["ratio"]) != (cls.LOW, cls.RATIO):
            raise ValueError(f"histogram of bins ({data['low']}, {data['ratio']}), expected ({cls.LOW}, {cls.RATIO})")
        out = cls()
        out.counts[np.asarray(data["bins"], dtype=np.int64)] = np.asarray(data["counts"], dtype=np.float64)
        out.total = float(data["total"])  # type: ignore[arg-type]
        if data["least"] is not None:
            out.least, out.greatest = float(data["least"]), float(data["greatest"])  # type: ignore[arg-type]
        return out
