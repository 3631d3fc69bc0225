"""Cell: one system x policy x predictor x workload x load x seed, from a resolved config to a Run.

Everything a cell needs that is costly and shared (saturation rate, learned predictions) is handed in by `prepare`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from numpy.typing import NDArray

import lengthwise
from lengthwise.engine.simulated import SimulatedClock
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.predictors.artefact import library_versions
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO, KVCache, Policy, Scheduler, serve

from .dataset import Dataset, Workload
from .draw import draw, stream
from .recorder import Recorder
from .run import Run, build
from .source import WorkloadSource
from .watched import Watched
from .windows import window

Config = Mapping[str, Any]


class Prepared(Protocol):
    """What `prepare` has made before the cells start."""

    def saturation_rate(self, cfg: Config) -> float: ...
    def predictions(self, cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]] | None: ...


def run_cell(cfg: Config, prepared: Prepared) -> Run:
    """Simulate one cell. Deterministic in cfg and what `prepared` holds; measured CPU times stand apart as volatile.

    Raises ValueError on a config that cannot be run, before anything is simulated.
    """
    dataset, hardware, policy = load_dataset(cfg), load_hardware(cfg), load_policy(cfg)
    rate = cfg["rate"]
    load = cfg["load"] if rate is None else None  # a stated rate goes before the load
    if load is not None:
        rate = load * prepared.saturation_rate(cfg)
    n, over = cfg["num_requests"], dict(cfg.get("window") or {})
    go_on = over.pop("go_on", 0.0)
    extra = int(go_on * n) if load is not None and load < 1 else 0
    workload = draw(dataset, make(cfg["arrivals"]), n, rate, cfg["seed"], resample=cfg.get("resample", False), extra=extra)
    if rate is None:  # the arrivals keep their own times
        rate = workload.notes["arrivals"]["rate"]
    predicted = predict(cfg, workload, prepared)
    needs = policy.needs & {"prediction", "distribution"}
    if needs and predicted.columns is None:
        raise ValueError(f"policy {name(cfg, 'policy')} needs a {'/'.join(sorted(needs))}; predictor is none")
    counted = window(workload.arrival[:n], load=load, rate=rate, **over)
    if len(workload) > n:  # arrivals go on after the last one that counts
        counted = replace(counted, end=min(counted.end, float(workload.arrival[n])))
    clock, recorder, kv = SimulatedClock(), Recorder(window=(counted.begin, counted.end)), load_kv(cfg, hardware)
    executor = make(cfg["executor"])(clock=clock, cost=hardware.cost, output_lens=workload.output_len.tolist())
    scheduler = load_scheduler(cfg, policy, kv)
    source = WorkloadSource(workload, predicted.columns, predicted.ready, gate=bool(needs), measured=n)
    start = time.process_time()
    serve(source, scheduler, executor, clock, Watched(recorder, n))
    cpu = time.process_time() - start
    predicted = predicted.first(source.num_born)
    info = {key: value for key, value in predicted.info.items() if key != "ms_per_request"}
    run = build(
        recorder,
        workload.first(source.num_born),
        predictions=predicted.columns,
        eligible=predicted.ready if needs else None,
        fold=predicted.fold,
        fallback=None if predicted.columns is None else predicted.columns.fallback,
        slo=SLO(**cfg["slo"]),
        window=counted,
        cost=hardware.cost,
        token_budget=cfg["limits"]["token_budget"],
        cell=cell_names(cfg, load, rate),
        provenance={**provenance(cfg, dataset, workload, hardware), "predictor": info},
        volatile={"simulate_cpu": cpu, "predictor_ms_per_request": predicted.info.get("ms_per_request")},
    )
    # of the whole loop, the simulated executor included: an upper bound on what scheduling costs
    run.summary["volatile"]["overhead_us_per_step"] = cpu / max(int(run.steps["num_steps"].sum()), 1) * 1e6
    run.summary["provenance"]["marks"] = [*predicted.info.get("marks", []), *range_marks(run, hardware)]
    return run


# --- objects from config ----------------------------------------------------------------------------------------------


def make(node: Any) -> Any:
    """The object a config node stands for; an object stands for itself. Raises what its constructor raises."""
    if not isinstance(node, Mapping):
        return node
    try:
        return instantiate(node)
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from error


def load_dataset(cfg: Config) -> Dataset:
    """The cell's Dataset; loaded once per process and config."""
    if not isinstance(cfg["workload"], Mapping):
        return _dataset(cfg["workload"])
    return _load_dataset(json.dumps(cfg["workload"], sort_keys=True))


@lru_cache(maxsize=4)
def _load_dataset(node: str) -> Dataset:
    return _dataset(make(json.loads(node)))


def _dataset(made: Any) -> Dataset:
    if not isinstance(made, Dataset):
        raise ValueError(f"workload gave a {type(made).__name__}, not a Dataset")
    return made


def load_hardware(cfg: Config) -> Hardware:
    if isinstance(cfg["hardware"], Hardware):
        return cfg["hardware"]
    return _load_hardware(json.dumps(cfg["hardware"], sort_keys=True))


@lru_cache(maxsize=8)
def _load_hardware(node: str) -> Hardware:
    hardware: Hardware = make(json.loads(node))
    return hardware


def load_policy(cfg: Config) -> Policy:
    policy = make(cfg["policy"])
    if not isinstance(policy, Policy):
        raise ValueError(f"policy gave a {type(policy).__name__}, not a Policy")
    return policy


def load_kv(cfg: Config, hardware: Hardware) -> KVCache:
    kv: KVCache = make(cfg["kv"])(num_tokens=pool_tokens(cfg, hardware))
    return kv


def pool_tokens(cfg: Config, hardware: Hardware) -> int:
    """Tokens of the KV pool: as the limits say, else what the hardware has left."""
    given: int | None = cfg["limits"].get("kv_pool_tokens")
    return hardware.kv_pool_tokens() if given is None else given


def load_scheduler(cfg: Config, policy: Policy, kv: KVCache) -> Scheduler:
    limits = cfg["limits"]
    return Scheduler(
        policy,
        make(cfg["batching"]),
        kv,
        make(cfg["preemption"]),
        max_num_seqs=limits["max_num_seqs"],
        token_budget=limits["token_budget"],
        max_model_len=limits["max_model_len"],
        clip=limits.get("clip", False),
        check=cfg.get("check", False),
    )


# --- predictions ------------------------------------------------------------------------------------------------------


def predictor_target(cfg: Config) -> Any:
    """The class behind the predictor (node or object); None for `none`."""
    node = cfg.get("predictor")
    if node is not None and not isinstance(node, Mapping):
        return type(node)
    return get_object(node["_target_"]) if node and node.get("_target_") else None


def is_learned(cfg: Config) -> bool:
    target = predictor_target(cfg)
    return target is not None and not hasattr(target, "from_truth")


@dataclass(frozen=True)
class Predicted:
    """Predictions for the N requests of a workload: columns, when each is there (s), the fold that made it, and how."""

    columns: Predictions | None = None
    ready: NDArray[np.float64] | None = None
    fold: NDArray[np.int64] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def first(self, n: int) -> Predicted:
        """Those of the first n requests."""
        return Predicted(
            None if self.columns is None else self.columns.take(np.arange(n)),
            None if self.ready is None else self.ready[:n],
            None if self.fold is None else self.fold[:n],
            self.info,
        )


def predict(cfg: Config, workload: Workload, prepared: Prepared) -> Predicted:
    """What the cell's predictor says about `workload`. An oracle is handed the truth, and takes no time."""
    if predictor_target(cfg) is None:
        return Predicted()
    if not is_learned(cfg):
        columns = make(cfg["predictor"]).from_truth(workload.output_len, stream(cfg["seed"], "predictor"))
        return Predicted(columns, info={"oracle": True})
    made = prepared.predictions(cfg)
    if made is None:
        raise ValueError(f"predictor {name(cfg, 'predictor')} has no prepared predictions")
    by_row, fold, info = made
    ready = LatencyModel.from_dict(info["latency"]).ready_times(workload.arrival) if info.get("latency") else None
    return Predicted(by_row.take(workload.rows), ready, fold[workload.rows], info)


# --- names and provenance ---------------------------------------------------------------------------------------------


def name(cfg: Config, group: str) -> str:
    """The node chosen for a group, or the target's own name."""
    choices = cfg.get("choices") or {}
    if choices.get(group):
        return str(choices[group])
    node = cfg.get(group)
    if node is None:
        return "none"
    return (str(node.get("_target_", "none")).rsplit(".", 1)[-1] if isinstance(node, Mapping) else type(node).__name__).lower()


def cell_names(cfg: Config, load: float | None, rate: float | None) -> dict[str, Any]:
    """What a reader tells cells apart by: node names and numbers."""
    groups = ("policy", "predictor", "workload", "arrivals", "limits", "batching", "kv", "preemption", "hardware", "slo")
    names: dict[str, Any] = {group: name(cfg, group) for group in groups}
    chosen = cfg.get("choices") or {}
    names.update({group: chosen[group] for group in ("system", "setting") if chosen.get(group)})
    return {**names, "load": load, "rate": rate, "seed": cfg["seed"], "num_requests": cfg["num_requests"]}


def provenance(cfg: Config, dataset: Dataset, workload: Workload, hardware: Hardware) -> dict[str, Any]:
    """What the numbers rest on."""
    censored = dataset.censored
    return {
        "version": lengthwise.__version__,
        "versions": {**library_versions(), "python": platform.python_version()},
        "hardware": {"name": hardware.name, "model": hardware.model, **hardware.provenance},
        "workload": {
            "name": dataset.name, "unit": dataset.unit, "source": dataset.source, "licence": dataset.licence,
            "num_rows": len(dataset), "dropped": dict(dataset.dropped), "max_new_tokens": dataset.max_new_tokens,
            "num_censored": 0 if censored is None else int(censored[workload.rows].sum()),
            **dict(dataset.notes), **dict(workload.notes),
        },
        "kv_pool_tokens": pool_tokens(cfg, hardware),
        "seed": cfg["seed"],
    }  # fmt: skip


def range_marks(run: Run, hardware: Hardware) -> list[str]:
    """A mark when plans left the range that the cost model was fitted on, with the share of the time spent there."""
    steps = run.steps
    rows = (steps["num_decode"] + steps["num_padding"]).to_numpy()
    inside = hardware.cost.in_range(rows, steps["context_tokens"].to_numpy(), steps["prefill_tokens"].to_numpy())
    seconds = (steps["end"] - steps["start"]).to_numpy()
    outside = float(seconds[~np.asarray(inside)].sum() / max(seconds.sum(), 1e-300))
    if outside == 0.0:
        return []
    return [f"{outside:.1%} of the busy time outside the fitted range {dict(hardware.cost.fitted_range)} of {hardware.name}"]
