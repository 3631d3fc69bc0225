"""ShiftedOracle: one error up to a share of the rows and another one from there on: the model was changed, the traffic was."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from .oracle import true_lengths
from .predictions import Predictions


class KnowsTruth(Protocol):
    """An oracle of any error."""

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator) -> Predictions: ...


class ShiftedOracle:
    """`before` for the first `share` of the rows (rounded down), in the order they are given, and `after` for the others.

    Each sees its own rows alone, so that its error is what it states on them.
    """

    name: ClassVar[str] = "shifted_oracle"
    latency = None

    def __init__(self, before: KnowsTruth, after: KnowsTruth, share: float = 0.5) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share={share}: it must be within [0, 1]")
        for side in (before, after):
            if not hasattr(side, "from_truth"):
                raise ValueError(f"a {type(side).__name__} is no oracle")
        self.before, self.after, self.share = before, after, share

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator) -> Predictions:
        """(N,) true lengths in tokens -> N predictions. Raises ValueError where one says points and the other does not."""
        truth = true_lengths(output_len)
        first = int(self.share * len(truth))
        return Predictions.concatenate([self.before.from_truth(truth[:first], rng), self.after.from_truth(truth[first:], rng)])
