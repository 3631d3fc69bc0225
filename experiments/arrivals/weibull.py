"""Weibull arrivals: gaps with a heavier tail than Gamma's at the same CV above 1, as some of ServeGen's clients have them."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, gamma, lgamma, log, sqrt
from typing import Any

import numpy as np

from .renewal import Floats, renewal_times

LEAST_SHAPE, MOST_SHAPE = 0.05, 1000.0  # of the Weibull; CVs from about 370,000 down to 0.0013


@dataclass(frozen=True)
class Weibull:
    """Weibull-distributed gaps, stated by exactly one of:

    cv: coefficient of variation of the gaps. shape: of the Weibull; 1 is Poisson, below 1 is bursty. normalised: exactly n
    arrivals within n / rate seconds.
    """

    cv: float | None = None
    shape: float | None = None
    normalised: bool = False

    def __post_init__(self) -> None:
        if (self.cv is None) == (self.shape is None):
            raise ValueError(f"give cv or shape, one of them: cv {self.cv}, shape {self.shape}")
        if self.shape is not None and not LEAST_SHAPE <= self.shape <= MOST_SHAPE:
            raise ValueError(f"shape {self.shape} is not within [{LEAST_SHAPE:g}, {MOST_SHAPE:g}]")
        if self.cv is not None:
            weibull_shape(self.cv)

    @property
    def exponent(self) -> float:
        """The shape, given or found."""
        if self.shape is not None:
            return self.shape
        assert self.cv is not None
        return weibull_shape(self.cv)

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s) at `rate` requests/s; at another rate the same pattern, scaled."""
        shape = self.exponent
        return renewal_times(rng.weibull(shape, n + 1) / gamma(1.0 + 1.0 / shape), rate, self.normalised)

    def describe(self) -> dict[str, Any]:
        name = "weibull, normalised" if self.normalised else "weibull"
        return {"process": name, "cv": weibull_cv(self.exponent), "shape": self.exponent}


def weibull_cv(shape: float) -> float:
    """Coefficient of variation of a Weibull distribution: sqrt(G(1 + 2/k) / G(1 + 1/k)^2 - 1)."""
    return sqrt(expm1(lgamma(1.0 + 2.0 / shape) - 2.0 * lgamma(1.0 + 1.0 / shape)))


def weibull_shape(cv: float) -> float:
    """The shape whose coefficient of variation is `cv`, by bisection: the one falls as the other grows.

    Raises ValueError for a CV that no shape within [LEAST_SHAPE, MOST_SHAPE] has.
    """
    least, most = weibull_cv(MOST_SHAPE), weibull_cv(LEAST_SHAPE)
    if not least <= cv <= most:
        raise ValueError(f"cv {cv} is not within [{least:.2g}, {most:.2g}]")
    low, high = log(LEAST_SHAPE), log(MOST_SHAPE)
    for _ in range(60):  # halves log shape until it is a float's width
        middle = (low + high) / 2.0
        if weibull_cv(exp(middle)) > cv:
            low = middle
        else:
            high = middle
    return exp((low + high) / 2.0)
