"""Contiguous KV with max-length reservation (FasterTransformer, Orca): the baseline that paging replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policy import FOREVER
from .cache import KVCache

if TYPE_CHECKING:
    from ..request import Request


class Contiguous(KVCache):
    """Admission reserves prompt + max_new_tokens - 1 tokens in one piece; decoding never needs more.

    Pieces are taken as freely placeable (no external fragmentation), which flatters this baseline.
    """

    def __init__(self, num_tokens: int, watermark: float = 0.0) -> None:
        super().__init__(num_tokens, 1, watermark)

    def blocks_at_end(self, req: Request) -> int:
        return req.prompt_len + req.max_new_tokens - 1

    def blocks_to_admit(self, req: Request, tokens: int) -> int:
        return self.blocks_at_end(req)

    def held(self, req: Request, tokens: int) -> int:
        return self.blocks_at_end(req)

    def growth(self) -> int:
        return 0

    def room(self, blocks: int | None = None) -> int:
        return FOREVER

    def join(self, tokens: int) -> None: ...
    def leave(self, tokens: int) -> None: ...
    def advance(self, num_steps: int) -> None: ...
