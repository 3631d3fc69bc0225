"""Size: which number of a predicted distribution stands for the length, so that every policy by size has the same choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..prediction import LengthDistribution

By = Literal["mean", "quantile", "rank"]
KEPT = 1 << 15  # predictions whose quantile is remembered


def size(by: By, level: float = 0.9, *, tokens: bool = False) -> Callable[[LengthDistribution], float]:
    """The size of a prediction: its mean, its quantile at `level` (both in tokens), or its score, lower = shorter (`rank`).

    tokens: the size is counted in, not only compared, so that a rank-only prediction is refused. Raises ValueError naming a
    wrong `by` or `level`."""
    if by == "mean":
        return LengthDistribution.mean
    if by == "quantile":
        return Quantile(level)
    if by == "rank":
        return score_in_tokens if tokens else score
    raise ValueError(f"by={by!r}: choose mean, quantile or rank")


def score(prediction: LengthDistribution) -> float:
    return prediction.score


def score_in_tokens(prediction: LengthDistribution) -> float:
    """The score of a prediction that has lengths. Raises ValueError on a rank-only one."""
    if prediction.is_rank_only:
        raise ValueError(f"{prediction!r} has an order, no lengths; what is left of it cannot be counted")
    return prediction.score


class Quantile:
    """The quantile at `level`, 0 < level < 1, in tokens. It remembers what it was asked: keys are, many times a step."""

    def __init__(self, level: float) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"level={level} is not within (0, 1)")
        self.level = level
        self._known: dict[LengthDistribution, float] = {}

    def __call__(self, prediction: LengthDistribution) -> float:
        value = self._known.get(prediction)
        if value is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            value = self._known[prediction] = prediction.quantile(self.level)
        return value
