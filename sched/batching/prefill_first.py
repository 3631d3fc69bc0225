"""Prefill first: a step is either prompts or decodes, prompts first (vLLM before V1, SOSP 2023; SGLang and LightLLM)."""

from __future__ import annotations

from .batching import Batching, whole


class PrefillFirst(Batching):
    """While prompts can be admitted, decodes stand still. chunks: a prompt that is longer than what is left of the token budget
    is cut (SGLang), and may be longer than all of it; else a prompt runs whole."""

    mixes = False

    def __init__(self, chunks: bool = False) -> None:
        self.whole_prompts = not chunks

    def chunk(self, left: int, budget_left: int, fresh: bool) -> int:
        return whole(left, budget_left, fresh and self.whole_prompts)
