"""Mixed batching: whole prompts beside decodes in one step (Orca, OSDI 2022, selective batching)."""

from __future__ import annotations

from .batching import Batching, whole


class Mixed(Batching):
    """Iteration-level scheduling without chunking: a prompt runs whole, beside the decodes of that step."""

    whole_prompts = True

    def chunk(self, left: int, budget_left: int, fresh: bool) -> int:
        return whole(left, budget_left, fresh)
