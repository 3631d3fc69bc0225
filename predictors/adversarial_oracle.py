"""AdversarialOracle: the longest answers are said to be the shortest: what a scheduler must survive, whoever says so."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from .oracle import true_lengths
from .predictions import Predictions


class AdversarialOracle:
    """`length` tokens for the longest `share` of the rows (rounded down; of equal ones the first), the truth for the others.

    Who is among the longest depends on all rows.
    """

    name: ClassVar[str] = "adversarial_oracle"
    latency = None

    def __init__(self, share: float = 0.1, length: float = 1.0) -> None:
        if not 0.0 <= share <= 1.0 or not 1.0 <= length < float("inf"):
            raise ValueError(f"share={share} must be within [0, 1], length={length} finite and at least 1 token")
        self.share, self.length = share, length

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator | None = None) -> Predictions:
        """(N,) true lengths in tokens -> N point predictions. `rng` is not used."""
        out = true_lengths(output_len).copy()
        longest = np.argsort(-out, kind="stable")[: int(self.share * len(out))]
        out[longest] = self.length
        return Predictions.from_points(out)
