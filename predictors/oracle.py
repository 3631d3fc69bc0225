"""Oracle: it is handed the workload's true lengths. The bound that predictors are measured against, named so in every table."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from .predictions import Predictions

TO_SIGMA = math.sqrt(math.pi / 2.0)  # the mean absolute value of a Gaussian error is sigma x sqrt(2 / pi)


def true_lengths(output_len: ArrayLike) -> np.ndarray:
    """Lengths as floats (N,). Raises ValueError unless 1-d, finite and at least 1."""
    truth = np.asarray(output_len, dtype=np.float64)
    if truth.ndim != 1 or not np.all(np.isfinite(truth)) or (truth.size and truth.min() < 1.0):
        raise ValueError("true lengths must be one column of finite numbers, each at least 1 token")
    return truth


class Oracle:
    """Point masses at the truth. For a censored row the truth is its observed length."""

    name: ClassVar[str] = "oracle"
    latency = None

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator | None = None) -> Predictions:
        """(N,) true lengths in tokens -> N point predictions. `rng` is not used."""
        return Predictions.from_points(true_lengths(output_len))
