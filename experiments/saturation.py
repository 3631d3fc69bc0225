"""Saturation rate: what the engine completes per second when there is always work, under FCFS + chunked + paged.

Load is rate / saturation rate, so that one load means the same for every policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.sched import Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS
from lengthwise.sched.preemption import recompute

from .dataset import Workload
from .draw import stream
from .nodes import Config, load_dataset, load_hardware, load_stage, pool_tokens, rows_key
from .source import WorkloadSource
from .stage import Asking


class FinishTimes:
    """An observer that keeps when requests finished, and counts rejections."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_rejected = 0

    def step(self, *_: Any) -> None: ...

    def ended(self, request: Any, num_tokens: int, reason: str, now: float) -> None:
        if reason.startswith("rejected"):
            self.num_rejected += 1
        elif reason in ("stop", "length"):
            self.times.append(now)


def saturation_key(cfg: Config) -> dict[str, Any]:
    """What the rate depends on: limits, pool, hardware, lengths. Not system, policy, arrivals, load or seed: all are to be
    compared at the same rates. An object (not a node) stands for itself, and cannot be written as JSON."""
    parts = {part: cfg.get(part) for part in ("limits", "hardware")}
    return {part: dict(node) if isinstance(node, Mapping) else node for part, node in parts.items()} | rows_key(cfg)


def measure_saturation(cfg: Config) -> dict[str, Any]:
    """20 x max_num_seqs requests at t = 0 (rows drawn by a fixed seed, without replacement where they suffice; nobody
    times out); completions per second between the 15 % and the 85 % completion. Raises ValueError when fewer than half are
    served."""
    if cfg.get("executor") is not None and isinstance(stage := load_stage(cfg), Asking):
        return stage.saturation(cfg, load_dataset(cfg))
    dataset, hardware, limits = load_dataset(cfg), load_hardware(cfg), cfg["limits"]
    n = 20 * limits["max_num_seqs"]
    rng = stream(0, "saturation")
    rows = rng.permutation(len(dataset))[:n] if n <= len(dataset) else rng.integers(0, len(dataset), n)
    patient = replace(dataset, columns={k: v for k, v in dataset.columns.items() if k != "timeout"})
    workload = Workload(patient, rows.astype(np.int64), np.zeros(n))
    clock, observer = SimulatedClock(), FinishTimes()
    pool = pool_tokens(cfg, hardware)
    kv = Paged(pool)
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
    return {
        "rate": middle_rate(times),
        "num_requests": n,
        "num_rejected": observer.num_rejected,
        "kv_pool_tokens": pool,
        "num_preemptions": scheduler.num_preemptions,
        "policy": "fcfs + chunked + paged",
    }


def middle_rate(times: NDArray[np.float64]) -> float:
    """Completions per second between the 15 % and the 85 % of those at `times` (n,) s, sorted."""
    first, last = int(0.15 * len(times)), int(0.85 * len(times))
    return float((last - first) / (times[last] - times[first]))
