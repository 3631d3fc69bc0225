"""Fit a cost model to steps composed from measured kernels, and write the hardware node.

    python -m lengthwise.engine.simulated.fit model=llama31_8b device=h100_sxm out=llama31_8b_h100.yaml
    python -m lengthwise.engine.simulated.fit model=llama2_70b device=a100_sxm tp=4
    python -m lengthwise.engine.simulated.fit all=true out=conf/hardware

Steps drawn at random are priced by `kernels.StepComposer`; the affine, roofline and table forms are fitted to four fifths of
them and compared on the rest. The same arguments and packages write the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import commands, node
from .affine import Affine
from .aiconfigurator import read_tables
from .cost import CostModel
from .device import DEVICES, Device
from .forms import Arguments, fit_affine, fit_roofline, fit_table
from .kernels import Batch, KernelTables, StepComposer
from .roofline import Roofline
from .shapes import MODELS, PRODUCTS, ModelShape
from .steps import KINDS, Draw, Steps, relative_errors
from .table import Table

HOST_STEP = 1.5e-3  # s
FORMS: dict[str, type[CostModel]] = {"affine": Affine, "roofline": Roofline, "table": Table}
DEFAULTS: dict[str, Any] = {
    "model": "",
    "device": "",
    "tp": 1,
    "form": "roofline",
    "framework": "vllm",
    "version": "",
    "steps": 6000,
    "seed": 0,
    "work": "",
    "all": "",
    "out": "",
}
SIZES = (
    ("llama31_8b", 1), ("llama2_7b", 1), ("qwen25_7b", 1), ("qwen25_32b", 2), ("qwen25_72b", 4),
    ("llama2_70b", 4), ("llama2_70b", 8), ("llama31_70b", 4), ("llama31_70b", 8),
)  # fmt: skip
# eight A100s change their all-reduce between 256 and 512 tokens, 13 ms a step: no smooth form has that (4 % against 2 %)
TABLES = (
    {"model": "llama2_70b", "device": "a100_sxm", "tp": 8, "form": "table", "work": "true"},
    {"model": "llama31_70b", "device": "a100_sxm", "tp": 8, "form": "table", "work": "true"},
    {"model": "llama31_8b", "device": "h100_sxm", "form": "table"},
)
SHIPPED: tuple[dict[str, Any], ...] = (
    *({"model": m, "device": d, "tp": tp} for d in DEVICES for m, tp in SIZES if (d, tp) != ("a100_sxm", 8)),
    *TABLES,
)  # every composed node of conf/hardware


@dataclass(frozen=True)
class Fit:
    """A fitted form: its constructor's arguments and what it missed on held-out steps."""

    form: str
    arguments: Arguments
    cost: CostModel
    errors: dict[str, dict[str, float]]


def fit_forms(
    tables: KernelTables, shape: ModelShape, draw: Draw, forms: Sequence[str] = tuple(FORMS), track: Any = None
) -> dict[str, Fit]:
    """Compose the steps of `draw`, fit each form on four fifths, and measure it on the rest. `track` wraps the long loop."""
    composer, batches, held = StepComposer(tables, shape), draw.batches(), draw.held_out()
    times = np.array([composer.step(b) for b in (track(batches) if track else batches)])
    train = Steps.of([b for b, h in zip(batches, held, strict=True) if not h], times[~held])
    test = [b for b, h in zip(batches, held, strict=True) if h]
    out = {}
    for form in forms:
        if form == "roofline":
            arguments = fit_roofline(train, shape, tables)
        else:
            arguments = {"affine": fit_affine, "table": fit_table}[form](train)
        arguments["fitted_range"] = draw.fitted_range
        cost = FORMS[form](**arguments)
        out[form] = Fit(form, arguments, cost, relative_errors(cost, test, times[held]))
    return out


def draw_for(shape: ModelShape, device: Device, num_steps: int = 6000, seed: int = 0) -> Draw:
    """Steps that reach as far as the KV pool does. Raises ValueError when the weights leave no pool."""
    tokens = node.pool(shape, device)
    if tokens < 10_000:
        gib, need = shape.tp * device.memory / 2**30, 2 * shape.num_params / 2**30
        raise ValueError(f"{shape.name} has {need:.0f} GiB of weights; {shape.tp} x {device.name} have {gib:.0f} GiB in all")
    return Draw(num_steps, seed, context=int(np.rint(tokens / 10_000)) * 10_000)


def text(
    name: str, shape: ModelShape, device: Device, tables: KernelTables, draw: Draw, fit: Fit, command: str, work: bool = False
) -> str:
    """The text of conf/hardware/<name>.yaml; `command` is what wrote it. work: state what steps compute and move, which the
    roofline holds by itself."""
    source = tables.source
    lines = [
        *node.header(name, shape, device, str(source["device"]), command),
        *node.cost_lines(fit.cost, fit.arguments),
        "  host:  # assumed, not measured: the low end of 0.5-2 ms schedule + 1-5 ms prepare (inference-sim issue 482)",
        "    _target_: lengthwise.engine.simulated.cost.HostOverhead",
        f"    step: {node.number(HOST_STEP)}",
        "    row: 0  # no source gives a figure",
        *(node.work_lines(shape, device) if work and fit.form != "roofline" else []),
        "provenance:",
        f"  data: {source['package']}, {source['engine']}, {source['device']}, {' + '.join(source['tables'])}",
        f"  form: {fit.form}",
        *_composed(shape, tables),
        f"  steps: {draw.num_steps} random, seed {draw.seed}, 20 % held out",
        "  held_out_error:  # relative",
        *(f"    {kind}: {{mean: {e['mean']}, p95: {e['p95']}}}" for kind, e in fit.errors.items()),
        f"  range: up to {draw.rows} rows, {draw.context_per_row} tokens a row, {draw.context} tokens in all, "
        f"{draw.prefill_tokens} prefill tokens a step",
        "  validated: composed from kernels; not validated end to end",
    ]
    return "\n".join(lines) + "\n"


def _composed(shape: ModelShape, tables: KernelTables) -> Iterable[str]:
    """What the composition rests on: products no table has, heads no table has, what is left out."""
    products = zip((*PRODUCTS, "head"), (*shape.products, shape.head), strict=True)
    absent = [name for name, key in products if key not in tables.products]
    near = f" ({' and '.join(', '.join(absent).rsplit(', ', 1))} from neighbouring shapes)" if absent else ""
    yield f"  composed: bf16 products{near}, attention, elementwise by bytes moved;"
    for note in tables.source.get("notes", ()):
        yield f"    {note.replace(': ', ' of ')};"
    if shape.tp > 1:
        yield f"    as one of {shape.tp} ranks, with two all-reduces a layer (inside CUDA graphs, not overlapped);"
    left_out = "communication" if shape.tp == 1 else "the embedding's all-reduce, gathering logits"
    yield f"    without sampling, {left_out} and CUDA-graph padding; a chunk's attention by its share of the score matrix"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lengthwise.engine.simulated.fit",
        description="Fit a cost model to engine steps composed from measured kernels and write a conf/hardware node.",
        epilog=f"model: {', '.join(MODELS)}. device: {', '.join(DEVICES)}. tp: ranks. form: {', '.join(FORMS)}. version: of "
        "the framework, the newest by default. out: the node's file; without it the node is printed. work=true states what "
        "steps compute and move, for utilisation (the roofline has it). all=true writes every composed node into the folder "
        "`out`, and names those that cannot be. Needs the extra `fit`.",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help=", ".join(f"{k}={v}" for k, v in DEFAULTS.items()))
    return commands.run(parser.parse_args(arguments).settings, DEFAULTS, SHIPPED, _one)


def _one(given: Mapping[str, Any], name: str | None = None) -> tuple[str, str]:
    """(name, text) of one node; prints how well each form fits."""
    model, key = commands.chosen(given, "model", MODELS), commands.chosen(given, "device", DEVICES)
    form, device = commands.chosen(given, "form", FORMS), DEVICES[key]
    if given["steps"] < 300:
        raise ValueError(f"steps={given['steps']}: a fit needs 300 or more")
    shape = replace(MODELS[model], tp=given["tp"])
    draw = draw_for(shape, device, given["steps"], given["seed"])
    tables = read_tables(shape, key, given["framework"], given["version"] or None)
    fits = fit_forms(tables, shape, draw, track=_track)
    group = f" x {shape.tp}" if shape.tp > 1 else ""
    print(
        f"{shape.name} on {key}{group}: relative error on {draw.num_steps // 5} held-out steps, mean / p95 (seed {draw.seed})"
    )
    print(f"{'form':10}" + "".join(f"{kind:>18}" for kind in (*KINDS, "all")))
    for label, fit in fits.items():
        print(f"{label:10}" + "".join(f"{e['mean']:>10.2%} /{e['p95']:>6.1%}" for e in fit.errors.values()))
    name = name or node_name(given)
    command = commands.command("fit", given, DEFAULTS)
    return name, text(name, shape, device, tables, draw, fits[form], command, bool(given["work"]))


def node_name(given: Mapping[str, Any]) -> str:
    """llama2_70b_a100_tp4: model, device, ranks, and the form where it is not the usual one."""
    ranks = f"_tp{given['tp']}" if given["tp"] > 1 else ""
    suffix = "" if given["form"] == DEFAULTS["form"] else f"_{given['form']}"
    return f"{given['model']}_{given['device'].split('_')[0]}{ranks}{suffix}"


def _track(batches: Sequence[Batch]) -> Iterable[Batch]:
    from rich.console import Console
    from rich.progress import track

    return track(batches, description="composing steps", console=Console(stderr=True), disable=not sys.stderr.isatty())


if __name__ == "__main__":
    sys.exit(main())
