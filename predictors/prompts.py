"""Prompts: what clients sent, in columns, which is all that a length predictor may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import Request


@dataclass(frozen=True, eq=False)
class Prompts:
    """N prompts, each known by itself: rows are independent of each other.

    prompt_len (N,): tokens, not negative, kept as floats. texts (N,): None where there is no text. client (N,): who
    asks; None where nobody says. answers_before (N,): tokens of each earlier answer in the prompt's conversation, oldest first;
    None where conversations are not known. Raises ValueError on columns that do not fit together or are no lengths.
    """

    prompt_len: NDArray[np.float64]
    texts: Sequence[str] | None = None
    client: Sequence[str | None] | None = None
    answers_before: Sequence[Sequence[int] | None] | None = None

    def __post_init__(self) -> None:
        lens = np.asarray(self.prompt_len, dtype=np.float64)
        object.__setattr__(self, "prompt_len", lens)
        if lens.ndim != 1:
            raise ValueError(f"prompt_len has shape {lens.shape}, one column is needed")
        for name in ("texts", "client", "answers_before"):
            column = getattr(self, name)
            if column is not None and len(column) != len(lens):
                raise ValueError(f"prompt_len has {len(lens)} rows, {name} has {len(column)}")
        if lens.size and not (np.all(np.isfinite(lens)) and lens.min() >= 0):
            raise ValueError("prompt lengths must be finite and not negative")

    def __len__(self) -> int:
        return len(self.prompt_len)

    def take(self, rows: ArrayLike) -> Prompts:
        """The rows (n,), in that order."""
        at = np.asarray(rows, dtype=np.int64)
        columns = (self.texts, self.client, self.answers_before)
        texts, client, before = (None if column is None else [column[i] for i in at.tolist()] for column in columns)
        return Prompts(self.prompt_len[at], texts, client, before)

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Prompts:
        """What the requests say. There are texts only where all have one, so that nothing depends on the company of a row."""
        lens = np.array([r.prompt_len for r in requests], dtype=np.float64)
        texts = [r.prompt for r in requests if r.prompt is not None]
        client = [r.client for r in requests]
        before = [r.answers_before for r in requests]
        return cls(
            lens,
            texts if len(texts) == len(requests) else None,
            None if all(name is None for name in client) else client,
            None if all(row is None for row in before) else before,
        )
