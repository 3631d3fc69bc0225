"""Gamma arrivals: gaps more (CV > 1) or less (CV < 1) uneven than Poisson's at the same rate."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from .renewal import Floats, renewal_times


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed gaps, stated by exactly one of:

    cv: coefficient of variation of the gaps, above 0. burstiness: the shape of the gamma distribution, 1 / cv^2, as vLLM's
    benchmark names it (so a LOW burstiness is a bursty process: 0.111 is CV 3). normalised: exactly n arrivals within
    n / rate seconds.
    """

    cv: float | None = None
    burstiness: float | None = None
    normalised: bool = False

    def __post_init__(self) -> None:
        if (self.cv is None) == (self.burstiness is None):
            raise ValueError(f"give cv or burstiness, one of them: cv {self.cv}, burstiness {self.burstiness}")
        for name, value in (("cv", self.cv), ("burstiness", self.burstiness)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value} must be a finite number above 0")

    @property
    def shape(self) -> float:
        if self.cv is not None:
            return 1.0 / self.cv**2
        assert self.burstiness is not None
        return self.burstiness

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s) at `rate` requests/s; at another rate the same pattern, scaled."""
        return renewal_times(rng.standard_gamma(self.shape, n + 1) / self.shape, rate, self.normalised)

    def describe(self) -> dict[str, Any]:
        return {
            "process": "gamma, normalised" if self.normalised else "gamma",
            "cv": 1.0 / sqrt(self.shape),
            "burstiness": self.shape,
        }
