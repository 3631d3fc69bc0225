"""ParallelModel: one model over several processes. Rank 0 is driven by the executor; the others follow what it announces.

Scheduler, sampling and block tables live on rank 0 alone; a follower gets each Batch as two broadcasts of integers, and
computes its heads with its own slice of weights and KV. Nothing above ServedModel knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .attention.backend import Attention
from .batch import Batch, Placed
from .model import ServedModel
from .pool import Pool
from .shards import plan_of, shard

CLOSE, FORWARD, LOGITS, OTHER = range(4)
NUM_HEADER, NUM_FIXED = 32, 8  # integers of an announcement, and those before the groups' table widths


class ParallelModel(ServedModel):
    """This rank's share of `served`, which is the same and whole on every rank of `group` and is used up. All ranks make it at
    once; then rank 0 is used as any ServedModel, and `close` ends what the others do in `follow`.

    Raises ValueError when the model cannot be shared evenly."""

    def __init__(self, served: ServedModel, group: dist.ProcessGroup) -> None:
        whole, size = served.layers, dist.get_world_size(group)
        refuse(served, size)
        served.detach()
        self.head_shared = shard(served.model, group)
        super().__init__(served.model, served.tokenizer, served.name)
        expected = [replace(spec, num_kv_heads=spec.num_kv_heads // size) for spec in whole]
        if self.layers != expected:
            raise ValueError(f"{served.name} is not shared between ranks: its heads do not follow its projections' widths")
        self.num_params, self.verified = served.num_params, served.verified
        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), size
        self.processes: list[Any] = []  # started for this model

    # Rank 0

    def new_pools(self, attention: Attention, num_blocks: int, block_size: int, kv_dtype: str) -> list[Pool]:
        self._tell("pools", attention.name, num_blocks, block_size, kv_dtype)
        own = super().new_pools(attention, num_blocks, block_size, kv_dtype)
        return [SharedPool(pool.tensors, pool.block_size, self, layer) for layer, pool in enumerate(own)]

    def attach(self, attention: Attention, pools: Sequence[Pool]) -> None:
        """Raises ValueError: pools made on this rank alone cannot be attached on the others; `new_pools` makes them on all."""
        raise ValueError(f"{self.name} is shared by {self.num_ranks} ranks: pools come from new_pools only")

    def forward(self, batch: Batch) -> Tensor:
        if self.rank == 0:
            self._send_batch(batch)
        return super().forward(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.rank == 0 and self.head_shared:
            self._announce(LOGITS, hidden.shape[0])
            dist.broadcast(hidden.contiguous(), 0, group=self.group)
        return super().logits(hidden)

    def close(self) -> None:
        """End `follow` on the other ranks, and the processes that `start` has started."""
        super().close()
        self._announce(CLOSE)
        if self.processes:
            dist.destroy_process_group(self.group)
            for process in self.processes:
                process.join()
            self.processes = []

    def _announce(self, what: int, *numbers: int) -> None:
        header = torch.zeros(NUM_HEADER, dtype=torch.int64)
        header[: 1 + len(numbers)] = torch.tensor([what, *numbers])
        dist.broadcast(header.to(self.device), 0, group=self.group)

    def _tell(self, what: str, *arguments: Any) -> None:
        self._announce(OTHER)
        dist.broadcast_object_list([what, arguments], 0, group=self.group, device=self.device)

    def _send_batch(self, batch: Batch) -> None:
        widths = [placed.block_tables.shape[1] for placed in batch.groups]
        sizes = batch.num_tokens, batch.num_rows, batch.num_decode, batch.max_query, batch.max_context, batch.emit.shape[0]
        self._announce(FORWARD, *sizes, len(widths), *widths)
        parts = [batch.token_ids, batch.positions, batch.query_start, batch.context_len, batch.emit]
        parts += [part.flatten() for placed in batch.groups for part in (placed.slots, placed.block_tables)]
        dist.broadcast(torch.cat([part.long() for part in parts]), 0, group=self.group)

    # The other ranks

    def follow(self) -> None:
        """Do what rank 0 announces until it closes."""
        while True:
            header = torch.empty(NUM_HEADER, dtype=torch.int64, device=self.device)
            dist.broadcast(header, 0, group=self.group)
            what, *numbers = header.tolist()
            if what == CLOSE:
                self.detach()
                return
            if what == FORWARD:
                super().forward(self._take_batch(numbers))
            elif what == LOGITS:
                hidden = torch.empty(numbers[0], self.hidden_size, dtype=self.dtype, device=self.device)
                dist.broadcast(hidden, 0, group=self.group)
                super().logits(hidden)
            else:
                self._obey()

    def _take_batch(self, numbers: list[int]) -> Batch:
        n, rows, num_decode, max_query, max_context, num_emit, num_groups = numbers[: NUM_FIXED - 1]
        widths = numbers[NUM_FIXED - 1 : NUM_FIXED - 1 + num_groups]
        lens = [n, n, rows + 1, rows, num_emit]
        for width in widths:
            lens += [n, rows * width]
        flat: Any = torch.empty(sum(lens), dtype=torch.int64, device=self.device)
        dist.broadcast(flat, 0, group=self.group)
        token_ids, positions, query_start, context_len, emit, *rest = flat.split(lens)
        groups = [
            Placed(slots, table.int().view(rows, width))
            for slots, table, width in zip(rest[::2], rest[1::2], widths, strict=True)
        ]
        return Batch(
            token_ids, positions, query_start.int(), context_len.int(), num_decode, max_query, max_context, emit, groups
        )

    def _obey(self) -> None:
        from .attention.choose import choose

        told: list[Any] = [None, None]
        dist.broadcast_object_list(told, 0, group=self.group, device=self.device)
        what, arguments = told
        if what == "pools":
            super().new_pools(choose(arguments[0], self.device), *arguments[1:])
            return
        layer, *rest = arguments
        pool: Pool = self._modules[layer].lengthwise.pool
        if what == "copy_blocks":
            pool.copy_blocks(*rest)
        elif what == "export":
            dist.gather_object(pool.export(rest[0].to(self.device)), None, 0, group=self.group)
        elif what == "restore":
            own: list[Any] = [None]
            dist.scatter_object_list(own, None, 0, group=self.group)
            pool.restore(rest[0].to(self.device), own[0])


def refuse(served: ServedModel, size: int) -> None:
    """Raise ValueError when `size` ranks cannot share the model."""
    plan_of(served.model)
    if bad := [spec.num_kv_heads for spec in served.layers if spec.num_kv_heads % size]:
        raise ValueError(f"{served.name} has {bad[0]} KV heads, which {size} ranks cannot share evenly")


@dataclass(frozen=True, slots=True)
class SharedPool(Pool):
    """Rank 0's share of one layer's KV; what is done to its blocks is done on every rank. `export` gives the tensors of all
    ranks, one rank's after the other's."""

    model: ParallelModel
    layer: int

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.model._tell("copy_blocks", self.layer, sources, targets)
        Pool.copy_blocks(self, sources, targets)

    def export(self, blocks: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        model._tell("export", self.layer, blocks.cpu())
        parts: list[Any] = [None] * model.num_ranks
        dist.gather_object(Pool.export(self, blocks), parts, 0, group=model.group)
        return tuple(tensor for part in parts for tensor in part)

    def restore(self, blocks: Tensor, data: tuple[Tensor, ...]) -> None:
        model, each = self.model, len(self.tensors)
        model._tell("restore", self.layer, blocks.cpu())
        parts = [data[at : at + each] for at in range(0, len(data), each)]
        dist.scatter_object_list([None], parts, 0, group=model.group)
        Pool.restore(self, blocks, parts[0])
