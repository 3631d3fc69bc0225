"""What a cell is: its config, the code behind it, the files it names and the inputs prepared for it, in one hash.

Two cells that differ in any of these get two folders; a cell whose hash is there already is never run again. Code counts, so
that editing a policy and running a study again does not show yesterday's results.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import lengthwise

from .error import error_names

VOLATILE = (  # where results go, how they are shown and what they are wanted for, not what they are
    "out", "name", "check", "exclude", "figure", "figures", "table", "wandb", "study", "tune",
    "target", "artefact", "artefacts", "engine", "settings",  # stand in the nodes that read them
)  # fmt: skip
PACKAGE = Path(lengthwise.__file__).parent
LEARNING = (
    "predictors", "experiments/workloads", "experiments/learned.py", "experiments/nodes.py", "experiments/dataset.py",
    "experiments/reshape.py", "experiments/prefixes.py", "experiments/served.py", "experiments/collected.py",
)  # fmt: skip
READERS = frozenset(  # modules of experiments/ that start cells or read their results: no part of what a cell is
    f"experiments/{name}.py"
    for name in (
        "answerers", "app", "bench_app", "bisection", "capacity", "capacity_app", "capacity_table", "catalogue", "cellhash",
        "collect", "collect_app", "comparison", "composer",
        "contract", "criterion", "data", "fetching", "hints", "job", "journal", "launch", "load_runs", "manifest", "paths",
        "prepare", "estimates",
        "probe_app", "probe_train", "probes", "profile", "profile_app", "profile_fit", "progress", "ranges", "report",
        "regret", "robustness", "robustness_table",
        "serve_app", "serve_cell", "simulate", "size", "stability", "stored", "study", "sweep", "table",
        "table_tails", "taken", "label_budget",
        "token_cost", "trace_summary", "tracking", "train", "train_app", "train_report", "train_table",
        "tune", "tune_report", "validate",
        "validate_app", "validate_engine",
        "wandb_check", "wandb_log", "wandb_predictors", "wandb_session",
    )
)  # fmt: skip
SOURCES = (".py", ".yaml", ".parquet")  # embedded data counts as code
NAMING = ("path", "artefact", "folder", "model")  # keys whose values are files or folders, whatever they are called
SERVING = ("engine/server", "experiments/serve_app.py", "experiments/serve_cell.py")
OUTSIDE = ("experiments/figures/", f"{SERVING[0]}/")
SERVED = "lengthwise.experiments.served_stage.ServedStage"  # what its cells measure goes through the server


def digest(value: Any) -> str:
    """16 hex digits of the canonical JSON of `value`. Raises TypeError on what JSON cannot say, NaN included."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise TypeError(f"cannot be hashed: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lasting(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The config without VOLATILE."""
    return {key: value for key, value in cfg.items() if key not in VOLATILE}


def identity(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a result: the lasting config, code, named files and version."""
    config = lasting(cfg)
    return {
        "config": config,
        "version": lengthwise.__version__,
        "code": code(("sched", "engine", "predictors", "experiments")),
        "plugins": plugins(config),
        "files": files(config),
        **({"server": code(SERVING)} if is_served(config) else {}),
    }


def is_served(config: Mapping[str, Any]) -> bool:
    executor = config.get("executor")
    return isinstance(executor, Mapping) and executor.get("_target_") == SERVED


def cell_hash(cfg: Mapping[str, Any], prepared: Mapping[str, Any]) -> str:
    return digest({**identity(cfg), "prepared": dict(prepared)})


def fields(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Node names and numbers that a person tells cells apart by."""
    names = {group: "none" if name is None else name for group, name in cfg["choices"].items()}
    return {
        **names,
        **error_names(cfg),
        "load": cfg["load"] if cfg["rate"] is None else None,
        "rate": cfg["rate"],
        "seed": cfg["seed"],
        "num_requests": cfg["num_requests"],
    }


def cell_name(cfg: Mapping[str, Any], code: str) -> str:
    """A folder name: readable first, unique by its hash; at most 120 characters of [A-Za-z0-9._-]."""
    of = fields(cfg)
    load = f"rate{of['rate']:g}" if of["rate"] is not None else "asis" if of["load"] is None else f"load{of['load']:g}"
    words = [of.get(group) for group in ("policy", "predictor", "workload", "arrivals", "limits")]
    readable = "-".join(str(word) for word in (*words, load, f"seed{of['seed']}") if word is not None)
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', readable)[:100].lstrip('.')}-{code}"


@lru_cache(maxsize=8)
def code(parts: tuple[str, ...]) -> str:
    """Hash of the SOURCES among these files and folders of the package, READERS, figures and the server left out."""
    total = hashlib.sha256()
    for part in parts:
        path = PACKAGE / part
        for file in _tree(path) if path.exists() else []:
            name = str(file.relative_to(PACKAGE))
            if file.suffix in SOURCES and (part in SERVING or (name not in READERS and not name.startswith(OUTSIDE))):
                total.update(name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def plugins(node: Any) -> dict[str, str]:
    """`_target_` -> hash of the source file of its module, for targets outside the package."""
    targets = {t for t in _targets(node) if not t.startswith("lengthwise.")}
    return {target: _module_hash(target) for target in sorted(targets)}


def files(node: Any) -> dict[str, str]:
    """Name -> hash, for every file or folder that a config names (a table, a trace, a predictor artefact), as a path or below
    LENGTHWISE_DATA, and for the data files that its workloads find by their own names. Packages are known by their version."""
    found = {}
    data = os.environ.get("LENGTHWISE_DATA")
    paths = {part[key] for part in _mappings(node) for key in NAMING if isinstance(part.get(key), str)}
    for text in _strings(node):
        named = "/" in text or text.endswith(".yaml") or text in paths
        for path in ([Path(data).expanduser() / text] if data and text else []) + ([Path(text).expanduser()] if named else []):
            if path.is_file() or (("/" in text or text in paths) and path.exists()):
                found[text] = _hash(path)
                if (answers := path.parent / "requests.parquet").is_file():  # of the cell that kept a workload
                    found[f"{text}/../{answers.name}"] = _hash(answers)
                break
    for part in _mappings(node):
        if str(part.get("_target_", "")).startswith("lengthwise.experiments.workloads."):
            from .catalogue import files_of

            found |= {path.name: _hash(path) for path in files_of(part)}
    return found


def _hash(path: Path) -> str:
    return _files_hash(tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in _tree(path)))


def _tree(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]


@lru_cache(maxsize=64)
def _files_hash(stamp: tuple[tuple[str, int, int], ...]) -> str:
    total = hashlib.sha256()
    for name, _, _ in stamp:
        total.update(Path(name).name.encode() + b"\0")
        with open(name, "rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()[:16]


@lru_cache(maxsize=256)
def _module_hash(target: str) -> str:
    parts = target.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        if spec is not None:
            origin = Path(spec.origin or "")
            return hashlib.sha256(origin.read_bytes()).hexdigest()[:16] if origin.is_file() else "built in"
    return "not found"


def _targets(node: Any) -> Iterator[str]:
    return (part["_target_"] for part in _mappings(node) if isinstance(part.get("_target_"), str))


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
    for value in node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ():
        yield from _mappings(value)


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if key != "_target_":
                yield from _strings(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _strings(value)
