"""Cell: one system x policy x predictor x workload x load x seed, from a resolved config to a Run.

Everything a cell needs that is costly and shared (saturation rate, learned predictions) is handed in by `prepare`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from hydra.utils import get_object, instantiate
from numpy.typing import NDArray

import lengthwise
from lengthwise.engine.simulated import SimulatedClock
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO, KVCache, Policy, Scheduler, serve

from .dataset import Dataset, Workload
from .draw import draw, stream
from .recorder import Recorder
from .run import Run
from .source import WorkloadSource

Config = Mapping[str, Any]
NUM_FOLDS = 5


class Prepared(Protocol):
    """What `prepare` has made before the cells start."""

    def saturation_rate(self, cfg: Config) -> float: ...
    def predictions(self, cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]] | None: ...


def run_cell(cfg: Config, prepared: Prepared) -> Run:
    """Simulate one cell. Deterministic in cfg and what `prepared` holds; measured CPU times stand apart as volatile.

    Raises ValueError on a config that cannot be run, before anything is simulated.
    """
    dataset, hardware, policy = load_dataset(cfg), load_hardware(cfg), load_policy(cfg)
    load, rate = cfg.get("load"), cfg.get("rate")
    if rate is None:
        rate = load * prepared.saturation_rate(cfg)
    workload = draw(dataset, make(cfg["arrivals"]), cfg["num_requests"], rate, cfg["seed"])
    predictions, ready, fold, info = predict(cfg, workload, prepared)
    needs = policy.needs & {"prediction", "distribution"}
    if needs and predictions is None:
        raise ValueError(f"policy {name(cfg, 'policy')} needs a {'/'.join(sorted(needs))}; predictor is none")
    slo = SLO(**{k: v for k, v in cfg["slo"].items() if k in ("ttft", "tpot", "e2e")})
    recorder = Recorder(
        workload,
        predictions=predictions,
        ready=ready,
        fold=fold,
        slo=slo,
        hardware=hardware,
        token_budget=cfg["limits"]["token_budget"],
        load=load,
        rate=rate,
    )
    clock = SimulatedClock()
    kv = load_kv(cfg, hardware)
    executor = instantiate(cfg["executor"])(clock=clock, cost=hardware.cost, output_lens=workload.output_len.tolist())
    scheduler = load_scheduler(cfg, policy, kv)
    source = WorkloadSource(workload, predictions, ready, gate=bool(needs))
    start = time.process_time()
    serve(source, scheduler, executor, clock, recorder)
    cpu = time.process_time() - start
    return recorder.run(
        scheduler,
        cell=cell_names(cfg, load, rate),
        provenance=provenance(cfg, dataset, workload, hardware, info),
        volatile={"simulate_cpu": cpu, "predictor_ms_per_request": info.get("ms_per_request")},
    )


# --- objects from config ----------------------------------------------------------------------------------------------


def make(node: Any) -> Any:
    """The object a config node stands for; an object stands for itself."""
    return instantiate(node) if isinstance(node, Mapping) else node


def load_dataset(cfg: Config) -> Dataset:
    """The cell's Dataset; loaded once per process and config."""
    if not isinstance(cfg["workload"], Mapping):
        return _dataset(cfg["workload"])
    return _load_dataset(json.dumps(cfg["workload"], sort_keys=True))


@lru_cache(maxsize=4)
def _load_dataset(node: str) -> Dataset:
    return _dataset(instantiate(json.loads(node)))


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
    hardware: Hardware = instantiate(json.loads(node))
    return hardware


def load_policy(cfg: Config) -> Policy:
    policy = make(cfg["policy"])
    if not isinstance(policy, Policy):
        raise ValueError(f"policy gave a {type(policy).__name__}, not a Policy")
    return policy


def load_kv(cfg: Config, hardware: Hardware) -> KVCache:
    tokens = cfg["limits"].get("kv_pool_tokens") or hardware.kv_pool_tokens()
    kv: KVCache = instantiate(cfg["kv"])(num_tokens=tokens)
    return kv


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


def predict(
    cfg: Config, workload: Workload, prepared: Prepared
) -> tuple[Predictions | None, NDArray[np.float64] | None, NDArray[np.int64] | None, dict[str, Any]]:
    """(predictions, when each is ready (s), fold of each request, info) for the requests of `workload`."""
    target = predictor_target(cfg)
    if target is None:
        return None, None, None, {}
    if not is_learned(cfg):
        oracle = make(cfg["predictor"])
        predictions = oracle.from_truth(workload.output_len, stream(cfg["seed"], "predictor"))
        return predictions, None, None, {"oracle": True}
    made = prepared.predictions(cfg)
    if made is None:
        raise ValueError(f"predictor {name(cfg, 'predictor')} has no prepared predictions")
    by_row, fold, info = made
    latency = info.get("latency")
    ready = LatencyModel(**latency).ready_times(workload.arrival) if latency else None
    return by_row.take(workload.rows), ready, fold[workload.rows], info


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


def cell_names(cfg: Config, load: float | None, rate: float) -> dict[str, Any]:
    groups = ("system", "policy", "predictor", "workload", "arrivals", "limits", "batching", "kv", "preemption", "hardware")
    names: dict[str, Any] = {group: name(cfg, group) for group in groups if group in cfg or group == "predictor"}
    names.update(load=load, rate=rate, seed=cfg["seed"], num_requests=cfg["num_requests"])
    for key in ("setting", "arm"):
        if (cfg.get("choices") or {}).get(key):
            names[key] = cfg["choices"][key]
    return names


def provenance(
    cfg: Config, dataset: Dataset, workload: Workload, hardware: Hardware, info: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "version": lengthwise.__version__,
        "hardware": {"name": hardware.name, "model": hardware.model, **hardware.provenance},
        "workload": {
            "name": dataset.name, "unit": dataset.unit, "source": dataset.source, "licence": dataset.licence,
            "num_rows": len(dataset), "dropped": dict(dataset.dropped), **dict(dataset.notes), **dict(workload.notes),
        },
        "predictor": {k: v for k, v in info.items() if k not in ("ms_per_request",)},
        "kv_pool_tokens": cfg["limits"].get("kv_pool_tokens") or hardware.kv_pool_tokens(),
        "seed": cfg["seed"],
    }  # fmt: skip
