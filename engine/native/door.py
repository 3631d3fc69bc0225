"""The native engine's door: what no step could compute is refused before one is tried, by ValueError with the numbers."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from .sampling import SamplingParams


def whole_ids(name: str, prompt_ids: Sequence[int], vocab_size: int) -> list[int]:
    """A copy of `prompt_ids` in plain ints. Raises ValueError, naming the prompt's `name`, for an empty prompt and for ids that
    are no whole numbers or outside the vocabulary."""
    if not len(prompt_ids):
        raise ValueError(f"{name} has an empty prompt, the least is one token")
    try:
        ids = [operator.index(i) for i in prompt_ids]
    except TypeError as error:
        raise ValueError(f"{name} has token ids that are no whole numbers: {error}") from error
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(f"{name} has the token id {bad}; the vocabulary has {vocab_size}")
    return ids


def check_stops(name: str, params: SamplingParams, has_text: bool) -> None:
    """Raises ValueError for stop strings where there is no tokenizer to find them with."""
    if params.stop and not has_text:
        raise ValueError(f"{name} has stop strings, and the model has no tokenizer to find them with")


def check_count(name: str, what: str, value: object) -> None:
    """Raises ValueError, naming the request's `name`, unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} asks for {value!r} {what}: a whole number of at least 1 is wanted")
