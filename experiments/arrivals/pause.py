"""Pauses: how long a person thinks, or a tool works, between an answer and what follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .renewal import Floats


@dataclass(frozen=True)
class Pause:
    """Gamma-distributed pauses of `mean` seconds and coefficient of variation `cv`: 1 is exponential, 0 always the mean."""

    mean: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "cv"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"pause {name} {value} must be a finite number >= 0")

    def times(self, n: int, rng: np.random.Generator) -> Floats:
        """n pauses (s)."""
        if not self.cv or not self.mean:
            return np.full(n, float(self.mean))
        shape = 1.0 / self.cv**2
        return rng.gamma(shape, self.mean / shape, n)

    def describe(self) -> dict[str, Any]:
        return {"mean": self.mean, "cv": self.cv}
