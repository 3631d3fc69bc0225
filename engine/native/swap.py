"""SwapStore: KV of requests that have been swapped out, in host memory or on disk. How much fits is the scheduler's affair."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lengthwise.sched import Request, Swap
from lengthwise.sched.plan import DEVICE

from .pool import Pool

Parts = list[tuple[Tensor, ...]]  # for each pool, its tensors of so many blocks


class SwapStore:
    """Copies of blocks by request. `disk`: whatever tier has that name is kept in files below a temporary folder; others in
    host memory, pinned where the pools are on a GPU."""

    def __init__(self, pools: Sequence[Pool], disk: str = "disk") -> None:
        self._pools = pools
        self._device = pools[0].tensors[0].device
        self._disk = disk
        self._folder: Path | None = None
        self._there: dict[Request, Parts | Path] = {}

    def __len__(self) -> int:
        return len(self._there)

    def copy(self, swap: Swap) -> None:
        """Do one copy of a plan. Mutates the pools, or what is kept here. Raises ValueError for copies without block ids."""
        if len(swap.blocks) != swap.num_blocks:
            raise ValueError(f"{swap} names {len(swap.blocks)} blocks: the KV cache must keep tables")
        blocks = torch.tensor(swap.blocks, dtype=torch.int64, device=self._device)
        if swap.source == DEVICE:
            parts = [pool.export(blocks) for pool in self._pools]
            self._there[swap.request] = self._write(swap.request, parts) if swap.target == self._disk else self._pin(parts)
            return
        there = self._there.pop(swap.request)
        if swap.num_blocks:
            parts = torch.load(there, weights_only=True) if isinstance(there, Path) else there
            for pool, tensors in zip(self._pools, parts, strict=True):
                pool.restore(blocks, tuple(tensor[-swap.num_blocks :] for tensor in tensors))
        if isinstance(there, Path):
            there.unlink()

    def drop(self, request: Request) -> None:
        """Forget what there is of `request`, if anything."""
        there = self._there.pop(request, None)
        if isinstance(there, Path):
            there.unlink()

    def _pin(self, parts: Parts) -> Parts:
        if self._device.type != "cuda":
            return parts
        return [tuple(tensor.pin_memory() for tensor in tensors) for tensors in parts]

    def _write(self, request: Request, parts: Parts) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lengthwise-swap-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"{request.rid}.pt"
        torch.save(parts, path)
        return path
