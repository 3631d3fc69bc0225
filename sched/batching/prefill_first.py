"""Prefill first: a step is either whole prompts or decodes, prompts first (vLLM before V1, SOSP 2023)."""

from __future__ import annotations

from .batching import Batching, whole


class PrefillFirst(Batching):
    """While prompts can be admitted, decodes stand still."""

    whole_prompts = True
    mixes = False

    def chunk(self, left: int, budget_left: int, fresh: bool) -> int:
        return whole(left, budget_left, fresh)
