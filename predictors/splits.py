"""Grouped splits: rows that share a conversation or nearly a prompt are never on two sides.

Three train/test splits are named once, "0", "1" and "2", and kept: rank correlations move by .04 between splits, so a number
is quoted as the mean over them. Grouped folds give the out-of-fold predictions that a simulation may use. Split "time" learns
from what came first, where rows have arrival times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .fallback import Fallback, like_the_others
from .folds import Ints, grouped_folds, rows_as_groups, shuffled_groups
from .near_duplicates import prompt_groups
from .predictions import Predictions
from .predictor import LengthPredictor
from .prompts import Prompts

__all__ = [
    "SPLITS", "grouped_folds", "joint_groups", "named_split", "out_of_fold", "overlaps", "prompt_groups", "refuse_overlap",
    "rows_as_groups", "time_split",
]  # fmt: skip

log = logging.getLogger(__name__)

SPLITS: tuple[str, ...] = ("0", "1", "2")
TEST_SHARE = 0.2  # of the rows; groups are drawn until it is reached


def joint_groups(group: ArrayLike | None, prompts: Sequence[str] | None, num_rows: int) -> Ints:
    """What no split may divide (N,): rows of one `group` and rows with near-duplicate prompts, as far as there are any."""
    own = rows_as_groups(group, num_rows)
    return own if prompts is None else prompt_groups(prompts, own)


def named_split(name: str, group: ArrayLike) -> tuple[Ints, Ints]:
    """(train rows, test rows) of split "0", "1" or "2": whole groups, in random order, until TEST_SHARE of the rows is in test.

    Raises ValueError on another name, or when there are fewer than two groups.
    """
    if name not in SPLITS:
        raise ValueError(f"split {name!r} is not one of {', '.join(SPLITS)}")
    groups = np.asarray(group, dtype=np.int64)
    at, sizes = shuffled_groups(groups, int(name))
    if len(sizes) < 2:
        raise ValueError(f"{len(groups)} rows in {len(sizes)} group(s) cannot be split: at least 2 groups")
    before = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    in_test = before < TEST_SHARE * len(groups)
    in_test[-1] = False
    test = in_test[at]
    train_rows, test_rows = np.flatnonzero(~test), np.flatnonzero(test)
    refuse_overlap(groups, train_rows, test_rows)
    return train_rows, test_rows


def time_split(arrival: ArrayLike, group: ArrayLike) -> tuple[Ints, Ints]:
    """(train rows, test rows): the first rows to arrive, and the last TEST_SHARE of them, as a predictor in service meets them.

    arrival (N,) in s, in any order; ties stay on one side. Rows of the last share whose group has arrived before are in
    neither. Raises ValueError when nothing is left on a side.
    """
    times, groups = np.asarray(arrival, dtype=np.float64), np.asarray(group, dtype=np.int64)
    if times.shape != groups.shape or not np.all(np.isfinite(times)):
        raise ValueError(f"arrival of shape {times.shape} must be finite, one for each of {len(groups)} rows")
    cut = np.sort(times)[int(np.ceil((1.0 - TEST_SHARE) * len(times)))] if len(times) > 1 else -np.inf
    early = times < cut
    train, test = np.flatnonzero(early), np.flatnonzero(~early & ~np.isin(groups, groups[early]))
    if not (train.size and test.size):
        raise ValueError(f"{len(times)} rows cannot be split by time: {train.size} before {cut:g} s, {test.size} new after")
    return train, test


def overlaps(group: ArrayLike, train: ArrayLike, test: ArrayLike) -> Ints:
    """The group ids that have rows on both sides, sorted."""
    groups = np.asarray(group, dtype=np.int64)
    return np.intersect1d(groups[np.asarray(train, dtype=np.int64)], groups[np.asarray(test, dtype=np.int64)])


def refuse_overlap(group: ArrayLike, train: ArrayLike, test: ArrayLike) -> None:
    """Raise ValueError, naming them, if any group is on both sides."""
    shared = overlaps(group, train, test)
    if shared.size:
        raise ValueError(f"{shared.size} group(s) are in training and in test, the first: {shared[:5].tolist()}")


def out_of_fold(
    make_predictor: Callable[[], LengthPredictor],
    prompts: Prompts,
    lengths: NDArray[Any],
    censored: NDArray[Any] | None,
    group: ArrayLike | None,
    *,
    num_folds: int = 5,
    seed: int = 0,
    guard: Callable[[LengthPredictor], Fallback] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Predictions, Ints]:
    """A prediction for each of N rows by a predictor that was fitted without its group, and the fold (N,) of each row.

    make_predictor: a new unfitted predictor each call. guard: stands before each fitted predictor and replaces what it fails
    to predict; without one, failures are raised. progress: called with (folds done, folds). Raises ValueError from `fit`, and
    when no two groups are there.
    """
    n = len(prompts)
    groups = rows_as_groups(group, n)
    cut = np.zeros(n, dtype=bool) if censored is None else np.asarray(censored, dtype=bool)
    fold = grouped_folds(groups, num_folds, seed)
    parts: list[Predictions] = []
    places: list[Ints] = []
    for k in range(num_folds):
        train, test = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        refuse_overlap(groups, train, test)
        predictor = make_predictor()
        predictor.fit(prompts.take(train), lengths[train], cut[train], group=groups[train])
        parts.append((predictor if guard is None else guard(predictor)).predict_columns(prompts.take(test)))
        places.append(test)
        log.info("out-of-fold %s: fold %d of %d, %d training rows", predictor.name, k + 1, num_folds, len(train))
        if progress is not None:
            progress(k + 1, num_folds)
    back = np.argsort(np.concatenate(places), kind="stable")
    return Predictions.concatenate(like_the_others(parts)).take(back), fold
