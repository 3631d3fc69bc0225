"""Buckets: output lengths in classes, in range for every length, and class probabilities back as a distribution.

Class k holds lengths in (bounds[k - 1], bounds[k]], the last one all above: a higher class is a longer answer. Inside a class
lengths are spread as all training lengths are, so that coarse classes still give a smooth distribution and an open last class
has a tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import EDGES
from lengthwise.sched.prediction import survival_at

from .calibration import Residuals, kaplan_meier, soft_log, soft_offset

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DIRECTION = "a higher class is a longer answer"


def marginal_survival(lengths: ArrayLike, censored: ArrayLike) -> Floats:
    """P(L > e) for e of EDGES over all rows, whatever their prompts (len(EDGES),): the Kaplan-Meier estimate with the declared
    tail of calibration.py, censored lengths as lower bounds."""
    offset = soft_offset(lengths)
    observed = soft_log(lengths, offset)
    whole: Floats = Residuals.fit(np.zeros(len(observed)), observed, censored, offset).survival(np.zeros(1))[0]
    return whole


class Buckets:
    """bounds (K - 1,): upper ends in tokens of all classes but the last, increasing. marginal (len(EDGES),): survival of all
    lengths, the spread inside a class."""

    def __init__(self, bounds: ArrayLike, marginal: Floats) -> None:
        self.bounds: Floats = np.asarray(bounds, dtype=np.float64)
        b = self.bounds
        if b.ndim != 1 or not b.size or not np.all(np.isfinite(b)) or b[0] < 1.0 or np.any(np.diff(b) <= 0):
            raise ValueError(f"bucket bounds {b.tolist()}: one or more increasing lengths of at least 1 token are needed")
        self.marginal = marginal
        ends = np.concatenate(([1.0], survival_at(marginal[None, :], b)[0], [0.0]))  # P(L > bound), from length 0 on
        mass = ends[:-1] - ends[1:]
        self.mass: Floats = mass  # of each class, (K,)
        low, high = np.concatenate(([0.0], b))[:, None], np.concatenate((b, [2.0 * b[-1]]))[:, None]
        even = np.clip((high - EDGES) / (high - low), 0.0, 1.0)  # a class that nobody is in
        spread = (marginal[None, :] - ends[1:, None]) / np.maximum(mass, 1e-12)[:, None]
        self._inside: Floats = np.where((mass > 1e-9)[:, None], np.clip(spread, 0.0, 1.0), even)  # P(L > e | class k)

    @classmethod
    def fit(
        cls,
        lengths: ArrayLike,
        censored: ArrayLike,
        *,
        levels: Sequence[float] | None = None,
        bounds: Sequence[float] | None = None,
    ) -> Buckets:
        """At the training lengths' quantiles of `levels`, or at stated `bounds`; equal quantiles make one class.

        Raises ValueError unless one of both is stated, or when no bound is left.
        """
        if (levels is None) == (bounds is None):
            raise ValueError(f"levels={levels}, bounds={bounds}: state one of both")
        if bounds is None:
            assert levels is not None
            values, survival = kaplan_meier(lengths, censored)
            at = [int(np.argmax(survival <= 1.0 - q)) for q in levels if np.any(survival <= 1.0 - q)]
            bounds = np.unique(values[at]).tolist()
        return cls(bounds, marginal_survival(lengths, censored))

    def __len__(self) -> int:
        return len(self.bounds) + 1

    def classes(self, lengths: ArrayLike) -> Ints:
        """The class (N,) of each length, 0 .. K - 1: never out of range, never falling in the length."""
        return np.searchsorted(self.bounds, np.asarray(lengths, dtype=np.float64), side="left").astype(np.int64)

    def shares_above(self, bound: float) -> Floats:
        """P(class) of an answer that is known to be longer than `bound` tokens, (K,), as all training lengths go on."""
        tops = np.append(survival_at(self.marginal[None, :], np.maximum(self.bounds, bound))[0], 0.0)
        start = float(survival_at(self.marginal[None, :], [bound])[0, 0])
        mass = np.concatenate(([start], tops[:-1])) - tops
        return np.asarray(mass / mass.sum(), dtype=np.float64)

    def survival(self, shares: Floats) -> Floats:
        """Class probabilities (N, K) -> P(L > e) for e of EDGES, (N, len(EDGES)). Rows do not depend on their batch."""
        total = np.zeros((len(shares), EDGES.size))
        whole = np.zeros((len(shares), 1))
        for k in range(len(self)):  # not a matrix product: that would depend on the batch in its last bits
            total += shares[:, k : k + 1] * self._inside[k]
            whole += shares[:, k : k + 1]
        return np.minimum.accumulate(np.clip(total / whole, 0.0, 1.0), axis=1)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"bucket_bounds": self.bounds, "bucket_marginal": self.marginal}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Buckets:
        return cls(arrays["bucket_bounds"], arrays["bucket_marginal"])
