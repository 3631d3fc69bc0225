"""Poisson arrivals: exponential gaps, coefficient of variation 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .renewal import Floats, renewal_times


@dataclass(frozen=True)
class Poisson:
    """normalised: exactly n arrivals within n / rate seconds, instead of a rate that varies."""

    normalised: bool = False

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s) at `rate` requests/s; at another rate the same pattern, scaled."""
        return renewal_times(rng.standard_exponential(n + 1), rate, self.normalised)

    def describe(self) -> dict[str, Any]:
        return {"process": "poisson, normalised" if self.normalised else "poisson", "cv": 1.0}
