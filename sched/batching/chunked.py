"""Chunked prefill: decodes first, what is left of the token budget goes to prompts (Sarathi-Serve, OSDI 2024, section 4)."""

from __future__ import annotations

from .batching import Batching


class Chunked(Batching):
    """No decode ever waits for a prefill longer than one step of `token_budget` tokens."""

    def chunk(self, left: int, budget_left: int, fresh: bool) -> int:
        return min(left, budget_left)
