"""LengthDistribution: what a predictor says about one output length, as a survival function on fixed log-spaced edges.

One type serves point, quantile, distributional and rank-only predictors, so that a policy never asks where a number came
from. Between edges the mass is uniform; beyond the last edge the tail is exponential with a declared mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Lengths 1 .. 32,768 on 48 log-spaced edges (rounded, distinct): resolution about 1.25x, finer than any predictor known.
EDGES: Array = np.unique(np.round(np.geomspace(1.0, 32768.0, 48)))
TAIL_MEAN = 8192.0  # mean excess in tokens beyond the last edge


class LengthDistribution:
    """The predicted distribution of one request's output length L in tokens, L >= 1.

    Build it with `point`, `from_quantiles`, `from_survival` or `rank_only`. `score` orders requests, lower = shorter.
    The distribution is that of the uncapped length; a request's `max_new_tokens` caps KV reservation only.
    """

    __slots__ = ("_mean", "_point", "_survival", "score")

    def __init__(self, score: float, point: float | None = None, survival: Array | None = None) -> None:
        self.score = score
        self._point = point
        self._survival = survival
        self._mean = -1.0 if point is None else point

    def __repr__(self) -> str:
        if self.is_rank_only:
            return f"LengthDistribution.rank_only({self.score:g})"
        if self.is_point:
            return f"LengthDistribution.point({self._point:g})"
        return f"LengthDistribution(mean={self.mean():.4g}, median={self.quantile(0.5):.4g})"

    # --- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def point(cls, length: float) -> LengthDistribution:
        """A point mass at `length` >= 0 tokens (fractions allowed). Raises ValueError unless finite and not negative."""
        if not 0.0 <= length < float("inf"):
            raise ValueError(f"predicted length {length} is not a finite number >= 0")
        return cls(length, length)

    @classmethod
    def rank_only(cls, score: float) -> LengthDistribution:
        """An order without lengths (lower = shorter). `mean`, `quantile`, `remaining` and `gittins` raise on it."""
        if not -float("inf") < score < float("inf"):
            raise ValueError(f"score {score} is not finite")
        return cls(score)

    @classmethod
    def from_survival(cls, survival: ArrayLike) -> LengthDistribution:
        """From P(L > e) for each e of EDGES: shape (len(EDGES),), in [0, 1], not increasing."""
        s = np.asarray(survival, dtype=np.float64)
        if s.shape != EDGES.shape:
            raise ValueError(f"survival has shape {s.shape}, the grid has {EDGES.shape}")
        if not (np.all(np.isfinite(s)) and s[0] <= 1.0 and s[-1] >= 0.0 and np.all(np.diff(s) <= 1e-12)):
            raise ValueError("survival must be finite, within [0, 1] and not increasing")
        out = cls(0.0, None, s)
        out.score = out.mean()
        return out

    @classmethod
    def from_quantiles(cls, levels: ArrayLike, values: ArrayLike) -> LengthDistribution:
        """From quantiles: `levels` increasing within (0, 1), `values` tokens, not decreasing, same shape (Q,).

        Beyond the last level the tail is exponential, with the hazard that the last interval shows (declared tail).
        """
        q, v = np.asarray(levels, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if q.shape != v.shape or q.ndim != 1 or q.size < 2:
            raise ValueError(f"levels {q.shape} and values {v.shape} must be equal 1-d shapes of 2 or more")
        if not (np.all(np.isfinite(v)) and np.all(v >= 0) and np.all(np.diff(v) >= 0)):
            raise ValueError("quantile values must be finite, not negative and not decreasing")
        if not (np.all(np.diff(q) > 0) and q[0] > 0 and q[-1] < 1):
            raise ValueError("quantile levels must increase within (0, 1)")
        return cls.from_survival(survival_from_quantiles(q, v[None, :])[0])

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def is_point(self) -> bool:
        return self._point is not None

    @property
    def is_rank_only(self) -> bool:
        return self._point is None and self._survival is None

    def _need_survival(self) -> Array:
        if self._survival is None:
            raise ValueError("a rank-only prediction has an order, no lengths")
        return self._survival

    def mean(self) -> float:
        """E[L] in tokens. Raises ValueError on a rank-only row."""
        if self._mean < 0.0:
            self._mean = float(_mean_above(self._need_survival(), 0.0))
        return self._mean

    def survival(self, length: float) -> float:
        """P(L > length)."""
        if self._point is not None:
            return 1.0 if self._point > length else 0.0
        return float(_survival_at(self._need_survival(), length))

    def quantile(self, q: float) -> float:
        """The smallest length with P(L <= length) >= q, 0 < q < 1, before any cap."""
        if not 0.0 < q < 1.0:
            raise ValueError(f"quantile level {q} is not within (0, 1)")
        if self._point is not None:
            return self._point
        s = self._need_survival()
        target = 1.0 - q
        if target < s[-1]:
            return float(EDGES[-1] + TAIL_MEAN * np.log(s[-1] / target))
        full_s, full_e = np.concatenate(([1.0], s)), np.concatenate(([0.0], EDGES))
        i = int(np.argmax(full_s <= target))
        if full_s[i - 1] == full_s[i]:
            return float(full_e[i])
        share = (full_s[i - 1] - target) / (full_s[i - 1] - full_s[i])
        return float(full_e[i - 1] + share * (full_e[i] - full_e[i - 1]))

    def excess(self, length: float) -> float:
        """E[(L - length)+] in tokens: what of L lies beyond `length`."""
        if self._point is not None:
            return max(self._point - length, 0.0)
        return float(_mean_above(self._need_survival(), length))

    def expected_remaining(self, generated: float) -> float:
        """E[L - g | L > g], at least 1 token; a point mass c gives max(c - g, 1)."""
        if self._point is not None:
            return max(self._point - generated, 1.0)
        s = self._need_survival()
        alive = _survival_at(s, generated)
        if alive <= 1e-12:  # past the predicted support: only the declared tail is left to say something
            return TAIL_MEAN if generated >= EDGES[-1] else max(float(generated), 1.0)
        return max(float(_mean_above(s, generated) / alive), 1.0)

    def remaining(self, generated: float) -> LengthDistribution:
        """The distribution of L - g given L > g."""
        if self._point is not None:
            return LengthDistribution.point(max(self._point - generated, 1.0))
        s = self._need_survival()
        alive = _survival_at(s, generated)
        if alive <= 1e-12:
            return LengthDistribution.point(self.expected_remaining(generated))
        later = survival_at(s[None, :], EDGES + generated)[0] / alive
        return LengthDistribution.from_survival(np.minimum.accumulate(np.clip(later, 0.0, 1.0)))

    def gittins(self, generated: float) -> float:
        """Gittins rank at age g: min over a quantum D of E[min(L - g, D) | L > g] / P(L - g <= D | L > g), in tokens.

        Lower runs first. The reciprocal of the Gittins index (Gittins 1979; Aalto, Ayesta, Righter, QUESTA 2009): constant
        for an exponential length, the remaining size for a point mass.
        """
        if self._point is not None:
            return max(self._point - generated, 1.0)
        s = self._need_survival()
        alive = _survival_at(s, generated)
        if alive <= 1e-12:
            return self.expected_remaining(generated)
        # Mass is uniform between edges, so the least ratio is at an edge; in the tail it is at its start or at infinity.
        first = int(np.searchsorted(EDGES, generated, side="right"))
        ends = np.concatenate(([max(float(generated), 0.0)], EDGES[first:]))
        surv = np.concatenate(([alive], s[first:]))
        work = np.cumsum(np.diff(ends) * (surv[1:] + surv[:-1])) / 2.0
        done = alive - surv[1:]
        ranks = np.divide(work, done, out=np.full_like(work, np.inf), where=done > 0.0)
        whole = _mean_above(s, generated) / alive  # D = infinity
        return max(float(min(ranks.min(initial=np.inf), whole)), 1.0)

    def gittins_ranks(self) -> list[float]:
        """`gittins` at age 0 and at each of EDGES: shape (1 + len(EDGES),), for little more than one of them.

        With A the work until an edge and S the survival there, a rank is the least (A_j - A_i) / (S_i - S_j) of all j after i:
        a tangent from i to the hull of the points behind it, which one pass from the right keeps."""
        survival = [1.0, *self._need_survival().tolist()]
        edges = [0.0, *EDGES.tolist()]
        work = [0.0]
        for i in range(1, len(edges)):
            work.append(work[-1] + (edges[i] - edges[i - 1]) * (survival[i - 1] + survival[i]) / 2.0)
        hull = [(work[-1] + survival[-1] * TAIL_MEAN, 0.0)]  # (work, survival), the last one first; at infinity nobody is left
        ranks: list[float] = []
        for a, s, edge in zip(reversed(work), reversed(survival), reversed(edges), strict=True):
            rank = _ratio(a, s, hull[-1])
            while len(hull) > 1 and (other := _ratio(a, s, hull[-2])) <= rank:
                rank = other
                hull.pop()
            hull.append((a, s))
            ranks.append(max(rank, 1.0) if s > 1e-12 else self.expected_remaining(edge))
        return ranks[::-1]


def _ratio(work: float, survival: float, to: tuple[float, float]) -> float:
    """Work from here to there, for each unit of survival that is lost."""
    lost = survival - to[1]
    return (to[0] - work) / lost if lost > 0.0 else float("inf")


def _survival_at(survival: Array, length: float) -> float:
    if length <= 0.0:
        return 1.0
    if length >= EDGES[-1]:
        return float(survival[-1] * np.exp(-(length - EDGES[-1]) / TAIL_MEAN))
    i = int(np.searchsorted(EDGES, length, side="right"))  # EDGES[i - 1] <= length < EDGES[i]
    e0, s0 = (EDGES[i - 1], survival[i - 1]) if i else (0.0, 1.0)
    return float(s0 + (survival[i] - s0) * (length - e0) / (EDGES[i] - e0))


def _mean_above(survival: Array, length: float) -> float:
    """The integral of the survival function from `length` to infinity (trapezoids, then the exponential tail)."""
    if length >= EDGES[-1]:
        return _survival_at(survival, length) * TAIL_MEAN
    length = max(length, 0.0)
    i = int(np.searchsorted(EDGES, length, side="right"))
    e = np.concatenate(([length], EDGES[i:]))
    s = np.concatenate(([_survival_at(survival, length)], survival[i:]))
    return float(np.sum(np.diff(e) * (s[1:] + s[:-1])) / 2.0 + survival[-1] * TAIL_MEAN)


def mean_lengths(survival: Array) -> Array:
    """E[L] of many rows at once: (N, len(EDGES)) -> (N,)."""
    e = np.concatenate(([0.0], EDGES))
    s = np.concatenate((np.ones((survival.shape[0], 1)), survival), axis=1)
    inside = np.sum(np.diff(e) * (s[:, 1:] + s[:, :-1]), axis=1) / 2.0  # not a product: rows must not depend on their batch
    return np.asarray(inside + survival[:, -1] * TAIL_MEAN, dtype=np.float64)


def survival_at(survival: Array, lengths: ArrayLike) -> Array:
    """P(L > length) of many rows and lengths at once: (N, len(EDGES)), lengths (M,) tokens -> (N, M)."""
    x = np.maximum(np.asarray(lengths, dtype=np.float64), 0.0)
    e = np.concatenate(([0.0], EDGES))
    s = np.concatenate((np.ones((survival.shape[0], 1)), survival), axis=1)
    i = np.minimum(np.searchsorted(e, x, side="right") - 1, EDGES.size - 1)
    inside = s[:, i] + (s[:, i + 1] - s[:, i]) * ((x - e[i]) / (e[i + 1] - e[i]))
    tail = s[:, -1:] * np.exp(-np.maximum(x - EDGES[-1], 0.0) / TAIL_MEAN)
    return np.asarray(np.where(x >= EDGES[-1], tail, inside), dtype=np.float64)


def quantile_lengths(survival: Array, levels: ArrayLike) -> Array:
    """Quantiles of many rows at once, as `LengthDistribution.quantile`: (N, len(EDGES)), levels (Q,) in (0, 1) -> (N, Q)."""
    e = np.concatenate(([0.0], EDGES))
    s = np.concatenate((np.ones((survival.shape[0], 1)), survival), axis=1)
    rows = np.arange(survival.shape[0])
    columns = []
    for q in np.atleast_1d(np.asarray(levels, dtype=np.float64)).tolist():
        if not 0.0 < q < 1.0:
            raise ValueError(f"quantile level {q} is not within (0, 1)")
        target = 1.0 - q
        i = np.clip(np.argmax(s <= target, axis=1), 1, EDGES.size)
        high, low = s[rows, i - 1], s[rows, i]
        share = np.divide(high - target, high - low, out=np.ones(len(rows)), where=high > low)
        inside = e[i - 1] + share * (e[i] - e[i - 1])
        beyond = EDGES[-1] + TAIL_MEAN * np.log(np.maximum(s[:, -1] / target, 1.0))
        columns.append(np.where(target < s[:, -1], beyond, inside))
    return np.stack(columns, axis=1)


def survival_from_quantiles(levels: Array, values: Array) -> Array:
    """Survival on EDGES from quantiles of many rows: levels (Q,), values (N, Q) not decreasing -> (N, len(EDGES)).

    Linear between quantiles (from length 0 at level 0), a jump where quantiles are equal; beyond the last one exponential
    with the hazard that the last interval shows, and a mean excess of at least 1 token.
    """
    q = np.concatenate(([0.0], levels))
    knots = np.concatenate((np.zeros((values.shape[0], 1)), values), axis=1)
    at = np.zeros((values.shape[0], EDGES.size), dtype=np.int64)  # the last knot at or below each edge
    for column in values.T:
        at += column[:, None] <= EDGES
    after = np.minimum(at + 1, levels.size)
    low, high = np.take_along_axis(knots, at, axis=1), np.take_along_axis(knots, after, axis=1)
    share = np.divide(EDGES - low, high - low, out=np.zeros_like(low), where=high > low)
    inside = 1.0 - (q[at] + share * (q[after] - q[at]))
    width = np.maximum(values[:, -1:] - values[:, -2:-1], 1.0)
    scale = np.maximum(width / np.log((1.0 - levels[-2]) / (1.0 - levels[-1])), 1.0)
    tail = (1.0 - levels[-1]) * np.exp(-np.maximum(EDGES - values[:, -1:], 0.0) / scale)
    return np.asarray(np.where(at == levels.size, tail, inside), dtype=np.float64)
