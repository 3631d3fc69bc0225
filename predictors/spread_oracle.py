"""SpreadOracle: any oracle's points, or distributions around them that are as wide as its errors are.

What reads a distribution (Gittins) is so told the same things with the same errors as what reads a point.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.sched import EDGES

from .oracle import true_lengths
from .predictions import Floats, Predictions
from .shifted_oracle import KnowsTruth

LEAST = 50  # rows of a band


class SpreadOracle:
    """spread: false passes the points of `oracle` on. true: a row said to have p tokens has the lengths p x R, where R are the
    ratios of truth to what was said in its band, `bands` of about equal size by p, at least LEAST rows each; rows of one p
    share a band.

    The ratios are those of all rows, so that the errors of each touch what is said of the others, and over their median over
    all bands (of two middle ones the lower: where half the rows lie, the other half is the centre): a bias that all rows
    share stays, as no spread tells of it. Raises ValueError around an oracle without points.
    """

    name: ClassVar[str] = "spread_oracle"
    latency = None

    def __init__(self, oracle: KnowsTruth, spread: bool = False, bands: int = 10) -> None:
        if not hasattr(oracle, "from_truth"):
            raise ValueError(f"a {type(oracle).__name__} is no oracle")
        if bands < 1:
            raise ValueError(f"bands={bands}: at least 1")
        self.oracle, self.spread, self.bands = oracle, spread, bands

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator) -> Predictions:
        """(N,) true lengths in tokens -> N predictions: points, or distributions."""
        truth = true_lengths(output_len)
        said = self.oracle.from_truth(truth, rng)
        if said.point is None:
            raise ValueError(f"a {type(self.oracle).__name__} says no points")
        return Predictions.from_survivals(self._survivals(truth, said.point)) if self.spread else said

    def _survivals(self, truth: Floats, point: Floats) -> Floats:
        """P(L > e) for e of EDGES, (N, len(EDGES)); fewer than one token are one."""
        out = np.empty((len(truth), EDGES.size))
        if not len(truth):
            return out
        said = np.maximum(point, 1.0)
        ratio = truth / said
        ratio = ratio / np.quantile(ratio, 0.5, method="lower")
        for rows in self._rows_of_bands(said):
            known = np.sort(ratio[rows])
            shorter = np.searchsorted(known, EDGES / said[rows][:, None] * (1.0 + 1e-9), side="right")
            out[rows] = 1.0 - shorter / len(known)
        return out

    def _rows_of_bands(self, said: Floats) -> list[np.ndarray]:
        """The rows of each band; a cut through equal predictions moves to the nearer end of them."""
        order = np.argsort(said, kind="stable")
        ordered, cuts = said[order], [0]
        for part in np.array_split(np.arange(len(said)), max(1, min(self.bands, len(said) // LEAST)))[1:]:
            ends = [int(np.searchsorted(ordered, ordered[part[0]], side=side)) for side in ("left", "right")]
            cut = min(ends, key=lambda end: abs(end - part[0]))
            if cut - cuts[-1] >= LEAST and len(said) - cut >= LEAST:
                cuts.append(cut)
        return np.split(order, cuts[1:])
