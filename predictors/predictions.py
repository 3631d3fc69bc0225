"""Predictions: the columns behind many LengthDistributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import EDGES, LengthDistribution

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """N predictions in columns. `score` (N,), lower = shorter; `point` (N,) tokens, or `survival` (N, len(EDGES)), or neither
    for rank-only rows."""

    score: Floats
    point: Floats | None = None
    survival: NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        n = len(self.score)
        if self.point is not None and self.point.shape != (n,):
            raise ValueError(f"point has shape {self.point.shape}, score has {n} rows")
        if self.survival is not None and self.survival.shape != (n, EDGES.size):
            raise ValueError(f"survival has shape {self.survival.shape}, expected {(n, EDGES.size)}")

    def __len__(self) -> int:
        return len(self.score)

    def row(self, i: int) -> LengthDistribution:
        """Row i as the object a Request carries."""
        if self.point is not None:
            return LengthDistribution(float(self.score[i]), float(self.point[i]))
        if self.survival is not None:
            return LengthDistribution(float(self.score[i]), None, np.asarray(self.survival[i], dtype=np.float64))
        return LengthDistribution(float(self.score[i]))

    def rows(self) -> list[LengthDistribution]:
        return [self.row(i) for i in range(len(self))]

    def take(self, rows: Sequence[int] | NDArray[np.integer]) -> Predictions:
        index = np.asarray(rows, dtype=np.int64)
        return Predictions(
            self.score[index],
            None if self.point is None else self.point[index],
            None if self.survival is None else self.survival[index],
        )
