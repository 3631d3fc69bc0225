"""Capacity: the greatest request rate of one replica at which the SLOs hold, by bisection over ordinary cells.

A probe that raises ends the search: what is not known is no number. What makes a number doubtful travels with it, in `marks`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import stability
from .asked import saturation_rate
from .bisection import Bracket, bisect, check_tolerance, num_probes, rounded
from .cellhash import digest, fields, identity
from .criterion import Criterion
from .jsonable import jsonable
from .nodes import load_hardware, make
from .paths import root, temporary
from .prepare import Prepared
from .probes import Probes, Say, SearchFailed
from .token_cost import num_gpus, read_price, token_cost
from .validate import validate

FILE = "capacity.json"
FAILED = "failed.txt"
OWN = ("seeds", "n_jobs", "search", "criterion", "for_rate", "gpus_per_replica", "price")  # config keys that are no cell's
RATE_ERROR = 0.02  # the achieved rate of arrivals may be off by this before it is marked
SHORT = 10  # mean E2E latencies that a window should hold
ASSUMES = (
    "every replica is offered an even share of the requests and has a queue of its own; a router that looks at queues may need "
    "fewer, one that pins sessions or prefixes to replicas, or a skewed split, more"
)
Cfg = dict[str, Any]


def search(cfg: Mapping[str, Any], say: Say | None = None) -> dict[str, Any]:
    """Search for the capacity of what `cfg` (conf/capacity.yaml, resolved) describes; returns what capacity.json holds.

    Writes the probes' cells to PATH/<name>/ and the answer to PATH/<name>/<search>/capacity.json; a search that fails leaves
    failed.txt there instead. say: told what is done (default: standard error). Raises ValueError on a config that cannot be
    searched, before the first probe; SearchFailed, naming the probe that has no result.
    """
    say = say or _say
    cell, seeds, criterion, plan = cell_config(cfg), _seeds(cfg), _criterion(cfg), cfg["search"]
    price, gpus = read_price(cfg["price"]), num_gpus(load_hardware(cell), cfg["gpus_per_replica"])
    fleet(1.0, cfg["for_rate"], gpus)
    _check_numbers(plan, cfg["n_jobs"])
    validate({**cell, "rate": 1.0})
    prepared = Prepared(root(cell["out"]))
    lo, hi, saturation = _bounds(plan, cell, prepared, say)
    count = num_probes(lo, hi, plan["tolerance"]) + 2
    question = {
        "cell": identity({**cell, "rate": None, "seed": 0}), "seeds": seeds, "lo": lo, "hi": hi, "search": dict(plan),
        "criterion": [criterion.target, dict(criterion.at_most), criterion.limit],
    }  # fmt: skip
    label, code = _label(cell), digest(question)
    folder = root(cell["out"]) / cell["name"] / f"{label}-{code}"
    say(f"{label}: {count} probes of {len(seeds)} seeds from {lo:g} to {hi:g} requests/s, to {plan['tolerance']:.2%}")
    probes = Probes(cell, seeds, criterion, say, cfg["n_jobs"])
    try:
        _prepare(cell, prepared, say)
        bracket = bisect(probes.passes, lo, hi, plan["tolerance"], raises=plan["raises"])
        _confirm(probes, bracket, plan["confirm"] or ())
    except SearchFailed as error:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(missing_ok=True)
        (folder / FAILED).write_text(f"{error}\n")
        raise
    rate = bracket.lo
    answer: dict[str, Any] = jsonable(
        {
            "rate": rate, "lo": rate, "hi": bracket.hi, "kind": bracket.kind, "tolerance": plan["tolerance"],
            "gpus": gpus, "seeds": seeds, "slo": dict(cell["slo"]), "target": criterion.target,
            "at_most": dict(criterion.at_most), "criterion": criterion.describe(),
            "stability": stability.describe(criterion.limit),
            "searched": {"lo": lo, "hi": hi, "saturation_rate": saturation},
            "probes": probes.rows, "contradictions": probes.contradictions(), "marks": _marks(probes, bracket),
            "cost": token_cost(probes.summaries.get(rate, ()), gpus, price), "fleet": fleet(rate, cfg["for_rate"], gpus),
            "cell": {key: value for key, value in fields({**cell, "rate": None, "load": None}).items() if value is not None},
            "provenance": {"search_hash": code, **_provenance(probes)}, "folder": folder.name,
        }
    )  # fmt: skip
    _write(folder, answer)
    return answer


def fleet(rate: float, wanted: float | None, gpus: int) -> dict[str, Any] | None:
    """Replicas and GPUs for `wanted` requests/s when one replica of `gpus` GPUs carries `rate`; None when nothing is wanted,
    replicas None when the rate is 0. Raises ValueError on a rate that nobody can want."""
    if wanted is None:
        return None
    if not _positive(wanted):
        raise ValueError(f"for_rate={wanted!r} must be a finite number of requests/s > 0")
    replicas = math.ceil(wanted / rate - 1e-9) if rate > 0 else None
    return {
        "for_rate": wanted, "replicas": replicas, "gpus": None if replicas is None else replicas * gpus, "assumes": ASSUMES,
    }  # fmt: skip


def cell_config(cfg: Mapping[str, Any]) -> Cfg:
    """The config of a probe, its rate and seed aside. Raises ValueError on what a search sets itself or cannot vary."""
    for key in ("load", "rate"):
        if cfg[key] is not None:
            raise ValueError(f"{key}={cfg[key]}: the rate is what is searched; its bounds are search.lo and search.hi")
    if cfg["seed"] != 0:
        raise ValueError(f"seed={cfg['seed']}: a search takes several, seeds=[0,1,2]")
    if (cfg.get("study") or {}).get("size", "standard") != "standard":
        raise ValueError(f"study.size={cfg['study']['size']} is of a study; give num_requests and seeds for a shorter search")
    if getattr(make(cfg["arrivals"]), "keeps_times", False):
        chosen = (cfg.get("choices") or {}).get("arrivals")
        raise ValueError(f"arrivals={chosen}: they have a rate of their own (of a replay: arrivals.rescale=true stretches it)")
    if not cfg["window"]["warm_up"] > 0:
        raise ValueError("window.warm_up must be > 0: filling up an empty engine must not enter the estimate")
    return {key: value for key, value in cfg.items() if key not in OWN}


def _seeds(cfg: Mapping[str, Any]) -> list[int]:
    seeds = cfg["seeds"]
    if not isinstance(seeds, list) or not seeds or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in seeds):
        raise ValueError(f"seeds={seeds!r} must be a list of whole numbers >= 0: seeds=[0,1,2]")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} names one twice")
    return seeds


def _check_numbers(plan: Mapping[str, Any], n_jobs: Any) -> None:
    """Raises ValueError on what would only fail once probes have run."""
    check_tolerance(plan["tolerance"])
    factors = plan["confirm"] if plan["confirm"] is not None else []
    if not isinstance(factors, (list, tuple)) or not all(_positive(one) for one in factors):
        raise ValueError(f"search.confirm={factors!r} must be a list of factors > 0: search.confirm=[0.9,1.1]")
    for key in ("lo", "hi", "lo_load", "hi_load"):
        if not (_positive(plan[key]) or (plan[key] is None and key in ("lo", "hi"))):
            raise ValueError(f"search.{key}={plan[key]!r} must be a finite number > 0")
    for key, value, least in (("search.raises", plan["raises"], 0), ("n_jobs", n_jobs, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or (value < least and not (key == "n_jobs" and value == -1)):
            raise ValueError(f"{key}={value!r} must be a whole number >= {least}{', or -1: all cores' * (key == 'n_jobs')}")


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _criterion(cfg: Mapping[str, Any]) -> Criterion:
    """Without an SLO only the percentiles are asked for, if there are any."""
    node = cfg["criterion"]
    at_most = {key: value for key, value in (node["at_most"] or {}).items() if value is not None}
    has_slo = any(value is not None for value in cfg["slo"].values())
    return Criterion(node["target"] if has_slo or not at_most else None, at_most, node["growth"])


def _bounds(plan: Mapping[str, Any], cell: Cfg, prepared: Prepared, say: Say) -> tuple[float, float, float | None]:
    """lo and hi in requests/s, and the saturation rate where they came from it."""
    lo, hi, saturation = plan["lo"], plan["hi"], None
    if lo is None or hi is None:
        saturation = saturation_rate(cell, prepared)
        say(f"saturation rate: {saturation:.4g} requests/s")
        lo = plan["lo_load"] * saturation if lo is None else lo
        hi = plan["hi_load"] * saturation if hi is None else hi
    return rounded(lo), rounded(hi), saturation


def _prepare(cell: Cfg, prepared: Prepared, say: Say) -> None:
    """Make what the probes share, before they may start in parallel."""
    probe = {**cell, "rate": 1.0}
    for kind, path in prepared.needed(probe).items():
        if not (path / "content").exists():
            say(f"prepare: {kind}, once for all probes")
    prepared.needed(probe, make=True)


def _confirm(probes: Probes, bracket: Bracket, factors: Sequence[float]) -> None:
    """Probe rates on either side of the answer: a search by halves never looks there again, and nothing says it is monotone."""
    for factor in factors if bracket.kind == "between" else ():
        rate = rounded(bracket.lo * factor)
        if rate not in probes.summaries and not bracket.lo <= rate <= bracket.hi:
            probes.passes(rate)


def _label(cell: Cfg) -> str:
    chosen = fields({**cell, "rate": None, "load": None})
    words = [chosen.get(group) for group in ("policy", "predictor", "workload", "arrivals", "limits")]
    return "-".join(str(word) for word in ("capacity", *words) if word is not None)[:100]


def _marks(probes: Probes, bracket: Bracket) -> list[str]:
    """What a reader should know before using the number."""
    marks = [f"not monotone: {text}" for text in probes.contradictions()]
    at = probes.at(bracket.lo)
    if at is None:
        reasons = (probes.at(bracket.hi) or {}).get("reasons", [])
        return [f"even lo = {bracket.hi:g} requests/s fails: {'; '.join(reasons)}", *marks, *_doubts(probes, bracket.hi)]
    if bracket.kind == "at_least":
        marks.append(f"hi = {bracket.lo:g} requests/s still holds: the capacity is at least that")
    achieved = [one for one in at["arrival_rps_by_seed"].values() if one is not None]
    mean = sum(achieved) / max(len(achieved), 1)
    if achieved and abs(mean / bracket.lo - 1) > RATE_ERROR:
        marks.append(f"the counted requests came at {mean:.4g} requests/s, not at {bracket.lo:g}: take more requests or seeds")
    return marks + _doubts(probes, bracket.lo)


def _doubts(probes: Probes, rate: float) -> list[str]:
    """What makes the probe that decided a weak one: too few requests, too short a window, some of them refused."""
    marks, at = [], probes.at(rate)
    blur = max(at["growth_allowed"].values()) if at else 0.0
    if blur > probes.criterion.limit:
        marks.append(f"growth below {blur:.1%} of what comes cannot be told from chance: take more requests")
    summaries = probes.summaries[rate]
    rejected, counted = (
        sum(int(one["metrics"].get(f"num_{kind}") or 0) for one in summaries) for kind in ("rejected", "counted")
    )
    if rejected:
        marks.append(f"{rejected:,} of {counted:,} requests are rejected at the door: no percentile holds them")
    summary = summaries[0]
    seconds, e2e = summary["window"]["seconds"], summary["metrics"].get("e2e_mean")
    if e2e and seconds < SHORT * e2e:
        marks.append(f"the window of {seconds:.4g} s is only {seconds / e2e:.1f} mean E2E latencies: take more requests")
    return marks


def _provenance(probes: Probes) -> dict[str, Any]:
    """What all probes rest on, and the marks that any of them bears."""
    every = [summary["provenance"] for summaries in probes.summaries.values() for summary in summaries]
    kept = ("version", "hardware", "workload", "predictor", "kv_pool_tokens")
    return {
        **{key: every[0].get(key) for key in kept},
        "marks": sorted({mark for one in every for mark in one.get("marks") or ()}),
    }


def _write(folder: Path, answer: Mapping[str, Any]) -> None:
    """Write capacity.json whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    made = temporary(folder / FILE)
    made.write_text(json.dumps(answer, indent=1, allow_nan=False) + "\n")
    made.rename(folder / FILE)
    (folder / FAILED).unlink(missing_ok=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
