"""The simulated stage: a clock that jumps, a cost model for time, the workload's own lengths for the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.cost import CostModel
from lengthwise.sched import KVCache

from .dataset import Dataset, Workload
from .nodes import Config, load_hardware, pool_tokens
from .provenance import range_marks
from .run import Run
from .stage import Begun
from .watched import LOOK


@dataclass(frozen=True)
class SimulatedStage:
    """See stage.py. fast_forward: run up to `plan.repeat` steps a plan; off, results are the same bits."""

    fast_forward: bool = True
    look: int = LOOK

    default_hardware: ClassVar[str | None] = "llama31_8b_h100"

    def check(self, cfg: Config) -> None:
        if cfg.get("hardware") is None:
            raise ValueError("hardware=null: a simulation needs a hardware node to price its steps")

    def rows_key(self) -> dict[str, Any]:
        return {}

    def rows(self, dataset: Dataset) -> Dataset:
        return dataset

    def named(self, dataset: Dataset, kv: KVCache) -> Dataset:
        return dataset

    def names(self, cfg: Config) -> dict[str, Any]:
        return {}

    def pool_tokens(self, cfg: Config) -> int:
        return pool_tokens(cfg, load_hardware(cfg))

    def max_model_len(self, cfg: Config) -> int:
        return int(cfg["limits"]["max_model_len"])

    def cost(self, cfg: Config) -> CostModel:
        return load_hardware(cfg).cost

    def kv_bytes(self, cfg: Config) -> float:
        return load_hardware(cfg).kv_bytes_per_token

    def begin(self, cfg: Config, kv: KVCache, workload: Workload) -> Begun:
        hardware, clock = load_hardware(cfg), SimulatedClock()
        executor = SimulatedExecutor(
            clock, hardware.cost, workload.output_len.tolist(), fast_forward=self.fast_forward,
            swap_seconds=lambda swaps: hardware.swap_seconds(swaps, kv.block_tokens),
        )  # fmt: skip
        return Begun(clock, executor)

    def provenance(self, cfg: Config) -> dict[str, Any]:
        hardware = load_hardware(cfg)
        return {"hardware": {"name": hardware.name, "model": hardware.model, **hardware.provenance}}

    def marks(self, cfg: Config, run: Run) -> list[str]:
        return range_marks(run, load_hardware(cfg))

    def measured(self, executor: Any, cpu: float, num_steps: int) -> dict[str, Any]:
        # of the whole loop, the simulated executor included: an upper bound on what scheduling costs
        return {"simulate_cpu": cpu, "overhead_us_per_step": cpu / max(num_steps, 1) * 1e6}
