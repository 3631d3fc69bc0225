"""Validate: one trace on a real engine and in the simulation of its profile, at several loads; the simulation's error by
metric, with its sign.

Errors of TTFT and TPOT can cancel in E2E, so all are shown. What single steps are off by, priced as the engine took them, is
shown beside: the rest is queueing, which makes more of it the nearer the load is to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lengthwise.engine.simulated.cost import CostModel
from lengthwise.sched import Chunk, Request

from .cell import run_cell
from .latencies import Sample, samples
from .native_stage import NativeStage, facts, why_another
from .nodes import Config, load_dataset, load_hardware, new_kv
from .profile_app import native_stage
from .run import Run
from .saturation import measure_saturation
from .simulate import OnTheFly
from .simulated_stage import SimulatedStage
from .statistics import quantile

LATENCIES = ("ttft", "tpot", "e2e")
STATS = ("mean", "p50", "p99")
RATES = ("requests_per_s", "output_tokens_per_s")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """The two runs of one seed."""

    seed: int
    engine: Run
    simulation: Run


def compare(cfg: Config, loads: Sequence[float], seeds: Sequence[int], say: Say) -> dict[str, Any]:
    """Run `cfg` (a native cell, without load and rate) and its twin in simulation at every load and seed.

    Returns {profile, saturation_rate, seeds, num_requests, loads: [{load, rate, num_finished, metrics, step_error, marks}]};
    metrics: name -> {engine, simulation, error, by_seed}, error = simulation / engine - 1, by_seed of each seed's own. say:
    told before each run. Raises ValueError, before anything is served, when the hardware node is no profile of this engine on
    this machine.
    """
    stage, hardware = native_stage(cfg), load_hardware(cfg)
    if not isinstance(hardware.provenance.get("profile"), Mapping):
        raise ValueError(f"hardware {hardware.name} is no profile of an engine; `lengthwise profile` makes one")
    if why := why_another(hardware, facts(stage.loaded())):
        raise ValueError(f"this is another engine: {why}; profile it first")
    real, twin = twins(cfg, stage)
    saturation = measure_saturation(twin)["rate"]
    seconds = sum(cfg["num_requests"] / (load * saturation) for load in loads) * len(seeds)
    count = len(loads) * len(seeds)
    say(f"saturation {saturation:.4g} requests/s in simulation; {count} runs, about {seconds / 60:.1f} minutes")
    out = []
    for load in loads:
        rate = load * saturation
        pairs = []
        for seed in seeds:
            say(f"load {load:g}, seed {seed}: {cfg['num_requests']} requests at {rate:.4g}/s")
            found = {"rate": rate, "seed": seed}
            pairs.append(Pair(seed, run_cell({**real, **found}, OnTheFly()), run_cell({**twin, **found}, OnTheFly())))
        out.append({"load": load, "rate": rate, **at_one_load(pairs, hardware.cost)})
    return {
        "profile": {"name": hardware.name, "model": hardware.model, **hardware.provenance},
        "saturation_rate": saturation, "seeds": list(seeds), "num_requests": cfg["num_requests"], "loads": out,
    }  # fmt: skip


def twins(cfg: Config, stage: NativeStage) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of the run on the engine and in simulation: the same rows, KV pool and limits, everything counted."""
    limits = dict(cfg["limits"])
    limits["kv_pool_tokens"] = min(stage.pool_tokens(cfg), load_hardware(cfg).kv_pool_tokens())
    limits["max_model_len"] = stage.max_model_len(cfg)
    real = {**cfg, "limits": limits, "window": {}, "load": None}
    dataset = stage.named(load_dataset(cfg), new_kv(cfg, limits["kv_pool_tokens"]))
    return real, {**real, "executor": SimulatedStage(), "workload": dataset, "reshape": None}


def at_one_load(pairs: Sequence[Pair], cost: CostModel) -> dict[str, Any]:
    """Errors over the requests of all seeds; rates are means over seeds."""
    metrics: dict[str, Any] = {}
    sides = [[samples(run.requests, run.summary["window"]["run_end"]) for run in runs] for runs in _sides(pairs)]
    for latency in LATENCIES:
        for stat in STATS:
            each = [[_stat([one[latency]], stat) for one in side] for side in sides]
            pooled = [_stat([one[latency] for one in side], stat) for side in sides]
            metrics[f"{latency}_{stat}"] = _entry(pooled, each)
    for name in RATES:
        each = [[run.metrics[name] for run in runs] for runs in _sides(pairs)]
        means = [None if None in side else float(np.mean(side)) for side in each]  # type: ignore[arg-type]
        metrics[name] = _entry(means, each)
    marks = {mark for pair in pairs for mark in pair.simulation.summary["provenance"]["marks"]}
    finished = [int((run.requests["status"] == "finished").sum()) for run in (p.engine for p in pairs)]
    return {
        "num_finished": sum(finished),
        "metrics": metrics,
        "step_error": step_error([pair.engine.steps for pair in pairs], cost),
        "marks": sorted(marks),
    }


def step_error(frames: Sequence[pd.DataFrame], cost: CostModel) -> float | None:
    """Seconds that `cost` gives the steps which the engine took, over what it took for them, - 1; None without steps. Where
    work was left, a step begins where the one before it ended: booking is part of it."""
    priced = took = 0.0
    for steps in frames:
        before = -np.inf
        for row in steps.itertuples():
            rows, context = row.num_decode + row.num_padding, row.context_tokens
            if row.num_chunks:
                priced += cost.step(rows, context, _chunks(row.num_chunks, row.prefill_tokens, row.prefill_pairs))
            else:
                for at in range(context, context + row.num_decode * row.num_steps, row.num_decode):
                    a, c, _ = cost.decode_line(rows, at)
                    priced += a + c * at
            took += row.end - (row.start if before < 0 else before)
            before = row.end if row.num_running + row.num_waiting else -np.inf
    return priced / took - 1.0 if took else None


def _chunks(num: int, tokens: int, pairs: float) -> list[Chunk]:
    """Chunks of as many tokens and pairs in all: every form prices those, and how many chunks there are."""
    start = pairs / tokens - tokens / 2
    return [Chunk(_ANY, start, tokens, True), *[Chunk(_ANY, 0, 0, True)] * (num - 1)]  # type: ignore[arg-type]


_ANY = Request(0, 0.0, 1)


def _sides(pairs: Sequence[Pair]) -> tuple[list[Run], list[Run]]:
    return [pair.engine for pair in pairs], [pair.simulation for pair in pairs]


def _stat(parts: Sequence[Sample], stat: str) -> float | None:
    """Of the requests of all parts together; None where some have not ended, or they are too few."""
    values, still = (np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "open"))
    if still.any() or not len(values):
        return None
    return float(values.mean()) if stat == "mean" else quantile(values, stat).value


def _entry(pooled: Sequence[float | None], each: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    engine, simulation = pooled
    return {
        "engine": engine, "simulation": simulation, "error": _error(engine, simulation),
        "by_seed": [_error(a, b) for a, b in zip(*each, strict=True)],
    }  # fmt: skip


def _error(engine: float | None, simulation: float | None) -> float | None:
    return None if engine is None or simulation is None or not engine else simulation / engine - 1.0


def rows(answer: Mapping[str, Any]) -> pd.DataFrame:
    """One row per load and metric: load, rate, metric, engine, simulation, error, error_least, error_most (of single seeds)."""
    out = []
    for at in answer["loads"]:
        for name, entry in at["metrics"].items():
            seeds = [error for error in entry["by_seed"] if error is not None]
            out.append(
                {
                    "load": at["load"], "rate": at["rate"], "metric": name, "engine": entry["engine"],
                    "simulation": entry["simulation"], "error": entry["error"],
                    "error_least": min(seeds, default=None), "error_most": max(seeds, default=None),
                }
            )  # fmt: skip
    return pd.DataFrame(out)


def lines(answer: Mapping[str, Any]) -> list[str]:
    """The errors in words, for a terminal: a line a metric, a column a load."""
    loads = answer["loads"]
    head = f"{'simulation / engine - 1':<24}" + "".join(f"{'load ' + format(at['load'], 'g'):>12}" for at in loads)
    body = [
        f"{name:<24}" + "".join(f"{_signed(at['metrics'][name]['error']):>12}" for at in loads) for name in loads[0]["metrics"]
    ]
    steps = f"{'single steps':<24}" + "".join(f"{_signed(at['step_error']):>12}" for at in loads)
    marks = [f"note: load {at['load']:g}: {mark}" for at in loads for mark in at["marks"]]
    return [head, *body, steps, *marks]


def _signed(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1%}"
