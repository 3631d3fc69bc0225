"""Scores of length predictions: order, error, distribution. Censored rows are lower bounds and are never scored as exact.

Every function takes columns; `score` puts the whole table together and says how many rows it left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import EDGES
from lengthwise.sched.prediction import TAIL_MEAN

from .predictions import Predictions

Floats = NDArray[np.float64]

LEVELS: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
INTERVALS: tuple[tuple[str, float, float], ...] = (
    ("50", 0.25, 0.75), ("80", 0.1, 0.9), ("90", 0.05, 0.95), ("95", 0.025, 0.975),
)  # fmt: skip
RELIABILITY: tuple[float, ...] = (0.025, *(round(0.05 * i, 2) for i in range(1, 20)), 0.975)  # levels of a reliability diagram
ERROR_LEVELS: tuple[float, ...] = (0.01, *(round(0.05 * i, 2) for i in range(1, 20)), 0.99)
MIN_ERRORS = 20  # rows; fewer have no distribution of errors
BANDS: tuple[int, ...] = (1, 16, 64, 256, 512, 1024, 2048)  # lower ends in tokens; the last band has no upper end


def kendall_tau(score: ArrayLike, truth: ArrayLike) -> float | None:
    """Kendall's tau-b; None for fewer than 2 rows, 0 when one side is constant (an order that says nothing)."""
    return _rank("kendalltau", score, truth)


def spearman(score: ArrayLike, truth: ArrayLike) -> float | None:
    """Spearman's rank correlation; None for fewer than 2 rows, 0 when one side is constant."""
    return _rank("spearmanr", score, truth)


def _rank(name: str, score: ArrayLike, truth: ArrayLike) -> float | None:
    from scipy import stats

    x, y = np.asarray(score, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if len(x) < 2:
        return None
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(getattr(stats, name)(x, y).statistic)


def pinball(values: Floats, levels: Sequence[float], truth: ArrayLike) -> float:
    """Mean pinball loss in tokens over rows and levels: values (N, Q), levels (Q,), truth (N,)."""
    q = np.asarray(levels)[None, :]
    gap = np.asarray(truth, dtype=np.float64)[:, None] - values
    return float(np.mean(np.maximum(q * gap, (q - 1.0) * gap)))


def crps(predictions: Predictions, truth: ArrayLike) -> Floats:
    """Continuous ranked probability score in tokens of each row: integral of (F(x) - 1{x >= y})^2; |y - c| for a point mass.

    Exact for the piecewise linear survival and its exponential tail (Gneiting and Raftery, JASA 2007, section 4.2).
    """
    y = np.asarray(truth, dtype=np.float64)
    if predictions.point is not None:
        return np.abs(predictions.point - y)
    if predictions.survival is None:
        raise ValueError("rank-only predictions have no distribution to score")
    if y.size and y.max() >= EDGES[-1]:
        raise ValueError(f"a true length of {y.max():g} is beyond the grid's last edge {EDGES[-1]:g}")
    x = np.concatenate(([0.0], EDGES))
    s = np.concatenate((np.ones((len(y), 1)), np.asarray(predictions.survival, dtype=np.float64)), axis=1)
    at = np.searchsorted(x, y, side="right") - 1  # x[at] <= y < x[at + 1]
    rows = np.arange(len(y))
    cut = s[rows, at] + (s[rows, at + 1] - s[rows, at]) * (y - x[at]) / (x[at + 1] - x[at])
    below = np.cumsum(_squares(1.0 - s[:, :-1], 1.0 - s[:, 1:], np.diff(x)), axis=1)
    above = _squares(s[:, :-1], s[:, 1:], np.diff(x))
    above = np.cumsum(above[:, ::-1], axis=1)[:, ::-1] + (s[:, -1] ** 2 * TAIL_MEAN / 2.0)[:, None]
    done = np.where(at > 0, below[rows, np.maximum(at - 1, 0)], 0.0) + _squares(1.0 - s[rows, at], 1.0 - cut, y - x[at])
    tail = s[:, -1] ** 2 * TAIL_MEAN / 2.0
    later = np.where(at + 1 < above.shape[1], above[rows, np.minimum(at + 1, above.shape[1] - 1)], tail)
    return np.asarray(done + _squares(cut, s[rows, at + 1], x[at + 1] - y) + later)


def _squares(a: Floats, b: Floats, width: Floats) -> Floats:
    """The integral of a squared linear function from a to b over a width."""
    return width * (a * a + a * b + b * b) / 3.0


def top_recall(score: ArrayLike, truth: ArrayLike, share: float = 0.1) -> float | None:
    """Of the truly longest `share` of the rows, how many are among the as many predicted longest (chance: `share`).

    All rows as long as the last of the longest belong to them; ties at the border of the prediction count by their chance.
    """
    x, y = np.asarray(score, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    k = int(len(y) * share)
    if k < 1:
        return None
    longest = y >= np.sort(y)[-k]
    k = int(np.count_nonzero(longest))
    border = np.sort(x)[-k]
    sure, tied = x > border, x == border
    chance = (k - np.count_nonzero(sure)) / np.count_nonzero(tied)
    return float((np.count_nonzero(sure & longest) + chance * np.count_nonzero(tied & longest)) / k)


def bands(mean: Floats | None, median: Floats | None, truth: NDArray[Any], censored: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Rows by band of the observed length, the tail with no upper end: share, number censored, error of the uncensored."""
    out = []
    uppers: list[float] = [float(b) for b in BANDS[1:]] + [float("inf")]
    for low, high in zip(BANDS, uppers, strict=True):
        inside = (truth >= low) & (truth < high)
        exact = inside & ~censored
        n = int(np.count_nonzero(exact))
        row: dict[str, Any] = {
            "from": low, "to": None if high == float("inf") else int(high) - 1, "share": float(np.mean(inside)), "n": n,
            "num_censored": int(np.count_nonzero(inside & censored)), "mae": None, "bias": None,
        }  # fmt: skip
        if n and median is not None and mean is not None:
            row["mae"] = float(np.mean(np.abs(median[exact] - truth[exact])))
            row["bias"] = float(np.mean(mean[exact] - truth[exact]))
        out.append(row)
    return out


def r2_log(median: Floats, truth: ArrayLike) -> float | None:
    """Of the variance of log length, the share that the predicted medians (N,) explain (below 0: less than their mean would);
    None where lengths (N,) do not vary. Medians below 1 token count as 1."""
    y = np.log(np.asarray(truth, dtype=np.float64))
    total = float(np.sum((y - y.mean()) ** 2)) if y.size else 0.0
    return None if total == 0.0 else 1.0 - float(np.sum((y - np.log(np.maximum(median, 1.0))) ** 2)) / total


def errors_by_band(median: Floats, truth: ArrayLike) -> dict[str, Any]:
    """Quantiles at ERROR_LEVELS of log(predicted median / true length) by band of the true length, uncensored rows (N,); None
    in a band of fewer than MIN_ERRORS. What ConfusedOracle draws from."""
    y = np.asarray(truth, dtype=np.float64)
    ratio = np.log(np.maximum(median, 1.0) / y)
    band = np.searchsorted(np.asarray(BANDS), y, side="right") - 1
    out: list[dict[str, Any]] = []
    for b, low in enumerate(BANDS):
        inside = ratio[band == b]
        known = inside.size >= MIN_ERRORS
        values = np.quantile(inside, ERROR_LEVELS).round(4).tolist() if known else None
        out.append({"from": low, "n": int(inside.size), "log_ratio": values})
    return {"levels": list(ERROR_LEVELS), "bands": out}


def score(predictions: Predictions, lengths: ArrayLike, censored: ArrayLike | None = None) -> dict[str, Any]:
    """All scores of N predictions against lengths (N,) in tokens, over uncensored rows; `num_censored` rows are left out.

    MAE is of the median, as is R2 of the log length, bias of the mean. reliability: of each level of RELIABILITY the share of
    rows at or below that predicted quantile. Rank-only rows have orders and None for the rest.
    """
    y = np.asarray(lengths, dtype=np.float64)
    cut = np.zeros(len(y), dtype=bool) if censored is None else np.asarray(censored, dtype=bool)
    if not len(predictions) == len(y) == len(cut):
        raise ValueError(f"{len(predictions)} predictions, {len(y)} lengths and {len(cut)} censored marks")
    keep = np.flatnonzero(~cut)
    p, t = predictions.take(keep), y[keep]
    out: dict[str, Any] = {
        "n": len(t), "num_censored": int(cut.sum()), "kendall_tau": kendall_tau(p.score, t), "spearman": spearman(p.score, t),
        "top_decile_recall": top_recall(p.score, t), "mae": None, "mean_mae": None, "bias": None, "r2_log": None,
        "pinball": None, "crps": None, "coverage": None, "reliability": None,
    }  # fmt: skip
    if len(t) and not (p.point is None and p.survival is None):
        levels = sorted({*LEVELS, *RELIABILITY})
        values, means, at = p.quantiles(levels), p.means(), {q: i for i, q in enumerate(levels)}
        out["mae"] = float(np.mean(np.abs(values[:, at[0.5]] - t)))
        out["mean_mae"] = float(np.mean(np.abs(means - t)))
        out["bias"] = float(np.mean(means - t))
        out["r2_log"] = r2_log(values[:, at[0.5]], t)
        out["pinball"] = pinball(values[:, [at[q] for q in LEVELS]], LEVELS, t)
        out["crps"] = float(np.mean(crps(p, t)))
        if p.survival is not None:
            below = {q: float(np.mean(t <= values[:, i])) for q, i in at.items()}
            out["coverage"] = {
                name: float(np.mean((t >= values[:, at[a]]) & (t <= values[:, at[b]]))) for name, a, b in INTERVALS
            } | {f"below_{q:g}": below[q] for q in LEVELS}
            out["reliability"] = {f"{q:g}": below[q] for q in RELIABILITY}
    whole = len(y) and not (predictions.point is None and predictions.survival is None)
    out["bands"] = bands(
        predictions.means() if whole else None, predictions.quantiles((0.5,))[:, 0] if whole else None, y, cut
    )  # fmt: skip
    return out
