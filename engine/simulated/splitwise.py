"""Fit a cost model to the whole engine steps published with splitwise-sim, and write the hardware node.

    python -m lengthwise.engine.simulated.splitwise model=llama2_70b device=h100_sxm tp=8 out=llama2_70b_h100_tp8_measured.yaml
    python -m lengthwise.engine.simulated.splitwise all=true out=conf/hardware

The file (perf_model.csv, MIT, github.com/Mutinifni/splitwise-sim, Patel et al., "Splitwise", ISCA 2024) is read from the folder
LENGTHWISE_DATA or from `path`; the coefficients are ours, and they are all that is shipped. It holds a batch of equal prompts
in one prefill, and its decoding alone. Decoding is base + row x rows + context x tokens attended; prefill is a monotone broken
line over the tokens of the step. Both are one `Table`, so a step of both is one pass over the weights: an assumption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import commands, node
from .device import DEVICES
from .forms import Arguments, short, solve
from .shapes import MODELS, ModelShape
from .table import Table

FILES = ("cost/splitwise-sim/perf_model.csv.gz", "cost/splitwise-sim/perf_model.csv")  # below LENGTHWISE_DATA
NAMES = {"llama2_70b": "llama2-70b", "bloom_176b": "bloom-176b"}
GPUS = {"a100_sxm": "a100-80gb", "h100_sxm": "h100-80gb"}
OUTPUT = 128  # tokens: rows of longer answers end early, at an unknown length
TOLERANCE = 0.1  # end to end against prefill + decoding: beyond it the batch did not run as one (it did not fit)
CONTEXTS = (1, 8192)
SHIPPED = (*(("llama2_70b", device, tp) for device in GPUS for tp in (2, 4, 8)), *(("bloom_176b", d, 8) for d in GPUS))
DEFAULTS: dict[str, Any] = {"model": "", "device": "", "tp": 1, "path": "", "all": "", "out": ""}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Configs:
    """Columns (N,), one entry per measured configuration: prompt tokens, batch, and medians over its repeats in s."""

    prompt: Floats
    batch: Floats
    prefill: Floats
    decode: Floats
    num_dropped: int

    @property
    def tokens(self) -> Floats:
        return np.asarray(self.prompt * self.batch)

    @property
    def context(self) -> Floats:
        """Tokens attended in the mean decoding step: prompt + 1 to prompt + 127 a row."""
        return np.asarray(self.batch * (self.prompt + OUTPUT / 2))

    def only(self, keep: NDArray[np.bool_]) -> Configs:
        return Configs(self.prompt[keep], self.batch[keep], self.prefill[keep], self.decode[keep], self.num_dropped)


def read_configs(path: Path, model: str, device: str, tp: int) -> Configs:
    """The configurations of the file that ran as one batch. Raises ValueError when a column or every row is absent."""
    import pandas as pd

    table = pd.read_csv(path)
    keys, times = ["model", "hardware", "tensor_parallel", "token_size"], ["prompt_time", "token_time", "e2e_time"]
    missing = [name for name in (*keys, "prompt_size", "batch_size", *times) if name not in table]
    if missing:
        raise ValueError(f"{path.name} lacks the columns {missing}")
    asked = (NAMES[model], GPUS[device], tp, OUTPUT)
    rows = table[np.logical_and.reduce([table[key] == value for key, value in zip(keys, asked, strict=True)])]
    if rows.empty:
        there = sorted({tuple(row) for row in table[["model", "hardware", "tensor_parallel"]].to_numpy().tolist()})
        raise ValueError(f"{path.name} has no {asked[0]} on {asked[1]} x {tp}; it has {there}")
    medians = rows.groupby(["prompt_size", "batch_size"])[times].median().reset_index()
    whole = medians.prompt_time + (OUTPUT - 1) * medians.token_time
    keep = ((medians.e2e_time / whole - 1).abs() <= TOLERANCE).to_numpy()
    columns = [medians[name].to_numpy(np.float64)[keep] for name in ("prompt_size", "batch_size", "prompt_time", "token_time")]
    prompt, batch, prefill, decode = columns
    return Configs(prompt, batch, prefill * 1e-3, decode * 1e-3, int((~keep).sum()))


def fit_decode(configs: Configs) -> Floats:
    """(base, row, context) in s, each >= 0."""
    return solve([np.ones_like(configs.batch), configs.batch, configs.context], configs.decode, configs.decode)[0]


def fit_prefill(configs: Configs) -> tuple[Floats, Floats]:
    """Knots (tokens) and seconds of a monotone broken line: unknown are the rises from one measured size to the next."""
    knots = np.unique(configs.tokens)
    columns = (configs.tokens[:, None] >= knots[None, :]).astype(np.float64)
    return knots, np.cumsum(solve(list(columns.T), configs.prefill, configs.prefill)[0])


def fit_table(configs: Configs) -> Arguments:
    """A Table's arguments: up to the greatest batch its tokens cost what decoding rows do, then what prefill does."""
    base, row, context = fit_decode(configs)
    knots, seconds = fit_prefill(configs)
    rows = (1.0, float(configs.batch.max()))
    tokens = [*rows, *(k for k in knots if k > rows[1])]
    linear = [*(base + row * r for r in rows), *(s for k, s in zip(knots, seconds, strict=True) if k > rows[1])]
    return {
        "tokens": [int(t) for t in tokens],
        "linear": [short(s) for s in np.maximum.accumulate(linear)],
        "rows": [int(r) for r in rows],
        "contexts": list(CONTEXTS),
        "attention": [[short(context * r * c) for c in CONTEXTS] for r in rows],
        "per_attention": 0.0,
        "fitted_range": {
            "rows": int(rows[1]), "context": int(configs.context.max()), "prefill_tokens": int(configs.tokens.max()),
        },
    }  # fmt: skip


def left_out_errors(configs: Configs) -> dict[str, dict[str, float]]:
    """{decode, prefill: {mean, max}} of the relative error at each configuration, fitted without it. Another configuration of
    as many prefill tokens may stay."""
    decode, prefill = [], []
    for i in range(len(configs.batch)):
        keep = np.arange(len(configs.batch)) != i
        rest = configs.only(keep)
        base, row, context = fit_decode(rest)
        decode.append((base + row * configs.batch[i] + context * configs.context[i]) / configs.decode[i] - 1)
        knots, seconds = fit_prefill(rest)
        prefill.append(_line(float(configs.tokens[i]), knots, seconds) / configs.prefill[i] - 1)
    parts = {"decode": np.abs(decode), "prefill": np.abs(prefill)}
    return {kind: {"mean": round(float(e.mean()), 4), "max": round(float(e.max()), 4)} for kind, e in parts.items()}


def _line(x: float, knots: Floats, values: Floats) -> float:
    i = int(np.clip(np.searchsorted(knots, x), 1, len(knots) - 1))
    slope = (values[i] - values[i - 1]) / (knots[i] - knots[i - 1])
    return float(values[i - 1] + slope * (x - knots[i - 1]))


def text(name: str, shape: ModelShape, device: str, configs: Configs, command: str) -> str:
    """The text of conf/hardware/<name>.yaml."""
    arguments, errors, on = fit_table(configs), left_out_errors(configs), DEVICES[device]
    reach = arguments["fitted_range"]
    dropped = f", {configs.num_dropped} left out that did not run as one batch" if configs.num_dropped else ""
    lines = [
        *node.header(name, shape, on, on.name, command),
        *node.cost_lines(Table(**arguments), arguments),
        *node.work_lines(shape, on),
        "provenance:",
        "  data: splitwise-sim data/perf_model.csv (MIT), medians of the repeats of answers of 128 tokens",
        "  form: table, of decode base + row x rows + context x tokens attended and a monotone line of prefill tokens",
        f"  configurations: {len(configs.batch)}{dropped}",
        "  held_out_error:  # relative, each configuration by a fit without it",
        *(f"    {kind}: {{mean: {e['mean']}, max: {e['max']}}}" for kind, e in errors.items()),
        f"  range: up to {reach['rows']} rows of 576 tokens or 1 of 8256, {reach['prefill_tokens']} prefill tokens a step, "
        "prompts from 128 tokens",
        "  assumed: a step of chunks and rows is one pass over the weights, its tokens priced together; a chunk costs the same",
        "    wherever its prompt stands; fewer than 128 tokens of prefill cost what as many rows do",
        "  host: in the measured times",
        "  validated: whole steps of a real engine, which the file does not name; mixed steps are not validated",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lengthwise.engine.simulated.splitwise",
        description="Fit a cost model to the engine steps published with splitwise-sim and write a conf/hardware node.",
        epilog=f"model: {', '.join(NAMES)}. device: {', '.join(GPUS)}. tp: ranks. path: perf_model.csv, else {FILES[0]} below "
        "LENGTHWISE_DATA. out: the node's file; without it the node is printed. all=true writes every node into the folder "
        "`out`.",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help=", ".join(f"{k}={v}" for k, v in DEFAULTS.items()))
    shipped = [dict(zip(("model", "device", "tp"), one, strict=True)) for one in SHIPPED]
    return commands.run(parser.parse_args(arguments).settings, DEFAULTS, shipped, _one)


def _one(given: Mapping[str, Any], name: str | None = None) -> tuple[str, str]:
    model, device = commands.chosen(given, "model", NAMES), commands.chosen(given, "device", GPUS)
    path = commands.data_file(given["path"], FILES)
    configs = read_configs(path, model, device, given["tp"])
    name = name or f"{model}_{device.split('_')[0]}_tp{given['tp']}_measured"
    command = commands.command("splitwise", given, DEFAULTS)
    return name, text(name, replace(MODELS[model], tp=given["tp"]), device, configs, command)


if __name__ == "__main__":
    sys.exit(main())
