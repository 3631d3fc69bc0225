"""CppPaged: paged attention of the CPU in C++ (cpp/attention.cpp), opaque to torch.compile.

Keys lie transposed and head by head, in panels of 16 tokens: see the source. Block sizes that are a multiple of 16 are fast, if
V is one too and K is even; others are right.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..batch import Batch
from ..cpp import build
from ..pool import KV_DTYPES, LayerSpec, Pool
from .scaled import LARGEST


class CppPaged:
    """Pool tensors: keys (num_blocks, Hkv, block_size, K) and values (num_blocks, Hkv, block_size, V), in an order of their own
    inside a block and head; for int8 and fp8 also the scales of both, (num_blocks, Hkv, block_size) fp32. A result depends on
    its own row only, neither on the rest of the batch nor on the number of threads.

    isa: what the kernel was built for. Raises RuntimeError where it cannot be built."""

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        self.isa = build.load("attention", isa)
        _register_fakes()

    def new_pool(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: str, device: torch.device | str = "cpu"
    ) -> Pool:
        """Raises ValueError for an unknown dtype, no size, or another device."""
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")
        if block_size < 1 or num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens: both must be at least 1")
        if torch.device(device).type != "cpu":
            raise ValueError(f"attention backend 'cpu' has no pool on {device}")
        shape, kept = (num_blocks, spec.num_kv_heads, block_size), KV_DTYPES[dtype]
        tensors = [torch.empty(*shape, dim, dtype=kept) for dim in (spec.k_dim, spec.v_dim)]
        if kept in LARGEST:
            tensors += [torch.empty(shape, dtype=torch.float32) for _ in range(2)]
        for tensor in tensors:
            torch.ops.lengthwise.large_pages(tensor)
            tensor.zero_()  # takes the memory now, not in the middle of serving
        return Pool(tuple(tensors), block_size)

    def store(self, pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
        torch.ops.lengthwise.paged_store(key, value, slots, *_four(pool))

    def attend(
        self, pool: Pool, query: Tensor, batch: Batch, group: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out: Tensor = torch.ops.lengthwise.paged_attend(
            query,
            *_four(pool),
            batch.query_start,
            batch.context_len,
            batch.groups[group].block_tables,
            scale,
            window or 0,
            softcap or 0.0,
        )
        return out


def _four(pool: Pool) -> tuple[Tensor | None, ...]:
    return (*pool.tensors, None, None)[:4]


@cache
def _register_fakes() -> None:
    """What torch.compile must know of the operators: the shape that comes out."""

    def attend(query: Tensor, key_pool: Tensor, value_pool: Tensor, *_: object) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[1], value_pool.shape[3])

    torch.library.register_fake("lengthwise::paged_attend", attend)
    torch.library.register_fake("lengthwise::paged_store", lambda *_: None)
