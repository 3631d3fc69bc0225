"""BiasedOracle: every length said too long or too short by the same factor, which no order notices."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from .oracle import true_lengths
from .predictions import Predictions


class BiasedOracle:
    """The truth times `factor`: 0.5 says half of it. Neither rounded nor clipped, so that the error is what it states."""

    name: ClassVar[str] = "biased_oracle"
    latency = None

    def __init__(self, factor: float = 0.5) -> None:
        if not 0.0 < factor < math.inf:
            raise ValueError(f"factor={factor}: a finite number above 0 is needed")
        self.factor = factor

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator | None = None) -> Predictions:
        """(N,) true lengths in tokens -> N point predictions. `rng` is not used."""
        return Predictions.from_points(true_lengths(output_len) * self.factor)
