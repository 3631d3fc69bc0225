"""TorchLayout: what the backends for GPUs share that keep KV as TorchPaged does and differ in how they attend it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..pool import LayerSpec, Pool
from .torch_paged import TorchPaged

log = logging.getLogger(__name__)


class TorchLayout(ABC):
    """Pools and stores of a backend; `unfit` says what it cannot do."""

    @abstractmethod
    def unfit(self, spec: LayerSpec, block_size: int, dtype: str, softcap: float | None = None) -> str | None:
        """Why such a layer cannot be served, or None."""

    def new_pool(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: str, device: torch.device) -> Pool:
        """Raises ValueError with the reason for a layer that is unfit."""
        if reason := self.unfit(spec, block_size, dtype):
            raise ValueError(reason)
        return TorchPaged().new_pool(spec, num_blocks, block_size, dtype, device)

    def store(self, pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Mutates `pool`."""
        store(pool, key, value, slots)


def store(pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """One Triton kernel where there is Triton, plain torch otherwise. Mutates `pool`."""
    kernel = _store_kernel() if key.is_cuda else None
    if kernel is None:
        TorchPaged().store(pool, key, value, slots)
    else:
        kernel(pool, key, value, slots)


@cache
def _store_kernel() -> Any:
    """None without Triton; looked for once, not by every layer of every step."""
    try:
        from .triton_paged import store as kernel
    except ImportError as error:
        log.warning("KV is stored by plain torch operations, which is slow: %s", error)
        return None
    return kernel
