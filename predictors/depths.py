"""Depths: how far out true lengths fell in what was predicted for them, which says how to correct the next prediction.

The depth of a length in a prediction rises with the length, whatever the prediction is: minus the log of its survival function
where there is a distribution, log length over log point where there is a point, log length where there is an order only. If
rows are exchangeable, so are their depths: the depth of the next true length is distributed as those seen before, and a
distribution of depths is one of lengths (distributional conformal prediction; Chernozhukov et al., PNAS 2021).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import EDGES
from lengthwise.sched.prediction import mean_lengths

from .calibration import MIN_AT_RISK, TAIL_EXPONENT, kaplan_meier
from .predictions import Predictions

Floats = NDArray[np.float64]

# Where a distribution says that lengths are impossible a trace of a Pareto distribution goes on, in units of its own mean, so
# that depths go on too.
TRACE, FALL = 0.01, 16.0
NUM_KNOTS = 257
SLOPES = 0.125, 8.0  # of the tail beyond the greatest depth seen: as steep as all before, within these


def depths(said: Predictions, scale: float) -> Floats:
    """The depths of EDGES in N predictions, (N, len(EDGES)); of each row they rise.

    scale: tokens, a typical length, below which points and ranks are not told apart by much.
    """
    if said.survival is not None:
        alive = np.maximum(np.asarray(said.survival, dtype=np.float64), 0.0)
        far = np.log1p(EDGES[None, :] / mean_lengths(alive)[:, None])
        return -np.log((1.0 - TRACE) * alive + TRACE * np.exp(-FALL * far)) + TRACE * far
    here = np.zeros(len(said)) if said.point is None else np.log(said.point + scale)
    return np.log(EDGES + scale)[None, :] - here[:, None]


def depths_at(deep: Floats, lengths: ArrayLike) -> Floats:
    """The depth of each row at its own length: (N, len(EDGES)), (N,) >= 0 tokens -> (N,).

    Straight between edges, as a distribution's mass is, so that what is learned from depths is what a prediction can say.
    """
    x = np.asarray(lengths, dtype=np.float64)
    rows, last = np.arange(len(x)), EDGES.size - 1
    i = np.clip(np.searchsorted(EDGES, x, side="right") - 1, 0, last - 1)
    share = (np.minimum(x, EDGES[-1]) - EDGES[i]) / (EDGES[i + 1] - EDGES[i])
    inside = deep[rows, i] + share * (deep[rows, i + 1] - deep[rows, i])
    return np.asarray(inside + np.log(np.maximum(x, EDGES[-1]) / EDGES[-1]), dtype=np.float64)


class Depths:
    """The distribution of depths: knots (K,), the share that is deeper than each, and the slope of the tail beyond them.

    mend: two rising columns, as `mended` makes them: what a survival on the grid is, and what it has to be.
    """

    def __init__(self, knots: Floats, levels: Floats, slope: float, mend: tuple[Floats, Floats] | None = None) -> None:
        self.knots, self.levels, self.slope = knots, levels, slope
        self.mend = mend or (np.array([0.0, 1.0]), np.array([0.0, 1.0]))

    @classmethod
    def fit(cls, values: ArrayLike, censored: ArrayLike, *, of_survival: bool) -> Depths:
        """From depths (N,) of observed lengths, those of `censored` (N,) lengths being lower bounds (Kaplan and Meier, 1958).

        Counted among N + 1, the next one included, as conformal quantiles are. of_survival: of distributions, not of points or
        ranks. Raises ValueError when none is uncensored.
        """
        seen, share = _shares(values, censored)
        first = seen[0] - max(seen[min(1, len(seen) - 1)] - seen[0], 1e-6)
        slope = TAIL_EXPONENT
        if of_survival:
            first = max(first, 0.0)  # no length is below 0
            slope = float(np.clip(-np.log(share[-1]) / max(seen[-1], 1e-6), *SLOPES))
        return cls(np.concatenate(([first], seen)), np.concatenate(([1.0], share)), slope)

    def mended(self, deep: Floats, lengths: ArrayLike, censored: ArrayLike) -> Depths:
        """The same for distributions that are said on the grid, where mass lies evenly between edges: narrow ones lose their
        shape there, and how true lengths (N,) then fall in them, of depths (N, len(EDGES)), is learned once more."""
        at = 1.0 - self.survival(deep)
        seen, share = _shares(np.clip(depths_at(at, lengths), 0.0, 1.0), censored)
        said, is_so = 1.0 - seen[::-1], share[::-1]
        inner = (said > 0.0) & (said < 1.0)
        mend = tuple(np.concatenate(([0.0], column[inner], [1.0])) for column in (said, is_so))
        return Depths(self.knots, self.levels, self.slope, (mend[0], mend[1]))

    def survival(self, depth: Floats) -> Floats:
        """P(deeper than `depth`), elementwise; rows of depths that do not fall give rows that do not rise."""
        inside = np.interp(depth, self.knots, self.levels)
        beyond = depth - self.knots[-1]
        tail = self.levels[-1] * np.exp(-self.slope * np.maximum(beyond, 0.0))
        return np.interp(np.where(beyond > 0.0, tail, inside), *self.mend)


def _shares(values: ArrayLike, censored: ArrayLike) -> tuple[Floats, Floats]:
    """Distinct uncensored values (K,) and the share above each, K at most NUM_KNOTS. Raises ValueError when there is none."""
    cut = np.asarray(censored, dtype=bool)
    seen, share = kaplan_meier(values, cut, MIN_AT_RISK if cut.any() else 1.0)
    if not len(seen):  # all that are not censored are among the last few at risk
        seen, share = kaplan_meier(values, cut)
    if not len(seen):
        raise ValueError(f"none of {len(cut)} lengths to calibrate on is uncensored")
    if len(seen) > NUM_KNOTS:  # both ends dense: the tail decides a quantile of .99
        place = 0.5 - 0.5 * np.cos(np.linspace(0.0, np.pi, NUM_KNOTS))
        at = np.unique(np.round(place * (len(seen) - 1)).astype(np.int64))
        seen, share = seen[at], share[at]
    return seen, share
