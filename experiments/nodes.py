"""Nodes: the objects that a cell's config stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.sched import KVCache, Policy, Scheduler

from .dataset import Dataset

Config = Mapping[str, Any]


def make(node: Any) -> Any:
    """The object a config node stands for; an object stands for itself, a node with a null target for None. Raises what its
    constructor raises."""
    if not isinstance(node, Mapping):
        return node
    if "_target_" in node and node["_target_"] is None:
        return None
    try:
        return instantiate(node)
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from error


def load_dataset(cfg: Config) -> Dataset:
    """The cell's Dataset, reshaped where the config says so; loaded once per process and config."""
    parts = [cfg["workload"], cfg.get("reshape")]
    if any(part is not None and not isinstance(part, Mapping) for part in parts):
        return _dataset(*parts)
    return _load_dataset(json.dumps(parts, sort_keys=True))


@lru_cache(maxsize=4)
def _load_dataset(parts: str) -> Dataset:
    return _dataset(*json.loads(parts))


def rows_key(cfg: Config) -> dict[str, Any]:
    """What the Dataset depends on, as plain nodes where they are nodes."""
    parts = {"workload": cfg["workload"], "reshape": cfg.get("reshape")}
    return {key: dict(node) if isinstance(node, Mapping) else node for key, node in parts.items() if node is not None}


def _dataset(node: Any, reshape: Any) -> Dataset:
    made = make(node)
    change = make(reshape)
    if isinstance(made, Dataset) and change is not None:
        made = change(made)
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


def load_kv(cfg: Config, hardware: Hardware, dataset: Dataset) -> KVCache:
    kv: KVCache = make(cfg["kv"])(num_tokens=pool_tokens(cfg, hardware))
    if dataset.block_hashes is not None:
        kv.use_hashes(dataset.hash_tokens)
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


def predictor_target(cfg: Config) -> Any:
    """The class behind the predictor (node or object); None for `none`."""
    node = cfg.get("predictor")
    if node is not None and not isinstance(node, Mapping):
        return type(node)
    return get_object(node["_target_"]) if node and node.get("_target_") else None


def is_learned(cfg: Config) -> bool:
    target = predictor_target(cfg)
    return target is not None and not hasattr(target, "from_truth")
