"""Saturation rate: what the engine completes per second when there is always work, under FCFS + chunked + paged.

Load is rate / saturation rate, so that one load means the same for every policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.sched import Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS
from lengthwise.sched.preemption import recompute

from .cell import Config, load_dataset, load_hardware
from .dataset import Workload
from .draw import stream
from .source import WorkloadSource


class FinishTimes:
    """An observer that keeps when requests finished, and counts rejections."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_rejected = 0

    def step(self, *_: Any) -> None: ...

    def ended(self, request: Any, num_tokens: int, reason: str, now: float) -> None:
        if reason.startswith("rejected"):
            self.num_rejected += 1
        else:
            self.times.append(now)


def saturation_key(cfg: Config) -> dict[str, Any]:
    """What the rate depends on: limits, pool, hardware, lengths. Not policy, arrivals, load or seed."""
    node = {k: v for k, v in cfg["kv"].items() if k in ("block_size", "watermark")}
    return {"limits": dict(cfg["limits"]), "kv": node, "hardware": dict(cfg["hardware"]), "workload": dict(cfg["workload"])}


def measure_saturation(cfg: Config) -> dict[str, Any]:
    """20 x max_num_seqs requests at t = 0 (rows drawn with replacement by a fixed seed); completions per second between the
    15 % and the 85 % completion. Raises ValueError when fewer than half are served."""
    dataset, hardware, limits = load_dataset(cfg), load_hardware(cfg), cfg["limits"]
    n = 20 * limits["max_num_seqs"]
    rng = stream(0, "saturation")
    rows = rng.permutation(len(dataset))[:n] if n <= len(dataset) else rng.integers(0, len(dataset), n)
    workload = Workload(dataset, rows.astype(np.int64), np.zeros(n))
    clock, observer = SimulatedClock(), FinishTimes()
    pool = limits.get("kv_pool_tokens") or hardware.kv_pool_tokens()
    kv = Paged(pool, **saturation_key(cfg)["kv"])
    executor = SimulatedExecutor(clock, hardware.cost, workload.output_len.tolist())
    scheduler = Scheduler(
        FCFS(), Chunked(), kv, recompute(),
        max_num_seqs=limits["max_num_seqs"], token_budget=limits["token_budget"],
        max_model_len=limits["max_model_len"], clip=limits.get("clip", False),
    )  # fmt: skip
    serve(WorkloadSource(workload, None, None, gate=False), scheduler, executor, clock, observer)
    times = np.asarray(observer.times)
    if len(times) < n / 2:
        raise ValueError(f"only {len(times)} of {n} requests are served: {observer.num_rejected} rejected at the door")
    first, last = int(0.15 * len(times)), int(0.85 * len(times))
    return {
        "rate": float((last - first) / (times[last] - times[first])),
        "num_requests": n,
        "num_rejected": observer.num_rejected,
        "kv_pool_tokens": pool,
        "num_preemptions": scheduler.num_preemptions,
        "policy": "fcfs + chunked + paged",
    }
