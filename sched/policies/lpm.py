"""Longest prefix match: who has most of its prompt cached goes first (SGLang, NeurIPS 2024, section 3)."""

from __future__ import annotations

from ..ports import View
from ..request import Request
from .cache_aware import CacheAware


class LPM(CacheAware):
    """Rank: the more of the prompt is cached, the lower; ties by arrival. Nothing bounds how long a prompt that nobody shares
    may wait."""

    def rank(self, req: Request, view: View) -> float:
        return -view.cached_len(req)
