"""Provenance: what a cell is called, what its numbers rest on, and what marks them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

import lengthwise
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.predictors.artefact import library_versions

from .dataset import Dataset, Workload
from .error import error_names
from .nodes import Config
from .run import Run


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
    names.update({group: own for group in ("admission", "victim") if (own := name(cfg, group)) not in ("none", "last")})
    more = ("system", "setting", "population", "reshape", "refine")
    names.update({group: chosen[group] for group in more if chosen.get(group)})
    names |= error_names(cfg)
    return {**names, "load": load, "rate": rate, "seed": cfg["seed"], "num_requests": cfg["num_requests"]}


def provenance(cfg: Config, dataset: Dataset, workload: Workload, pool: int | None) -> dict[str, Any]:
    """What the numbers rest on, wherever the cell is run. pool: tokens of KV; None: not known."""
    censored = dataset.censored
    return {
        "version": lengthwise.__version__,
        "versions": {**library_versions(), "python": platform.python_version()},
        "workload": {
            "name": dataset.name, "unit": dataset.unit, "source": dataset.source, "licence": dataset.licence,
            "num_rows": len(dataset), "dropped": dict(dataset.dropped), "max_new_tokens": dataset.max_new_tokens,
            "num_censored": 0 if censored is None else int(censored[workload.rows].sum()),
            **dict(dataset.notes), **dict(workload.notes),
        },
        "kv_pool_tokens": pool,
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


def load_marks(cfg: Config) -> list[str]:
    """A mark where the load is a share of a rate that somebody stated."""
    stated = cfg.get("saturation")
    if stated is None or cfg["load"] is None or cfg["rate"] is not None:
        return []
    return [f"the load is a share of {stated:g} requests/s, which were stated"]


def session_marks(run: Run, workload: Workload, rate: float | None) -> list[str]:
    """A mark when so much of the sessions comes after the last start that the window saw less than the rate asked for."""
    window = run.summary["window"]
    if workload.after is None or window["whole"] or rate is None:
        return []
    came = run.summary["metrics"]["num_counted"] / window["seconds"]
    if came >= 0.9 * rate:
        return []
    return [
        f"sessions last long against the window of {window['seconds']:.4g} s: requests came at {came:.4g}/s within it, "
        f"not at the {rate:.4g}/s asked for; more requests bring the two together"
    ]
