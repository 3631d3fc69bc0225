"""Nodes: the objects that a cell's config stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.sched import KVCache, Policy, Scheduler

from .dataset import Dataset

if TYPE_CHECKING:
    from .stage import Asking, Stage

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


def named_node(group: str, name: str) -> Any:
    """The node of conf/`group` of that name, with the nodes of its own group that it builds on. Raises ValueError where there
    is none, naming those there are."""
    folder = files("lengthwise.conf") / group
    file = folder / f"{name}.yaml"
    if not file.is_file():
        names = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))
        raise ValueError(f"no {group} called {name!r}; there are {', '.join(names)}")
    node = OmegaConf.to_container(OmegaConf.create(file.read_text()), resolve=False)
    if isinstance(node, dict):
        for base in node.pop("defaults", ()):  # of its own group; what else a choice brings with it is for Hydra
            if isinstance(base, str) and base != "_self_":
                node = {**named_node(group, base), **node}
    return node


def load_stage(cfg: Config) -> Stage | Asking:
    """Where the cell is run. Raises ValueError when the executor node stands for something else."""
    stage: Stage | Asking = make(cfg["executor"])
    if not (hasattr(stage, "begin") or hasattr(stage, "run")):
        raise ValueError(f"executor gave a {type(stage).__name__}, not a Stage")
    return stage


def load_dataset(cfg: Config) -> Dataset:
    """The cell's Dataset, reshaped where the config says so, as its stage can serve it; loaded once per process and config.
    Raises ValueError where a stage is to answer at lengths that nobody knows."""
    parts = [cfg["workload"], cfg.get("reshape")]
    if any(part is not None and not isinstance(part, Mapping) for part in parts):
        dataset = _dataset(*parts)
    else:
        dataset = _load_dataset(json.dumps(parts, sort_keys=True))
    if cfg.get("executor") is None:
        return dataset
    stage = load_stage(cfg)
    if getattr(stage, "lengths", None) != "free":  # else the model says how long its answers are
        dataset.refuse_unanswered()
    return stage.rows(dataset)


@lru_cache(maxsize=4)
def _load_dataset(parts: str) -> Dataset:
    return _dataset(*json.loads(parts))


def rows_key(cfg: Config) -> dict[str, Any]:
    """What the Dataset depends on, as plain nodes where they are nodes."""
    served = {} if cfg.get("executor") is None else load_stage(cfg).rows_key()
    parts = {"workload": cfg["workload"], "reshape": cfg.get("reshape"), "served": served or None}
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
    """Raises ValueError where there is none, or the node stands for something else."""
    node = cfg.get("hardware")
    if isinstance(node, Hardware):
        return node
    if node is None:
        raise ValueError("hardware=null, and this needs one: a node, or a profile (hardware=profiled hardware.path=PATH)")
    path = Path(node["path"]).expanduser() if node.get("path") else None
    stamp = path.stat().st_mtime_ns if path is not None and path.is_file() else 0
    return _load_hardware(json.dumps(node, sort_keys=True), stamp)


@lru_cache(maxsize=8)
def _load_hardware(node: str, stamp: int) -> Hardware:
    """stamp: when the file that the node names was written, so that a profile made anew is read anew."""
    hardware: Hardware = make(json.loads(node))
    if not isinstance(hardware, Hardware):
        raise ValueError(f"hardware gave a {type(hardware).__name__}, not a Hardware")
    return hardware


def read_hardware(path: str) -> Hardware:
    """The hardware node in the YAML file `path`, as `lengthwise profile` writes it. Raises ValueError, saying how to make one,
    when there is none."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no profile {file}: `lengthwise profile model=NAME out={path}` measures one")
    hardware: Hardware = make(OmegaConf.to_container(OmegaConf.load(file), resolve=True))
    return hardware


def load_policy(cfg: Config) -> Policy:
    policy = make(cfg["policy"])
    if not isinstance(policy, Policy):
        raise ValueError(f"policy gave a {type(policy).__name__}, not a Policy")
    return policy


def load_kv(cfg: Config, hardware: Hardware, dataset: Dataset) -> KVCache:
    kv = new_kv(cfg, pool_tokens(cfg, hardware))
    if dataset.block_hashes is not None:
        kv.use_hashes(dataset.hash_tokens)
    return kv


def new_kv(cfg: Config, num_tokens: int) -> KVCache:
    """An empty KV cache of `num_tokens` tokens."""
    kv: KVCache = make(cfg["kv"])(num_tokens=num_tokens)
    return kv


def pool_tokens(cfg: Config, hardware: Hardware) -> int:
    """Tokens of the KV pool: as the limits say, else what the hardware has left."""
    given: int | None = cfg["limits"].get("kv_pool_tokens")
    return hardware.kv_pool_tokens() if given is None else given


def load_scheduler(
    cfg: Config, policy: Policy, kv: KVCache, max_model_len: int | None = None, refine_every: int = 0
) -> Scheduler:
    """max_model_len: instead of the limits' own. refine_every: decode steps; 0: nobody is predicted anew."""
    limits = cfg["limits"]
    return Scheduler(
        policy,
        make(cfg["batching"]),
        kv,
        make(cfg["preemption"]),
        max_num_seqs=limits["max_num_seqs"],
        token_budget=limits["token_budget"],
        max_model_len=limits["max_model_len"] if max_model_len is None else max_model_len,
        clip=limits.get("clip", False),
        refine_every=refine_every,
        admission=make(cfg.get("admission")),
        victim=make(cfg.get("victim")),
        check=cfg.get("check", False),
    )


def predictor_target(cfg: Config) -> Any:
    """The class behind the predictor (node or object); None for `none`."""
    node = cfg.get("predictor")
    if node is not None and not isinstance(node, Mapping):
        return type(node)
    return get_object(node["_target_"]) if node and node.get("_target_") else None


def reads(cfg: Config) -> dict[str, frozenset[str]]:
    """group -> what it reads of a prediction, for each of policy, admission and victim that reads any."""
    parts = {"policy": load_policy(cfg), "admission": make(cfg.get("admission")), "victim": make(cfg.get("victim"))}
    found = {group: part.needs & {"prediction", "distribution"} for group, part in parts.items() if part is not None}
    return {group: needs for group, needs in found.items() if needs}


def is_learned(cfg: Config) -> bool:
    target = predictor_target(cfg)
    return target is not None and not hasattr(target, "from_truth")


def is_asked(cfg: Config) -> bool:
    """Whether the cell asks a server that schedules by itself; see stage.py."""
    return cfg.get("executor") is not None and hasattr(load_stage(cfg), "run")


def is_prepared(cfg: Config) -> bool:
    """Whether a learned predictor's words are had beforehand; a server that we only ask has its own predictor at work."""
    return is_learned(cfg) and not is_asked(cfg)
