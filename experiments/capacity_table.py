"""Read stored capacities back, as a frame with a row per search, and print them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .capacity import FILE

NAMES = ("system", "policy", "predictor", "workload", "arrivals", "hardware", "limits", "slo")
NUMBERS = ("rate", "lo", "hi", "kind", "tolerance", "target", "gpus")


def read_capacity(folder: Path | str) -> pd.DataFrame:
    """One row per capacity.json in or below `folder`, in order of path.

    Columns: node names; rate, lo, hi (requests/s of one replica; hi NaN when nothing failed), kind (between | at_least | none),
    tolerance, target, gpus (of one replica); attainment at the rate, num_seeds, num_requests, num_probes; cost columns of
    token_cost.py, currency and price_date where a price was given; replicas, fleet_gpus, for_rate where one was asked for;
    marks; folder. Raises ValueError when there is none.
    """
    root = Path(folder)
    files = sorted(root.rglob(FILE)) if root.is_dir() else []
    if not files:
        raise ValueError(f"no {FILE} in {root}")
    return pd.DataFrame([row(json.loads(file.read_text()), str(file.parent)) for file in files])


def row(answer: Mapping[str, Any], folder: str = "") -> dict[str, Any]:
    """The flat row of one capacity.json."""
    at: Mapping[str, Any] = next((probe for probe in answer["probes"] if probe["rate"] == answer["rate"]), {})
    out: dict[str, Any] = {name: answer["cell"].get(name) for name in NAMES}
    out |= {name: answer[name] for name in NUMBERS}
    out |= {"attainment": at.get("attainment"), "num_seeds": len(answer["seeds"]), "num_probes": len(answer["probes"])}
    out |= {"num_requests": answer["cell"]["num_requests"]}
    out |= {key: value for key, value in answer["cost"].items() if key != "price"}
    price = answer["cost"].get("price") or {}
    out |= {"currency": price.get("currency"), "price_date": price.get("date")}
    fleet = answer["fleet"] or {}
    out |= {"for_rate": fleet.get("for_rate"), "replicas": fleet.get("replicas"), "fleet_gpus": fleet.get("gpus")}
    out |= {"marks": "; ".join([*answer["marks"], *answer["provenance"]["marks"]]), "folder": folder}
    numbers = ("hi", "attainment", "target", "for_rate", "replicas", "fleet_gpus")
    return {key: float("nan") if value is None and key in numbers else value for key, value in out.items()}


def lines(answer: Mapping[str, Any]) -> list[str]:
    """One answer in words, for a terminal."""
    told = {
        "between": f"{answer['rate']:g} requests/s hold, {answer['hi'] or 0:g} do not",
        "at_least": f">= {answer['rate']:g} requests/s",
        "none": f"0: even {answer['hi'] or 0:g} requests/s do not hold",
    }[answer["kind"]]
    out = [f"{'capacity':<12}{told}", f"{'criterion':<12}{answer['criterion']}"]
    limits = ", ".join(f"{key} {value:g} s" for key, value in answer["slo"].items() if value is not None)
    out += [f"{'SLO':<12}{limits or 'none'}", f"{'replica':<12}{answer['gpus']} GPU{'s' * (answer['gpus'] != 1)}"]
    cost = answer["cost"]
    if cost["gpu_seconds_per_million_output_tokens"] is not None:
        pair = [cost[f"gpu_seconds_per_million_{kind}_tokens"] for kind in ("output", "total")]
        out.append(f"{'cost':<12}{pair[0]:.4g} GPU-s per million output tokens, {pair[1]:.4g} per million in all")
        if price := cost.get("price"):
            per = [cost[f"cost_per_million_{kind}_tokens"] for kind in ("output", "total")]
            source = f", {price['source']}" if price["source"] else ""
            out.append(
                f"{'':<12}{per[0]:.4g} {price['currency']} per million output tokens, {per[1]:.4g} in all, at "
                f"{price['per_gpu_hour']:g} a GPU-hour ({price['date']}{source})"
            )
    if fleet := answer["fleet"]:
        many = "no number of replicas" if fleet["replicas"] is None else f"{fleet['replicas']} replicas, {fleet['gpus']} GPUs"
        out.append(f"{'fleet':<12}{many} for {fleet['for_rate']:g} requests/s, if {fleet['assumes']}")
    return out + [f"{'note':<12}{mark}" for mark in [*answer["marks"], *answer["provenance"]["marks"]]]


def table(answers: Sequence[Mapping[str, Any]]) -> str:
    """A plain table of several searches: the columns that differ, then capacity and cost; money and a fleet where asked for."""
    frame = pd.DataFrame([row(answer) for answer in answers])
    named = [name for name in (*NAMES, "currency") if frame[name].nunique(dropna=False) > 1] or ["policy"]
    money = "/".join(frame["currency"].dropna().unique())
    titles = {
        "rate": "rate", "hi": "hi", "kind": "kind", "attainment": "attainment",
        "gpu_seconds_per_million_output_tokens": "GPU-s/M output", "cost_per_million_output_tokens": f"{money}/M output",
        "replicas": "replicas", "fleet_gpus": "fleet GPUs",
    }  # fmt: skip
    asked = ("cost_per_million_output_tokens", "replicas", "fleet_gpus")
    there = [key for key in titles if key not in asked or (key in frame and frame[key].notna().any())]
    shown = frame[[*named, *there]].rename(columns=titles)
    return str(shown.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
