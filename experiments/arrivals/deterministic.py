"""Deterministic arrivals: equal gaps, the first at 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .renewal import Floats, check_rate


@dataclass(frozen=True)
class Deterministic:
    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """0, 1 / rate, 2 / rate, ... (s); `rng` is not used."""
        return np.arange(n) / check_rate(rate)

    def describe(self) -> dict[str, Any]:
        return {"process": "deterministic", "cv": 0.0}
