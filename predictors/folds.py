"""Folds: rows in groups, in parts of about equal size, so that no group is ever in two."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

_STREAM = 0x5B117  # keeps the splits' random stream apart from every other use of the numbers 0, 1, 2


def rows_as_groups(group: ArrayLike | None, num_rows: int) -> Ints:
    """`group` checked against the number of rows; without one, every row is its own group."""
    if group is None:
        return np.arange(num_rows, dtype=np.int64)
    out = np.asarray(group, dtype=np.int64)
    if out.shape != (num_rows,):
        raise ValueError(f"group has shape {out.shape}, there are {num_rows} rows")
    return out


def grouped_folds(group: ArrayLike, num_folds: int, seed: int = 0) -> Ints:
    """Fold (N,) of each row, 0 .. num_folds - 1: a group is in one fold, and folds are about equal in rows.

    Groups go, in random order, to the fold with the fewest rows. Raises ValueError unless 2 <= num_folds <= number of groups.
    """
    groups = np.asarray(group, dtype=np.int64)
    at, sizes = shuffled_groups(groups, seed)
    if not 2 <= num_folds <= len(sizes):
        raise ValueError(f"num_folds={num_folds}: at least 2 and at most the number of groups, {len(sizes)}")
    load = [0] * num_folds
    fold_of = np.empty(len(sizes), dtype=np.int64)
    for place, size in enumerate(sizes.tolist()):
        fold = load.index(min(load))
        fold_of[place] = fold
        load[fold] += size
    return fold_of[at]


def shuffled_groups(group: Ints, seed: int) -> tuple[Ints, Ints]:
    """(row -> place of its group in a random order, rows of each place). Groups are numbered by first appearance first, so
    that the split depends on the partition and the row order, not on the ids."""
    _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
    by_appearance = np.empty(len(first), dtype=np.int64)
    by_appearance[np.argsort(first)] = np.arange(len(first))
    place = np.random.default_rng(np.random.SeedSequence([_STREAM, seed])).permutation(len(first))
    at = place[by_appearance[inverse]]
    return at, np.bincount(at, minlength=len(first))
