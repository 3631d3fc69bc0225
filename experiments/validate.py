"""Refuse a config at the door, before the first cell: with the value, the limit and the nearest name."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .error import check_error
from .nodes import load_stage, make, named_node, predictor_target, reads
from .stage import Asking

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WANDB = ("offline", "online", "off")
TABLES = ("short", "long")
LEAST = {"num_requests": 1, "seed": 0}
LIMITS = {"max_num_seqs": 1, "token_budget": 1, "max_model_len": 2, "kv_pool_tokens": 1}


def validate(cfg: Mapping[str, Any]) -> None:
    """Raises ValueError on a value no cell can have, and on nodes that cannot be built or do not fit each other."""
    validate_numbers(cfg)
    check_error(cfg)
    if cfg["wandb"] not in WANDB:
        raise ValueError(f"wandb={cfg['wandb']!r}: choose {', '.join(WANDB)}")
    if cfg.get("table", TABLES[0]) not in TABLES:
        raise ValueError(f"table={cfg['table']!r}: choose {', '.join(TABLES)}")
    _figures(cfg.get("figures") or {})
    for key in ("check", "keep_workload"):
        if not isinstance(cfg[key], bool):
            raise ValueError(f"{key}={cfg[key]!r} must be true or false")
    if not NAME.fullmatch(str(cfg["name"])) or cfg["name"] == "prepared":
        raise ValueError(f"name={cfg['name']!r} must be a plain folder name of at most 100 of [A-Za-z0-9._-], not `prepared`")
    _nodes(cfg)


def validate_numbers(cfg: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the value and the limit, on a number no cell can have."""
    for key, least in LEAST.items():
        _whole(key, cfg[key], least)
    for key, least in LIMITS.items() if cfg.get("limits") else ():
        value = cfg["limits"].get(key)
        if value is not None or key != "kv_pool_tokens":
            _whole(f"limits.{key}", value, least)
    if cfg["rate"] is not None:
        _positive("rate", cfg["rate"])
    if cfg["load"] is not None:
        _positive("load", cfg["load"])
    elif cfg["rate"] is None and not getattr(make(cfg["arrivals"]), "keeps_times", False):
        chosen = (cfg.get("choices") or {}).get("arrivals")
        raise ValueError(f"load=null and rate=null: arrivals={chosen} needs a load, or a rate in requests/s")
    if cfg.get("saturation") is not None:
        _positive("saturation", cfg["saturation"])
    if (cap := (cfg.get("window") or {}).get("cap")) is not None:
        _positive("window.cap", cap)
    for key in ("ttft", "tpot", "e2e"):
        if cfg["slo"].get(key) is not None:
            _positive(f"slo.{key}", cfg["slo"][key])


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean ...?`, or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _figures(figures: Any) -> None:
    if not isinstance(figures, Mapping) or not all(isinstance(told, Mapping) for told in figures.values()):
        raise ValueError(
            f"figures={figures!r} must be a mapping: {{wait_ccdf: {{only: {{policy: [fcfs, srpt]}}}}, tails: {{}}}}"
        )
    for name in figures:
        named_node("figure", str(name))


def _nodes(cfg: Mapping[str, Any]) -> None:
    stage = load_stage(cfg)
    stage.check(cfg)
    for group in ("arrivals", "population", "reshape", "batching", "preemption"):
        make(cfg.get(group))
    if isinstance(stage, Asking) and not stage.schedules:
        return
    for group, needs in reads(cfg).items():
        if predictor_target(cfg) is None:
            chosen = cfg["choices"].get(group)
            raise ValueError(
                f"{group}={chosen} needs a {'/'.join(sorted(needs))} and predictor=none gives none. Choose a predictor; in a "
                f"sweep leave the pair out: 'exclude=[{{{group}: {chosen}, predictor: none}}]', or all such: 'exclude=[unread]'"
            )


def _whole(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}={value!r} must be a whole number >= {least}")


def _positive(key: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={value!r} must be a finite number > 0")
