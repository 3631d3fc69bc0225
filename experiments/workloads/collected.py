"""Answers that `lengthwise collect` has collected: prompts of a workload, as long as one model's answers to them were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate

from ..collected import alone, join, read
from ..dataset import Dataset
from .files import find_file


def load(path: str, base: Any = None, *, sample: int = 0) -> Dataset:
    """The answers in the file `path`: relative to LENGTHWISE_DATA (where set), else to the current folder. output_len is answer
    number `sample`; samples (N, k) are all of them, and those that were cut off are censored.

    base: the workload that was asked, for its texts and whatever else it says of them: the name of its node, a node, or a
    Dataset; None: the texts that the file keeps, if it does. Raises ValueError where base has none of its prompts.
    """
    collected = read(find_file(path))
    if base is None:
        return alone(collected, sample)
    dataset = instantiate(_node(base)) if isinstance(base, str | Mapping) else base
    if not isinstance(dataset, Dataset):
        raise ValueError(f"base gave a {type(dataset).__name__}, not a Dataset")
    return join(dataset, collected, sample)


def _node(base: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(base, str):
        return base
    from ..catalogue import nodes

    there = nodes()
    if base not in there:
        raise ValueError(f"base {base!r} is not one of {', '.join(there)}")
    return there[base]
