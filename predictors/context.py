"""Context features: what the earlier answers of a conversation say about the next one, in named columns.

On ShareGPT they tell more than any model of the prompt's text: people go on as they began. A column that is not known (no
earlier answer; rows without conversations) is NaN, which trees take as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p, nan

import numpy as np

from .features import FEATURES, Floats, hand_features
from .prompts import Prompts

CONTEXT: tuple[str, ...] = (
    "context_turn", "context_last", "context_before_last", "context_mean", "context_recent", "context_max", "context_min",
    "context_spread", "context_asked",
)  # fmt: skip
COLUMNS: tuple[str, ...] = (*FEATURES, *CONTEXT)

_FADE = 0.6  # weight of an answer against the one after it, in `context_recent`


def _row(before: Sequence[int] | None, prompt_len: float) -> tuple[float, ...]:
    """log1p tokens each; the turn as log1p of its number from 0."""
    if before is None:
        return (nan,) * len(CONTEXT)
    if not len(before):
        return (0.0, *(nan,) * 7, log1p(prompt_len))
    logs = [log1p(n) for n in before]
    mean = sum(logs) / len(logs)
    recent, weight = 0.0, 0.0
    for x in logs:
        recent, weight = recent * _FADE + x, weight * _FADE + 1.0
    spread = (sum((x - mean) ** 2 for x in logs) / len(logs)) ** 0.5 if len(logs) > 1 else nan
    return (
        log1p(len(logs)), logs[-1], logs[-2] if len(logs) > 1 else nan, mean, recent / weight, max(logs), min(logs), spread,
        log1p(max(prompt_len - sum(before), 0.0)),
    )  # fmt: skip


def context_features(prompts: Prompts) -> Floats:
    """(N, len(CONTEXT)): the turn; the last answer and the one before it; mean, faded mean, max, min and deviation of all
    earlier ones; the tokens of the prompt that are no answers. All NaN where conversations are not known."""
    before = prompts.answers_before
    if before is None:
        return np.full((len(prompts), len(CONTEXT)), nan)
    rows = [_row(row, length) for row, length in zip(before, prompts.prompt_len.tolist(), strict=True)]
    return np.array(rows, dtype=np.float64).reshape(-1, len(CONTEXT))


def dense_columns(prompts: Prompts) -> Floats:
    """(N, len(COLUMNS)): hand features of the texts, then the conversation so far."""
    return np.column_stack([hand_features(prompts.texts or (), prompts.prompt_len), context_features(prompts)])
