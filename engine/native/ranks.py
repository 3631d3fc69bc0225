"""Ranks: the processes that share one model, from their start to their end. What they do in between is parallel.py's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .model import ServedModel
from .parallel import ParallelModel, refuse

TIMEOUT = timedelta(days=7)  # followers of an idle engine wait this long


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
