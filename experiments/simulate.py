"""`simulate`: one cell in one line of a notebook, without Hydra."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from hydra.utils import get_object
from numpy.typing import NDArray
from omegaconf import OmegaConf

from lengthwise.predictors.predictions import Predictions

from .cell import run_cell
from .learned import make_predictions, predictions_key
from .nodes import Config, is_prepared, make, named_node
from .run import Run
from .saturation import measure_saturation, saturation_key
from .validate import validate_numbers


class OnTheFly:
    """Prepared inputs made when first asked for and kept for the life of the process."""

    _made: dict[str, Any] = {}  # noqa: RUF012 - one cache for the process is the point

    def saturation_rate(self, cfg: Config) -> float:
        return float(self._once("saturation", saturation_key(cfg), lambda: measure_saturation(cfg))["rate"])

    def predictions(self, cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]] | None:
        if not is_prepared(cfg):
            return None
        made: tuple[Predictions, NDArray[np.int64], dict[str, Any]] = self._once(
            "predictions", predictions_key(cfg), lambda: make_predictions(cfg)
        )
        return made

    def _once(self, kind: str, key: Mapping[str, Any], make: Any) -> Any:
        try:
            name = kind + json.dumps(key, sort_keys=True)
        except TypeError:  # an object in the config: nothing to name it by, so nothing is kept
            return make()
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def simulate(policy: Any = "fcfs", predictor: Any = "none", workload: Any = "synthetic", **options: Any) -> Run:
    """Simulate one cell and return its Run (`.requests`, `.steps`, `.summary`). `options` as in `compose`; with
    executor="native" it is run on the real engine, in real time.

    Raises ValueError on an unknown name or field, naming the choices.
    """
    cfg = compose(policy=policy, predictor=predictor, workload=workload, **options)
    validate_numbers(cfg)
    return run_cell(cfg, OnTheFly())


def compose(
    *,
    policy: Any = "fcfs",
    predictor: Any = "none",
    workload: Any = "synthetic",
    arrivals: Any = "poisson",
    hardware: Any = None,
    batching: Any = "chunked",
    kv: Any = "paged",
    preemption: Any = "pause",
    admission: Any = None,
    victim: Any = None,
    slo: Any = "chat",
    limits: Any = "default",
    executor: Any = "simulated",
    model: Any = "smollm2",
    population: Any = None,
    reshape: Any = None,
    refine: Any = None,
    load: float | None = None,
    rate: float | None = None,
    saturation: float | None = None,
    num_requests: int = 1000,
    seed: int = 0,
    check: bool = False,
    window: Mapping[str, Any] | None = None,
    resample: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """A cell's config from the same nodes Hydra uses.

    Each part is the name of a config node ("srpt"), a mapping with `_target_`, or an object (`SRPT(overrun="clip")`, a
    Dataset). load: rate / saturation rate (0.8 unless load or rate, in requests/s, is given, or the arrivals have their own);
    saturation: that rate, where it is known.
    window: warm_up, cool_down, unit (seconds or share), as in `windows.window`. resample: draw rows again when there are fewer
    than num_requests. population, reshape, refine, admission: None for none; victim: None for the policy's last. hardware: None
    for the executor's own. model: what a native executor serves, a node's name, a mapping or a ServedModel. `overrides` replace
    fields of `limits`: `max_num_seqs=64`.
    """
    node = _node("executor", executor)
    stage = get_object(node["_target_"]) if isinstance(node, Mapping) else node
    hardware = stage.default_hardware if hardware is None else hardware
    parts: dict[str, Any] = {
        "policy": policy, "predictor": predictor, "workload": workload, "arrivals": arrivals, "hardware": hardware,
        "batching": batching, "kv": kv, "preemption": preemption, "slo": slo, "limits": limits, "executor": executor,
        "population": population, "reshape": reshape, "refine": refine, "admission": admission, "victim": victim,
    }  # fmt: skip
    if isinstance(node, Mapping) and "model" in node:
        parts["model"] = model
    if not getattr(stage, "schedules", True):  # somebody else's server decides all that
        parts |= dict.fromkeys(("policy", "batching", "kv", "preemption", "limits"))
    nodes = {group: _node(group, part) for group, part in parts.items() if part is not None}
    if "model" in nodes and not isinstance(nodes["model"], Mapping):
        nodes["executor"] = stage(**{**_arguments(nodes["executor"]), "model": nodes.pop("model")})
    known = nodes.get("limits", {})
    unknown = set(overrides) - set(known)
    if unknown:
        raise ValueError(f"unknown limit {sorted(unknown)[0]!r}; the limits are {', '.join(sorted(known))}")
    if overrides:
        nodes["limits"] = {**known, **overrides}
    objects = {group: node for group, node in nodes.items() if not isinstance(node, Mapping)}
    tree = OmegaConf.create({group: node for group, node in nodes.items() if group not in objects})
    plain = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("model", None)  # it stands in the executor's node
    if rate is None and load is None and not getattr(make(nodes["arrivals"]), "keeps_times", False):
        load = 0.8
    choices = {group: part for group, part in parts.items() if isinstance(part, str)}
    numbers = {
        "load": load,
        "rate": rate,
        "saturation": saturation,
        "num_requests": num_requests,
        "seed": seed,
        "check": check,
        "window": window,
        "resample": resample,
    }
    return {**plain, **objects, **numbers, "choices": choices}


def _node(group: str, part: Any) -> Any:
    """The config node of that name; anything but a string stands for itself."""
    return named_node(group, part) if isinstance(part, str) else part


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """What the node gives its target."""
    return {key: value for key, value in node.items() if not key.startswith("_")}
