"""Fit a cost model to steps composed from measured kernels, and write the hardware node.

    python -m lengthwise.engine.simulated.fit model=llama31_8b device=h100_sxm out=llama31_8b_h100.yaml

Steps drawn at random are priced by `kernels.StepComposer`; the affine, roofline and table forms are fitted to four fifths of
them and compared on the rest. The same arguments and packages write the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .affine import Affine
from .cost import CostModel
from .forms import Arguments, fit_affine, fit_roofline, fit_table
from .kernels import Batch, KernelTables, ModelShape, StepComposer, read_tables
from .roofline import Roofline
from .steps import KINDS, Draw, Steps, relative_errors
from .table import Table

MODELS = {"llama31_8b": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 8.03e9)}
MEMORY_MIB = {"h100_sxm": 81559, "a100_sxm": 81920}  # what nvidia-smi reports; sold as 80 GB
ACTIVATIONS = 2.0e9  # bytes: activations of 2,048 tokens, float32 logits of 256 rows, workspaces, CUDA context and graphs
HOST_STEP = 1.5e-3  # s
FORMS: dict[str, type[CostModel]] = {"affine": Affine, "roofline": Roofline, "table": Table}
DEFAULTS: dict[str, Any] = {
    "model": "",
    "device": "",
    "form": "roofline",
    "framework": "vllm",
    "version": "",
    "steps": 6000,
    "seed": 0,
    "out": "",
}


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


def node(name: str, shape: ModelShape, device: str, tables: KernelTables, draw: Draw, fit: Fit, command: str) -> str:
    """The text of conf/hardware/<name>.yaml; `command` is what wrote it."""
    source, target = tables.source, type(fit.cost)
    lines = [
        f"# Written by: {command}",
        "_target_: lengthwise.engine.simulated.hardware.Hardware",
        "_convert_: all",
        f"name: {name}",
        f"model: {shape.name}, bf16, 1 x {source['device']}",
        f"memory: {MEMORY_MIB[device] * 2**20}  # bytes: the {MEMORY_MIB[device]} MiB that nvidia-smi reports, sold as 80 GB",
        f"weights: {_number(2 * shape.num_params)}  # bytes: {shape.num_params:.3g} parameters x 2",
        f"activations: {_number(ACTIVATIONS)}  # bytes, an estimate: token_budget 2048, 256 rows of logits, CUDA graphs",
        f"kv_bytes_per_token: {shape.kv_bytes_per_token}",
        "cost:",
        f"  _target_: {target.__module__}.{target.__name__}",
        *_mapping(fit.arguments, "  "),
        "  host:  # assumed, not measured: the low end of 0.5-2 ms schedule + 1-5 ms prepare (inference-sim issue 482)",
        "    _target_: lengthwise.engine.simulated.cost.HostOverhead",
        f"    step: {_number(HOST_STEP)}",
        "    row: 0  # no source gives a figure",
        "provenance:",
        f"  data: {source['package']}, {source['engine']}, {source['device']}, {' + '.join(source['tables'])}",
        f"  form: {fit.form}",
        "  composed: bf16 products (gate_up, down and head from neighbouring shapes), attention, elementwise by bytes moved;",
        "    without sampling, communication and CUDA-graph padding; a chunk's attention by its share of the score matrix",
        f"  steps: {draw.num_steps} random, seed {draw.seed}, 20 % held out",
        "  held_out_error:  # relative",
        *(f"    {kind}: {{mean: {e['mean']}, p95: {e['p95']}}}" for kind, e in fit.errors.items()),
        f"  range: up to {draw.rows} rows, {draw.context_per_row} tokens a row, {draw.context} tokens in all, "
        f"{draw.prefill_tokens} prefill tokens a step",
        "  validated: composed from kernels; not validated end to end",
    ]
    return "\n".join(lines) + "\n"


def _mapping(values: Arguments, indent: str) -> Iterable[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}: {{{', '.join(f'{k}: {_number(v)}' for k, v in value.items())}}}"
        elif isinstance(value, list) and isinstance(value[0], list):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - [{', '.join(_number(v) for v in line)}]" for line in value)
        elif isinstance(value, list):
            yield f"{indent}{key}: [{', '.join(_number(v) for v in value)}]"
        else:
            yield f"{indent}{key}: {_number(value)}"


def _number(value: float) -> str:
    """A number that every YAML reader takes for one: 1.0e-05, not 1e-05."""
    mantissa, e, exponent = f"{value:.12g}".partition("e")
    return f"{mantissa}.0{e}{exponent}" if e and "." not in mantissa else f"{mantissa}{e}{exponent}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lengthwise.engine.simulated.fit",
        description="Fit a cost model to engine steps composed from measured kernels and write a conf/hardware node.",
        epilog=f"model: {', '.join(MODELS)}. device: {', '.join(MEMORY_MIB)}. form: {', '.join(FORMS)}. version: of the "
        "framework, the newest by default. out: the node's file; without it the node is printed. Needs the extra `fit`.",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help=", ".join(f"{k}={v}" for k, v in DEFAULTS.items()))
    try:
        options = _options(parser.parse_args(arguments).settings)
        shape, device, form = MODELS[options["model"]], options["device"], options["form"]
        tables = read_tables(shape, device, options["framework"], options["version"] or None)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw = Draw(options["steps"], options["seed"])
    fits = fit_forms(tables, shape, draw, track=_track)
    print(f"{shape.name} on {device}: relative error on {draw.num_steps // 5} held-out steps, mean / p95 (seed {draw.seed})")
    print(f"{'form':10}" + "".join(f"{kind:>18}" for kind in (*KINDS, "all")))
    for name, fit in fits.items():
        print(f"{name:10}" + "".join(f"{e['mean']:>10.2%} /{e['p95']:>6.1%}" for e in fit.errors.values()))
    out = Path(options["out"]) if options["out"] else None
    suffix = "" if form == "roofline" else f"_{form}"
    name = out.stem if out else f"{options['model']}_{device.split('_')[0]}{suffix}"
    given = [f"{key}={value}" for key, value in options.items() if key != "out" and value != DEFAULTS[key]]
    command = " ".join(["python -m lengthwise.engine.simulated.fit", *given])
    text = node(name, shape, device, tables, draw, fits[form], command)
    if out is None:
        print(text, end="")
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        print(f"error: cannot write out={out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


def _options(settings: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = dict(DEFAULTS)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in DEFAULTS:
            raise ValueError(f"'{setting}' is not one of {', '.join(f'{k}=' for k in DEFAULTS)}")
        if isinstance(DEFAULTS[key], int) and not value.isdecimal():
            raise ValueError(f"{key}={value} is not a whole number of 0 or more")
        options[key] = int(value) if isinstance(DEFAULTS[key], int) else value
    for key, known in (("model", MODELS), ("device", MEMORY_MIB), ("form", FORMS)):
        if options[key] not in known:
            raise ValueError(f"{key}={options[key]} is not one of {', '.join(known)}")
    if options["steps"] < 300:
        raise ValueError(f"steps={options['steps']}: a fit needs 300 or more")
    return options


def _track(batches: Sequence[Batch]) -> Iterable[Batch]:
    from rich.console import Console
    from rich.progress import track

    return track(batches, description="composing steps", console=Console(stderr=True), disable=not sys.stderr.isatty())


if __name__ == "__main__":
    sys.exit(main())
