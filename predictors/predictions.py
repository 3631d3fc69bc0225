"""Predictions: the columns behind many LengthDistributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import EDGES, LengthDistribution
from lengthwise.sched.prediction import mean_lengths, quantile_lengths

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """N predictions in columns. `score` (N,), lower = shorter; `point` (N,) tokens, or `survival` (N, len(EDGES)), or neither
    for rank-only rows. `fallback` (N,): rows for which the predictor gave nothing usable and something else stands in (see
    fallback.py); None where nobody looked."""

    score: Floats
    point: Floats | None = None
    survival: NDArray[np.floating] | None = None
    fallback: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        n = len(self.score)
        if self.point is not None and self.point.shape != (n,):
            raise ValueError(f"point has shape {self.point.shape}, score has {n} rows")
        if self.survival is not None and self.survival.shape != (n, EDGES.size):
            raise ValueError(f"survival has shape {self.survival.shape}, expected {(n, EDGES.size)}")
        if self.fallback is not None and self.fallback.shape != (n,):
            raise ValueError(f"fallback has shape {self.fallback.shape}, score has {n} rows")

    def __len__(self) -> int:
        return len(self.score)

    @property
    def is_rank_only(self) -> bool:
        return self.point is None and self.survival is None

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
            None if self.fallback is None else self.fallback[index],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Predictions]) -> Predictions:
        """Rows of one kind (points, survivals or ranks) one after another. Raises ValueError on mixed kinds or no part."""
        kinds = sorted({(p.point is not None, p.survival is not None) for p in parts})
        if len(kinds) != 1:
            raise ValueError(f"cannot concatenate {len(parts)} parts of {len(kinds)} kinds: one kind is needed")
        return cls(
            np.concatenate([p.score for p in parts]),
            np.concatenate([p.point for p in parts if p.point is not None]) if kinds[0][0] else None,
            np.concatenate([p.survival for p in parts if p.survival is not None]) if kinds[0][1] else None,
            np.concatenate([np.zeros(len(p), dtype=bool) if p.fallback is None else p.fallback for p in parts])
            if any(p.fallback is not None for p in parts)
            else None,
        )

    def means(self) -> Floats:
        """E[L] in tokens (N,). Raises ValueError on rank-only rows."""
        if self.point is not None:
            return self.point
        if self.survival is None:
            raise ValueError("rank-only predictions have an order, no lengths")
        return mean_lengths(np.asarray(self.survival, dtype=np.float64))

    def quantiles(self, levels: Sequence[float]) -> Floats:
        """Quantiles in tokens (N, len(levels)). Raises ValueError on rank-only rows or a level outside (0, 1)."""
        if self.point is not None:
            return np.repeat(self.point[:, None], len(levels), axis=1)
        if self.survival is None:
            raise ValueError("rank-only predictions have an order, no lengths")
        return quantile_lengths(np.asarray(self.survival, dtype=np.float64), levels)

    @classmethod
    def from_points(cls, lengths: Floats) -> Predictions:
        """Point masses at `lengths` (N,) tokens."""
        points = np.asarray(lengths, dtype=np.float64)
        return cls(points, points)

    @classmethod
    def from_survivals(cls, survival: Floats) -> Predictions:
        """Distributions given by P(L > e) for e of EDGES, (N, len(EDGES)); the score is the mean."""
        return cls(mean_lengths(survival), None, survival)
