"""ParallelModel: one model over several processes. Rank 0 is driven by the executor; the others follow what it announces.

Scheduler, sampling and block tables live on rank 0 alone; a follower gets each Batch as two broadcasts of integers, and
computes its heads with its own slice of weights and KV. Nothing above ServedModel knows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from .attention.backend import Attention
from .batch import Batch, Placed
from .model import ServedModel
from .pool import Pool
from .shards import plan_of, shard

CLOSE, FORWARD, LOGITS, OTHER = range(4)
NUM_HEADER, NUM_FIXED = 32, 8  # integers of an announcement, and those before the groups' table widths
TIMEOUT = timedelta(days=7)  # followers of an idle engine wait this long


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
        self.group, self.rank = group, dist.get_rank(group)
        self.processes: list[Any] = []  # started for this model

    # Rank 0

    def new_pools(self, attention: Attention, num_blocks: int, block_size: int, kv_dtype: str) -> list[Pool]:
        self._tell("pools", attention.name, num_blocks, block_size, kv_dtype)
        own = super().new_pools(attention, num_blocks, block_size, kv_dtype)
        return [SharedPool(pool.tensors, pool.block_size, self, layer) for layer, pool in enumerate(own)]

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
        if what == "copy_block":
            pool.copy_block(*rest)
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

    def copy_block(self, source: int, target: int) -> None:
        self.model._tell("copy_block", self.layer, source, target)
        Pool.copy_block(self, source, target)

    def export(self, blocks: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        model._tell("export", self.layer, blocks.cpu())
        parts: list[Any] = [None] * dist.get_world_size(model.group)
        dist.gather_object(Pool.export(self, blocks), parts, 0, group=model.group)
        return tuple(tensor for part in parts for tensor in part)

    def restore(self, blocks: Tensor, data: tuple[Tensor, ...]) -> None:
        model, each = self.model, len(self.tensors)
        model._tell("restore", self.layer, blocks.cpu())
        parts = [data[at : at + each] for at in range(0, len(data), each)]
        dist.scatter_object_list([None], parts, 0, group=model.group)
        Pool.restore(self, blocks, parts[0])


def start(load: Callable[[str], ServedModel], devices: Sequence[str]) -> ParallelModel:
    """Start a process for each of `devices` but the first, which is this process's, let each `load(device)` the whole model and
    keep its share. load: picklable. CPUs talk over gloo, GPUs over NCCL. Raises ValueError when the model cannot be shared,
    RuntimeError when a process ends before it has loaded."""
    context, size = mp.get_context("spawn"), len(devices)
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="lengthwise-ranks-") as folder:
        path = str(Path(folder) / "store")
        try:
            for rank in range(1, size):
                arguments = load, devices[rank], rank, size, path, torch.get_num_threads()
                processes.append(context.Process(target=follow, args=arguments, daemon=True))
                processes[-1].start()
            served = load(devices[0])
            refuse(served, size)
            store = meeting(path, size)
            for rank, process in enumerate(processes, 1):
                while not store.check([str(rank)]):
                    process.join(0.05)
                    if not process.is_alive():
                        raise RuntimeError(
                            f"rank {rank} of {served.name} ended with exit code {process.exitcode} while loading"
                        )
            model = joined(served, devices[0], 0, size, store)
        except BaseException:
            for process in processes:
                process.terminate()
            raise
    model.processes = processes
    return model


def follow(load: Callable[[str], ServedModel], device: str, rank: int, size: int, path: str, num_threads: int) -> None:
    """The whole life of a follower."""
    torch.set_num_threads(num_threads)
    try:
        served = load(device)
        refuse(served, size)
    except ValueError:
        return  # rank 0 meets the same, and tells
    store = meeting(path, size)
    store.set(str(rank), "ready")
    model = joined(served, device, rank, size, store)
    model.follow()
    dist.destroy_process_group(model.group)


def meeting(path: str, size: int) -> Any:
    """Where `size` processes find each other: a file at `path`."""
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def joined(served: ServedModel, device: str, rank: int, size: int, store: Any) -> ParallelModel:
    """`rank`'s share of `served`, once all `size` processes are there."""
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    return ParallelModel(served, group)
