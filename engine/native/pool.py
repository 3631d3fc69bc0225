"""Pool: the KV memory of one layer, in blocks. What lies inside a block is the attention backend's own affair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import moved


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps of a token: num_kv_heads keys of k_dim and values of v_dim. window: positions that it
    attends, itself included, or None for all. group: layers of one group share block tables."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    group: int = 0

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Pool:
    """KV of one layer. tensors: keys, values and whatever goes with them (scales), each (num_blocks, ...)."""

    tensors: tuple[Tensor, ...]
    block_size: int

    @property
    def num_blocks(self) -> int:
        return int(self.tensors[0].shape[0])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block sources[i] to targets[i], all read before any is written. Mutates the pool."""
        read, write = (moved(torch.tensor(blocks), self.tensors[0].device) for blocks in (sources, targets))
        for tensor in self.tensors:
            tensor[write] = tensor.index_select(0, read)

    def export(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Copies of `blocks` (n,) int64 on the CPU, one tensor (n, ...) for each of `tensors`."""
        return tuple(tensor.index_select(0, blocks).cpu() for tensor in self.tensors)

    def restore(self, blocks: Tensor, data: tuple[Tensor, ...]) -> None:
        """Write what `export` gave into `blocks`. Mutates the pool."""
        for tensor, part in zip(self.tensors, data, strict=True):
            tensor[blocks.to(tensor.device)] = part.to(tensor.device)  # index_copy_ has no fp8


KV_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
