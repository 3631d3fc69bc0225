"""The native stage: a served model on this machine. Arrivals are replayed in real time, so a cell takes as long as it says.

What is decided (order, lengths, tokens under greedy sampling) is the same whenever the step times are; what is measured is not.
Told the step times of a cost model instead, the engine computes the same tokens on a clock that jumps, and a run is the
simulation's, plan by plan.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import lengthwise.engine.native  # noqa: F401 - light, and says how OpenMP workers wait before anything loads their runtime
from lengthwise.engine.simulated import SimulatedClock
from lengthwise.engine.simulated.cost import CostModel
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.sched import KVCache, Plan

from .dataset import Dataset, Workload
from .machine import machine
from .nodes import Config, load_hardware, make, predictor_target
from .provenance import range_marks
from .run import Run
from .served import named_pieces, servable
from .stage import Begun

log = logging.getLogger(__name__)

LENGTHS = ("forced", "free")
TIMES = ("measured", "told")
DEPTHS: tuple[int | str, ...] = ("auto", 1, 2)
OWN_LENGTHS = "answers are as long as the model made them: E2E is not that of other arms, TTFT and E2E / token are comparable"
DIFFERS = "timed on a machine: the same seed gives the same requests and token counts, never the same times"


@dataclass(frozen=True)
class NativeStage:
    """See stage.py. model: a node that loads a ServedModel, or one. attention, kv_dtype, linears, compiled, threads,
    memory_share: as NativeEngine takes them; depth: as its executor does. lengths: forced, answers are as long as the
    workload's (in its unit), whatever their tokens; free, the model's own end tokens and max_new_tokens decide. sampling:
    fields of SamplingParams, for all requests; None: greedy. seed: of ids made up for prompts without text, and of sampling.
    times: measured, by the wall clock; told, steps take what the hardware's cost model says, and arrivals need not be waited
    for.
    """

    model: Any
    attention: str = "auto"
    kv_dtype: str | None = None
    linears: str = "auto"
    compiled: bool = False
    threads: int | None = None
    memory_share: float = 0.8
    depth: int | str = "auto"
    lengths: str = "forced"
    sampling: Mapping[str, Any] | None = None
    seed: int = 0
    times: str = "measured"
    look: int = 1

    default_hardware: ClassVar[str | None] = None

    def check(self, cfg: Config) -> None:
        choices = (("lengths", self.lengths, LENGTHS), ("times", self.times, TIMES), ("depth", self.depth, DEPTHS))
        for key, value, known in choices:
            if value not in known:
                raise ValueError(f"executor.{key}={value!r}: choose {' or '.join(map(str, known))}")
        if self.times == "told" and cfg.get("hardware") is None:
            raise ValueError("executor.times=told: give the hardware whose cost model tells them")
        target = predictor_target(cfg)
        if self.lengths == "free" and target is not None and hasattr(target, "from_truth"):
            raise ValueError(
                "executor.lengths=free: the model decides how long answers are, which no oracle can know beforehand"
            )
        if self.lengths == "free" and getattr(make(cfg.get("refine")), "reads_truth", False):
            raise ValueError("executor.lengths=free: the model decides how long answers are, so none is known to refine by")
        told = cfg["rate"] is not None or cfg["load"] is None or cfg.get("saturation") is not None
        if not told and self.times == "measured" and not is_profile(cfg):
            raise ValueError(
                f"load={cfg['load']:g} on a real engine is a share of a rate that nobody has measured: give rate= or "
                "saturation=, or the engine's profile (hardware=profiled hardware.path=PATH, written by `lengthwise profile`)"
            )

    # --- rows -----------------------------------------------------------------------------------------------------------

    def rows_key(self) -> dict[str, Any]:
        return {"model": _plain(self.model), "lengths": self.lengths, "seed": self.seed}

    def rows(self, dataset: Dataset) -> Dataset:
        return servable(dataset, self.loaded().model, lengths=self.lengths, seed=self.seed)

    def named(self, dataset: Dataset, kv: KVCache) -> Dataset:
        return named_pieces(dataset, kv.block_size) if kv.indexes else dataset

    # --- engine ---------------------------------------------------------------------------------------------------------

    def loaded(self) -> Any:
        """The NativeEngine, loaded once per process for as long as no other is asked for."""
        options = {
            "attention": self.attention, "kv_dtype": self.kv_dtype, "threads": self.threads,
            "memory_share": self.memory_share, "linears": self.linears, "compiled": self.compiled,
        }  # fmt: skip
        return _loaded(self.model, options)

    def names(self, cfg: Config) -> dict[str, Any]:
        node = (cfg.get("choices") or {}).get("executor") or "native"  # native_free is to be told from native
        return {"executor": node, "model": self.loaded().model.name}

    def pool_tokens(self, cfg: Config) -> int:
        limits = cfg["limits"]
        if (given := limits.get("kv_pool_tokens")) is not None:
            return int(given)
        # a small model leaves memory for more than its requests can fill, which would take minutes to clear
        return int(min(self.loaded().pool_tokens(), limits["max_num_seqs"] * self.max_model_len(cfg)))

    def max_model_len(self, cfg: Config) -> int:
        return int(min(cfg["limits"]["max_model_len"], self.loaded().model.max_positions))

    def kv_bytes(self, cfg: Config) -> float:
        return float(self.loaded().kv_bytes_per_token)

    def begin(self, cfg: Config, kv: KVCache, workload: Workload) -> Begun:
        engine, params = self.loaded(), self._params()
        if self.times == "measured":
            from lengthwise.engine.native.generate import warm_up

            warm_up(engine, kv.block_size)
        if workload.dataset.prompt_ids is not None:
            for row in workload.rows.tolist():
                len(workload.dataset.prompt_ids[row])  # made up now, not while the clock runs
        lens = workload.output_len.tolist() if self.lengths == "forced" else None
        options = {
            "sampling": params, "seed": self.seed, "max_num_seqs": cfg["limits"]["max_num_seqs"], "answer_lens": lens,
            "depth": self.depth, "probe": engine.look_at(getattr(make(cfg.get("refine")), "layer", None)),
        }  # fmt: skip
        if self.times == "told":
            hardware, jumping = load_hardware(cfg), SimulatedClock()
            executor = engine.executor(
                kv, jumping, seconds=lambda plan: step_seconds(hardware.cost, plan),
                swap_seconds=lambda swaps: hardware.swap_seconds(swaps, kv.block_tokens), **options,
            )  # fmt: skip
            return Begun(jumping, executor, executor.forget)
        from lengthwise.engine.native.clock import WallClock

        clock = WallClock()
        executor = engine.executor(kv, clock, **options)
        last = float(workload.arrival[-1]) if workload.is_open else None
        log.info("serving %d requests%s", len(workload), "" if last is None else f", the last arrives after {last:.0f} s")
        clock.restart()
        return Begun(clock, executor, executor.forget)

    def _params(self) -> Any:
        if not self.sampling:
            return None
        from lengthwise.engine.native.sampling import SamplingParams

        params = SamplingParams(**self.sampling)
        return lambda request: params

    # --- what is said -----------------------------------------------------------------------------------------------------

    def cost(self, cfg: Config) -> CostModel | None:
        return load_hardware(cfg).cost if self.times == "told" or not self._why_no_profile(cfg) else None

    def provenance(self, cfg: Config) -> dict[str, Any]:
        given = None if cfg.get("hardware") is None else load_hardware(cfg)
        hardware = {} if given is None else {"hardware": {"name": given.name, "model": given.model, **given.provenance}}
        engine = self.loaded()
        said = {"engine": {**facts(engine), "depth": engine.depth(self.depth)}, "lengths": self.lengths, "times": self.times}
        return {**hardware, **said, **({"deterministic": DIFFERS} if self.times == "measured" else {})}

    def marks(self, cfg: Config, run: Run) -> list[str]:
        if self.times == "told":
            return range_marks(run, load_hardware(cfg))
        out = [DIFFERS, *([OWN_LENGTHS] if self.lengths == "free" else [])]
        why = self._why_no_profile(cfg)
        if why:
            out.append(f"slowdown is absent: {why}")
        if run.summary["cell"]["load"] is not None and cfg.get("saturation") is None:
            out.append(f"the load is of a saturation rate simulated with the profile {load_hardware(cfg).name}")
        return out

    def measured(self, executor: Any, cpu: float, num_steps: int) -> dict[str, Any]:
        return {
            "serve_cpu": cpu,
            "host_seconds": executor.host_seconds,
            "overhead_us_per_step": executor.host_seconds / max(num_steps, 1) * 1e6,
        }

    def _why_no_profile(self, cfg: Config) -> str | None:
        """Why the hardware node says nothing of this engine; None where it is its profile."""
        if cfg.get("hardware") is None:
            return "no profile of this engine is given (hardware=profiled hardware.path=PATH)"
        return why_another(load_hardware(cfg), facts(self.loaded()))


def step_seconds(cost: CostModel, plan: Plan) -> float:
    """What `cost` says of a plan's step, by the calls that a simulation makes."""
    rows, context = plan.num_decode + plan.num_padding, plan.context_tokens
    if plan.chunks:
        return cost.step(rows, context, plan.chunks)
    a, c, _ = cost.decode_line(rows, context)
    return a + c * context


def facts(engine: Any) -> dict[str, Any]:
    """What step times depend on besides the code: the model as it is served, and the machine."""
    model = engine.model
    return {
        "model": model.name, "num_params": model.num_params, "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": engine.kv_dtype, "attention": engine.attention.name, "linears": engine.linears,
        "compiled": engine.compiled, **machine(model.device),
    }  # fmt: skip


def why_another(hardware: Hardware, here: Mapping[str, Any]) -> str | None:
    """How `hardware` differs from a profile of the engine that these `facts` are of; None where it is one."""
    profile = hardware.provenance.get("profile")
    if not isinstance(profile, Mapping):
        return f"hardware {hardware.name} is no profile of an engine"
    other = [f"{key} {profile.get(key)!r}, here {value!r}" for key, value in here.items() if profile.get(key) != value]
    return f"{hardware.name} was profiled with {'; '.join(other)}" if other else None


def is_profile(cfg: Config) -> bool:
    """Whether the hardware is what `lengthwise profile` has measured somewhere."""
    return cfg.get("hardware") is not None and isinstance(load_hardware(cfg).provenance.get("profile"), Mapping)


def _plain(node: Any) -> Any:
    return dict(node) if isinstance(node, Mapping) else node


_LAST: list[tuple[Any, Any]] = []  # the one engine that is loaded: (what it was asked for by, engine)


def _loaded(model: Any, options: Mapping[str, Any]) -> Any:
    asked = (json.dumps(model, sort_keys=True) if isinstance(model, Mapping) else id(model), dict(options))
    if not _LAST or _LAST[0][0] != asked:
        from lengthwise.engine.native.engine import NativeEngine

        _LAST.clear()  # two models need not fit at once
        begin = time.perf_counter()
        served = make(model)
        _LAST.append((asked, NativeEngine(served, **options)))
        log.info("loaded %s in %.1f s", served.name, time.perf_counter() - begin)
    return _LAST[0][1]
