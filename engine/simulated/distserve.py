"""Turn the coefficients published with DistServe into a hardware node: OPT on A100s, under DistServe's engine or vLLM.

    python -m lengthwise.engine.simulated.distserve model=opt_13b engine=vllm out=opt_13b_a100_vllm.yaml
    python -m lengthwise.engine.simulated.distserve all=true out=conf/hardware

The files (profiler-a100-80g.ENGINE.json, Apache-2.0, github.com/LLMServe/DistServe, Zhong et al., OSDI 2024) hold, per model
and number of ranks and in milliseconds, prefill = a + b x tokens + c x sum of squared prompt lengths and decoding = a + b x
tokens attended + c x rows in two pieces. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import commands, node
from .device import DEVICES
from .forms import short
from .piecewise import DECODE, PREFILL, Piecewise
from .shapes import MODELS, ModelShape

NAMES = {"opt_13b": "facebook/opt-13b", "opt_66b": "facebook/opt-66b"}
ENGINES = {"distserve": "DistServe", "vllm": "vLLM"}
PARTS = (("prefill", "prefill", PREFILL), ("few", "decoding_smallbs", DECODE), ("many", "decoding_largebs", DECODE))
THRESHOLD = "decoding_large_small_bs_threshold"
ROWS = 192
TOKENS = {  # of a batch: where DistServe's own profiling stopped (its evaluation/0-test-single-forward-performance)
    ("opt_13b", 1): 49152, ("opt_13b", 2): 98304, ("opt_13b", 4): 250000,
    ("opt_66b", 2): 8192, ("opt_66b", 3): 36864, ("opt_66b", 4): 65000,
}  # fmt: skip
SHIPPED = tuple((model, engine, tp) for model, tp in (("opt_13b", 1), ("opt_66b", 4)) for engine in ENGINES)
DEFAULTS: dict[str, Any] = {"model": "", "engine": "distserve", "tp": 1, "path": "", "all": "", "out": ""}


def read_coefficients(path: Path, model: str, tp: int) -> dict[str, Any]:
    """Arguments of `Piecewise`, in s. Raises ValueError, naming it, at what the file lacks or no time can have."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    ranks = profile.get(NAMES[model], {})
    if str(tp) not in ranks:
        raise ValueError(f"{path.name} has no {NAMES[model]} on {tp} ranks; it has {sorted(ranks, key=int)}")
    found = ranks[str(tp)]
    missing = [field for field in (THRESHOLD, *(field for _, field, _ in PARTS)) if field not in found]
    if missing:
        raise ValueError(f"{path.name}, {NAMES[model]}, {tp} ranks: lacks {missing}")
    out: dict[str, Any] = {}
    for name, field, parts in PARTS:
        for part, value in zip(parts, found[field], strict=True):
            if value < 0:
                raise ValueError(
                    f"{path.name}, {NAMES[model]}, {tp} ranks: {field} has {part}={value} ms; more would cost less"
                )
        out[name] = {part: short(value * 1e-3) for part, value in zip(parts, found[field], strict=True)}
    return out | {"threshold": int(found[THRESHOLD])}


def text(name: str, shape: ModelShape, model: str, engine: str, arguments: Mapping[str, Any], command: str) -> str:
    """The text of conf/hardware/<name>.yaml."""
    device, tokens = DEVICES["a100_sxm"], TOKENS.get((model, shape.tp))
    reach = {"fitted_range": {"rows": ROWS, "context": tokens, "prefill_tokens": tokens}} if tokens else {}
    said = f"batches of 1 to {ROWS}, prompts of 4 to 2020 tokens, up to {tokens} tokens in all" if tokens else "not published"
    cost = Piecewise(**arguments)
    rows = cost.threshold
    price, published = (1e3 * t for t in (cost.decode_line(rows, 0)[0], cost.many["base"] + cost.many["row"] * rows))
    step = f"{price:.2f} ms where the published lines step down to {published:.2f}" if price > published else f"{price:.2f} ms"
    lines = [
        *node.header(name, shape, device, device.name, command),
        *node.cost_lines(cost, {**arguments, **reach}),
        *node.work_lines(shape, device),
        "provenance:",
        f"  data: DistServe simdistserve/estimators/profile_data/profiler-a100-80g.{engine}.json (Apache-2.0), coefficients",
        "  form: piecewise, of prefill base + token x tokens + square x squared lengths",
        "    and decode base + context x tokens attended + row x rows",
        f"  threshold: {rows} rows, from there on never below the price of {rows - 1}; without context {step}",
        "  held_out_error: not published",
        f"  range: {said}",
        "  assumed: a step of prefill and decode (the fits hold none) is their sum less the smallest base; 2-byte weights",
        "  host: in the measured times, as far as the engine's forward pass holds it",
        f"  validated: by its authors, as whole steps of {ENGINES[engine]}; not validated here",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lengthwise.engine.simulated.distserve",
        description="Turn DistServe's published coefficients into a conf/hardware node.",
        epilog=f"model: {', '.join(NAMES)}. engine: {', '.join(ENGINES)}. tp: ranks. path: the engine's JSON, else the one in "
        "cost/distserve below LENGTHWISE_DATA. out: the node's file; without it the node is printed. all=true writes every "
        "node into the folder `out`.",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help=", ".join(f"{k}={v}" for k, v in DEFAULTS.items()))
    shipped = [dict(zip(("model", "engine", "tp"), one, strict=True)) for one in SHIPPED]
    return commands.run(parser.parse_args(arguments).settings, DEFAULTS, shipped, _one)


def _one(given: Mapping[str, Any], name: str | None = None) -> tuple[str, str]:
    model, engine = commands.chosen(given, "model", NAMES), commands.chosen(given, "engine", ENGINES)
    shape = replace(MODELS[model], tp=given["tp"])
    path = commands.data_file(given["path"], [f"cost/distserve/profiler-a100-80g.{engine}.json"])
    ranks = f"_tp{shape.tp}" if shape.tp > 1 else ""
    name = name or f"{model}_a100{ranks}_{engine}"
    command = commands.command("distserve", given, DEFAULTS)
    return name, text(name, shape, model, engine, read_coefficients(path, model, shape.tp), command)


if __name__ == "__main__":
    sys.exit(main())
