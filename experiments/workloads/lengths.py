"""Length distributions for synthetic workloads, each by its inverse distribution function.

Taking uniforms instead of a generator lets two columns be drawn jointly: correlated uniforms give correlated lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log1p, pi, sin, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def quantile(self, u: Floats) -> Floats:
        """The length at each level u in (0, 1): not decreasing in u, not yet rounded."""
        ...


@dataclass(frozen=True)
class Constant:
    """Every length is `value` tokens."""

    value: float

    def __post_init__(self) -> None:
        _at_least("value", self.value, 1.0)

    def quantile(self, u: Floats) -> Floats:
        return np.full(len(u), float(self.value))


@dataclass(frozen=True)
class Uniform:
    """Whole lengths from `least` to `most` tokens, both included, equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _at_least("least", self.least, 1.0)
        _at_least("most", self.most, self.least)

    def quantile(self, u: Floats) -> Floats:
        return self.least + np.floor(u * (self.most - self.least + 1))


@dataclass(frozen=True)
class Exponential:
    """Exponential with mean `mean` tokens."""

    mean: float

    def __post_init__(self) -> None:
        _at_least("mean", self.mean, 1.0)

    def quantile(self, u: Floats) -> Floats:
        return -self.mean * np.log1p(-u)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal with mean `mean` tokens and coefficient of variation `cv` > 0."""

    mean: float
    cv: float

    def __post_init__(self) -> None:
        _at_least("mean", self.mean, 1.0)
        if not 0 < self.cv < float("inf"):
            raise ValueError(f"cv {self.cv} must be above 0")

    def quantile(self, u: Floats) -> Floats:
        from scipy.special import ndtri

        sigma = sqrt(log1p(self.cv**2))
        return np.asarray(self.mean * exp(-(sigma**2) / 2) * np.exp(sigma * ndtri(u)), dtype=np.float64)


@dataclass(frozen=True)
class Pareto:
    """Pareto: P(L > x) = (least / x)^alpha for x >= `least` tokens; its mean is finite for alpha > 1."""

    alpha: float
    least: float

    def __post_init__(self) -> None:
        _at_least("least", self.least, 1.0)
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha {self.alpha} must be above 0")

    def quantile(self, u: Floats) -> Floats:
        return self.least * np.exp(-np.log1p(-u) / self.alpha)


@dataclass(frozen=True)
class Empirical:
    """Linear between measured quantiles: `levels` increasing from 0 to 1, `values` tokens, not decreasing."""

    levels: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        q, v = np.asarray(self.levels, dtype=np.float64), np.asarray(self.values, dtype=np.float64)
        if q.shape != v.shape or q.size < 2 or q[0] != 0 or q[-1] != 1 or np.any(np.diff(q) <= 0):
            raise ValueError(f"levels {list(self.levels)} must increase from 0 to 1 and be as many as values ({v.size})")
        if np.any(np.diff(v) < 0):
            raise ValueError(f"values {list(self.values)} must not decrease")
        _at_least("the first value", float(v[0]), 1.0)

    def quantile(self, u: Floats) -> Floats:
        return np.interp(u, self.levels, self.values)


def _at_least(name: str, value: float, limit: float) -> None:
    if not limit <= value < float("inf"):
        raise ValueError(f"{name} {value} must be a finite number >= {limit:g}")


def spearman_to_normal(rho: float) -> float:
    """Correlation of the two normals whose rank correlation is `rho` (Pearson 1907: rho = 6/pi asin(r/2))."""
    return 2.0 * sin(pi * rho / 6.0)
