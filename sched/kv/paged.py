"""Paged KV (vLLM, SOSP 2023): blocks on demand, one block ahead.

The block-phase histogram counts how many decoders cross a block boundary at step i mod block_size. Blocks needed for k steps
are then one divmod and at most block_size additions, whatever the batch, and the horizon is computed, never searched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policy import FOREVER
from .cache import KVCache

if TYPE_CHECKING:
    from ..request import Request


class Paged(KVCache):
    """Admission takes the blocks of prompt + generated; decoding takes a block whenever a token opens one."""

    def __init__(self, num_tokens: int, block_size: int = 16, watermark: float = 0.01) -> None:
        super().__init__(num_tokens, block_size, watermark)
        self._crossings = [0] * block_size  # decoders that open a block at decode step i mod block_size
        self._num_decoders = 0
        self._phase = 0  # decode steps so far, mod block_size

    def blocks_at_end(self, req: Request) -> int:
        return self.blocks(req.prompt_len + req.max_new_tokens - 1)

    def blocks_to_admit(self, req: Request, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def held(self, req: Request, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def growth(self) -> int:
        return self._crossings[self._phase]

    def room(self, blocks: int | None = None) -> int:
        n = self._num_decoders
        if n == 0:
            return FOREVER
        size, crossings = self.block_size, self._crossings
        left = self.free if blocks is None else blocks
        periods, left = divmod(left, n)  # in block_size steps every decoder opens exactly one block
        i = self._phase
        steps = periods * size
        while crossings[i] <= left:
            left -= crossings[i]
            i = i + 1 if i + 1 < size else 0
            steps += 1
        return steps

    def join(self, tokens: int) -> None:
        self._crossings[(self._phase - tokens) % self.block_size] += 1
        self._num_decoders += 1

    def leave(self, tokens: int) -> None:
        self._crossings[(self._phase - tokens) % self.block_size] -= 1
        self._num_decoders -= 1

    def advance(self, num_steps: int) -> None:
        size, crossings, i = self.block_size, self._crossings, self._phase
        periods, rest = divmod(num_steps, size)
        end = i + rest
        need = periods * self._num_decoders + sum(crossings[i:end])
        if end >= size:
            end -= size
            need += sum(crossings[:end])
        self._phase = end
        self.free -= need
