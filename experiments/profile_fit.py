"""Fit a cost model to timed steps, and write it as a hardware node that says what engine and machine it holds for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.engine.simulated import node
from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.cost import CostModel, HostOverhead
from lengthwise.engine.simulated.forms import Arguments, fit_affine, fit_table, short, solve
from lengthwise.engine.simulated.steps import KINDS, Draw, Steps, relative_errors
from lengthwise.engine.simulated.table import Table

from .profile import Timed

FORMS: dict[str, Callable[..., CostModel]] = {"affine": Affine, "table": Table}
LEAST_STATES = 30
Errors = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Fitted:
    """A fitted form: its constructor's arguments (the host's aside), and its relative errors on states that nothing was fitted
    on, of whole turns of the step loop. others: the same errors of the forms that were not chosen."""

    form: str
    arguments: Arguments
    host: HostOverhead
    cost: CostModel
    errors: Errors
    bias: float
    num_train: int
    num_test: int
    others: Mapping[str, Errors]


def fit(timed: Timed, draw: Draw, form: str = "auto") -> Fitted:
    """Fit `form`, or each and keep the one with the least mean error, on four fifths of the states; the corners of the range
    are always among them. bias: mean of priced / measured - 1 on the held-out fifth. Raises ValueError for another form, or too
    few states."""
    if form != "auto" and form not in FORMS:
        raise ValueError(f"form={form!r} is not auto, {' or '.join(FORMS)}")
    n = len(timed.batches)
    if draw.num_steps < LEAST_STATES:
        raise ValueError(f"states={draw.num_steps}: a fit needs {LEAST_STATES} or more")
    held = np.concatenate((np.zeros(n - draw.num_steps, dtype=bool), draw.held_out()))
    train = [batch for batch, out in zip(timed.batches, held, strict=True) if not out]
    test = [batch for batch, out in zip(timed.batches, held, strict=True) if out]
    steps = Steps.of(train, timed.forward[~held])
    host = _fit_host(steps, timed.host[~held], timed.total[~held])
    fits: dict[str, tuple[Arguments, CostModel, Errors]] = {}
    for name in FORMS if form == "auto" else (form,):
        arguments = fit_affine(steps) if name == "affine" else fit_table(steps, *_knots(draw))
        arguments["fitted_range"] = draw.fitted_range
        cost = FORMS[name](**arguments, host=host)
        fits[name] = arguments, cost, relative_errors(cost, test, timed.total[held])
    best = min(fits, key=lambda name: fits[name][2]["all"]["mean"])
    arguments, cost, errors = fits[best]
    return Fitted(
        best, arguments, host, cost, errors, _bias(cost, test, timed.total[held]), len(train), len(test),
        {name: found[2] for name, found in fits.items() if name != best},
    )  # fmt: skip


def _fit_host(steps: Steps, host: np.ndarray, total: np.ndarray) -> HostOverhead:
    """Errors count against the whole step."""
    (step, row), _ = solve([np.ones_like(total), steps.rows + steps.chunks], host, total)
    return HostOverhead(short(step), short(row))


def _bias(cost: CostModel, batches: Sequence[Any], total: np.ndarray) -> float:
    from lengthwise.engine.simulated.steps import price

    return float(np.mean([price(cost, batch) for batch in batches] / total) - 1.0)


def _knots(draw: Draw) -> tuple[list[int], list[int], list[int]]:
    """Knots of tokens a step, rows, and context a row, up to what was timed. Where matrices are small a machine changes its
    ways often, so tokens have two knots in every doubling; what a row attends takes nearly in proportion."""
    tokens = sorted({*_powers(1, 2, draw.rows + draw.prefill_tokens), *_powers(3, 2, draw.rows + draw.prefill_tokens)})
    return tokens, _powers(1, 2, draw.rows), [1, *_powers(256, 4, draw.context_per_row)]


def _powers(low: int, factor: int, high: int) -> list[int]:
    """low, low x factor, ... below `high`, and `high`; `low` alone where it is not below."""
    knots = [low]
    while knots[-1] * factor < high:
        knots.append(knots[-1] * factor)
    return [*knots, high] if high > low else knots


def hardware_text(name: str, engine: Mapping[str, Any], timed: Timed, fitted: Fitted, draw: Draw, command: str) -> str:
    """The text of a hardware node. engine: `facts`, and weight_bytes, kv_bytes_per_token and pool_tokens beside."""
    pool, each, weights = engine["pool_tokens"], engine["kv_bytes_per_token"], engine["weight_bytes"]
    facts = {key: value for key, value in engine.items() if key not in ("pool_tokens", "kv_bytes_per_token", "weight_bytes")}
    machine = engine["machine"]
    served = f"{engine['model']}, {engine['dtype']}, on {machine}"
    lines = [
        f"# Written by: {command}",
        "_target_: lengthwise.engine.simulated.hardware.Hardware",
        "_convert_: all",
        f"name: {name}",
        f"model: {_quoted(served)}",
        f"memory: {weights + pool * each}  # bytes: the weights, and the KV pool of {pool} tokens that the engine had",
        "memory_share: 1.0",
        f"weights: {weights}",
        "activations: 0  # taken off already",
        f"kv_bytes_per_token: {each}",
        *node.cost_lines(fitted.cost, fitted.arguments),
        "  host:  # measured: planning, input arrays, sampling, booking",
        "    _target_: lengthwise.engine.simulated.cost.HostOverhead",
        f"    step: {node.number(fitted.host.step)}",
        f"    row: {node.number(fitted.host.row)}",
        "provenance:",
        f"  data: {_quoted(f'steps of the native engine, measured on {machine}')}",
        f"  form: {fitted.form}",
        f"  steps: {len(timed.batches)} states, {timed.num_samples} steps each, medians; seed {draw.seed}; "
        f"{fitted.num_test} states held out",
        f"  spread: {timed.spread:.4f}  # (p90 - p10) / median of the steps of one state, median over states",
        f"  host_share: {float((timed.host / timed.total).mean()):.4f}  # of a step, mean over states",
        f"  bias: {fitted.bias:.4f}  # mean of priced / measured - 1, held out",
        "  held_out_error:  # relative, of whole steps",
        *(f"    {kind}: {{mean: {e['mean']}, p95: {e['p95']}}}" for kind, e in fitted.errors.items()),
        f"  range: up to {draw.rows} rows, {draw.context_per_row} tokens a row, {draw.context} tokens in all, "
        f"{draw.prefill_tokens} prefill tokens a step",
        "  validated: against single steps only (`lengthwise validate` compares whole runs)",
        "  swap_bandwidth: assumed, not measured",
        "  profile:  # what it holds for",
        *(f"    {key}: {_quoted(value)}" for key, value in facts.items()),
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: Any) -> str:
    """A YAML scalar: JSON is YAML."""
    return json.dumps(value)


def table(fitted: Fitted) -> list[str]:
    """Lines that say how well each form fits."""
    head = f"{'form':10}" + "".join(f"{kind:>18}" for kind in (*KINDS, "all"))
    rows = {fitted.form: fitted.errors, **fitted.others}
    cells = {name: [f"{e['mean']:>10.2%} /{e['p95']:>6.1%}" for e in errors.values()] for name, errors in rows.items()}
    return [head, *(f"{name:10}" + "".join(row) for name, row in cells.items())]
