"""Attention: what a backend does. Layout inside a block, kernels and precision are its own; block tables are not."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..batch import Batch
from ..pool import LayerSpec, Pool


class Attention(Protocol):
    """Shapes: N tokens, Hq query heads, Hkv KV heads (Hq a multiple of it), K and V dims of a head."""

    name: str

    def new_pool(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: str, device: torch.device) -> Pool:
        """Empty KV memory of one layer. dtype: a key of KV_DTYPES. Raises ValueError for what the backend cannot do."""
        ...

    def store(self, pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put key (N, Hkv, K) and value (N, Hkv, V) into `slots` (N,); a negative slot keeps nothing. Mutates `pool`."""
        ...

    def attend(
        self, pool: Pool, query: Tensor, batch: Batch, group: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of query (N, Hq, K) over the blocks of each row, (N, Hq, V) in the query's dtype. With a window w,
        position i attends j with i - w < j <= i. softcap c: scores become c * tanh(score / c). Rows of context 0 give zeros."""
        ...
