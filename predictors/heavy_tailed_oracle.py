"""HeavyTailedOracle: mostly nearly right, now and then wrong by any factor, too long as often as too short."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from .oracle import true_lengths
from .predictions import Predictions

LIMIT = 1e6  # times: the greatest error


class HeavyTailedOracle:
    """The truth times a factor R with Pareto tails on both sides: P(R > x) = P(R < 1 / x) = x ** -alpha / 2, x >= 1.

    alpha: of the tails; the error in log length is Laplace, 1 / alpha on average. At 2 or below the factor has no variance, at
    1 or below no mean. Row i's factor is made of the i-th draw of the generator.
    """

    name: ClassVar[str] = "heavy_tailed_oracle"
    latency = None

    def __init__(self, alpha: float = 1.5) -> None:
        if not 0.0 < alpha < math.inf:
            raise ValueError(f"alpha={alpha}: a finite number above 0 is needed")
        self.alpha = alpha

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator) -> Predictions:
        """(N,) true lengths in tokens -> N point predictions."""
        truth = true_lengths(output_len)
        u = 2.0 * rng.random(len(truth)) - 1.0  # its sign is the side, its size how far out
        size = np.maximum(1.0 - np.abs(u), LIMIT**-self.alpha) ** (-1.0 / self.alpha)
        return Predictions.from_points(truth * np.where(u < 0.0, 1.0 / size, size))
