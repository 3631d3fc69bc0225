"""Adaptive chunks: as much of the prompts beside the decodes as keeps the step within a target for the time between tokens."""

from __future__ import annotations

import math

from .chunked import Chunked


class Adaptive(Chunked):
    """A step with decodes is to take `target` s: base + per_row x rows + per_context x their context + per_prefill x chunk
    tokens, in seconds, as in an affine cost model; what the decodes leave of it goes to prompts, but never less than `least`
    tokens, nor more than the token budget. Where nobody decodes there is nobody to delay, and the whole budget is theirs.

    So few or short decodes let prompts in faster, and many or long ones slow them down, where one chunk size is to be tuned for
    each load (Sarathi-Serve, OSDI 2024; its code may also make chunks smaller along a prompt, by a schedule). The attention of
    a chunk to what stands before it in its prompt is not counted. Raises ValueError for a target, coefficients or a least that
    are none.
    """

    def __init__(
        self, target: float, base: float, per_row: float, per_context: float, per_prefill: float, least: int = 16
    ) -> None:
        for name, value in (("target", target), ("per_prefill", per_prefill)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value} s must be > 0 and finite")
        for name, value in (("base", base), ("per_row", per_row), ("per_context", per_context)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value} s must be >= 0 and finite")
        if least < 1 or least != int(least):
            raise ValueError(f"least={least} tokens must be a whole number >= 1")
        self.target, self.base, self.per_row, self.per_context = target, base, per_row, per_context
        self.per_prefill, self.least = per_prefill, least

    def budget(self, rows: int, context: int, limit: int) -> int:
        if not rows:
            return limit
        left = self.target - (self.base + self.per_row * rows + self.per_context * context)
        return min(rows + max(int(left / self.per_prefill), self.least), limit)
