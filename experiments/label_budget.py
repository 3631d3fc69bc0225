"""Label budget: learn from the median of k answers to each prompt, be scored on another one: what further answers are worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .dataset import Dataset


def labels_of(dataset: Dataset, num_answers: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(lengths to learn from (N,), which of them are lower bounds (N,)): of each row the median of the first `num_answers` of
    its `samples`, without the one that is its output_len, on which it is scored.

    A median of answers as long as the shortest that was cut off is a lower bound. Raises ValueError where there are not so many
    further answers.
    """
    samples = dataset.samples
    there = 0 if samples is None else samples.shape[1] - 1
    if samples is None or not 1 <= num_answers <= there:
        raise ValueError(f"label_samples={num_answers}: workload {dataset.name} has {there} further answers to a prompt")
    own = next((j for j in range(there + 1) if np.array_equal(samples[:, j], dataset.output_len)), None)
    if own is None:
        raise ValueError(f"workload {dataset.name}: none of its samples is output_len, so that none can be kept for scoring")
    others = np.sort(np.delete(samples, own, axis=1)[:, :num_answers], axis=1)
    low, high = others[:, (num_answers - 1) // 2], others[:, num_answers // 2]
    cut = dataset.cut
    limit = dataset.output_len[cut].min() if cut.any() else np.inf
    return (low + high) / 2.0, high >= limit
