"""The text of a conf/hardware node: the same numbers give the same bytes, and every YAML reader takes them for numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .cost import CostModel
from .device import Device
from .shapes import ModelShape

ACTIVATIONS = 2.0e9  # bytes a device: activations of 2,048 tokens, float32 logits of 256 rows, workspaces, CUDA context, graphs
MEMORY_SHARE = 0.9  # as Hardware's


def pool(shape: ModelShape, device: Device) -> float:
    """Tokens of KV that fit beside the weights, in all of the group's memory, as Hardware counts it; may be negative."""
    left = shape.tp * (device.memory * MEMORY_SHARE - ACTIVATIONS) - 2 * shape.num_params
    return left / shape.kv_bytes_per_token


def header(name: str, shape: ModelShape, device: Device, called: str, command: str) -> list[str]:
    """The lines above `cost`: what is served on what. All bytes are of the whole tensor-parallel group: its memory, one copy
    of the weights, activations of every rank, a token's KV on all ranks together."""
    tp, times = shape.tp, "" if shape.tp == 1 else f"{shape.tp} x "
    estimate = "an estimate" if tp == 1 else f"an estimate, {number(ACTIVATIONS)} a device"
    return [
        f"# Written by: {command}",
        "_target_: lengthwise.engine.simulated.hardware.Hardware",
        "_convert_: all",
        f"name: {name}",
        f"model: {shape.name}, bf16, {tp} x {called}",
        *([f"num_gpus: {tp}"] if tp > 1 else []),
        f"memory: {tp * device.memory}  # bytes: {times or 'the '}{device.memory_mib} MiB that nvidia-smi reports, "
        f"sold as {device.sold}",
        f"weights: {number(2 * shape.num_params)}  # bytes: {shape.num_params:.3g} parameters x 2",
        f"activations: {number(tp * ACTIVATIONS)}  # bytes, {estimate}: token_budget 2048, 256 rows of logits, CUDA graphs",
        f"kv_bytes_per_token: {shape.kv_bytes_per_token}",
    ]


def cost_lines(cost: CostModel, arguments: Mapping[str, Any]) -> list[str]:
    target = type(cost)
    return ["cost:", f"  _target_: {target.__module__}.{target.__name__}", *mapping(arguments, "  ")]


def work_lines(shape: ModelShape, device: Device) -> list[str]:
    """The nested node of what steps compute and move, for cost models that do not hold it themselves; 4 spaces in."""
    values = {
        "flops_per_token": 2 * shape.layer_params,
        "weight_bytes": 2 * (shape.layer_params + shape.head_params),
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "attention_flops": shape.attention_flops,
        "peak_flops": shape.tp * device.peak_flops,
        "bandwidth": shape.tp * device.bandwidth,
    }
    return ["  work:  # for utilisation", "    _target_: lengthwise.engine.simulated.work.Work", *mapping(values, "    ")]


def mapping(values: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}: {{{', '.join(f'{k}: {number(v)}' for k, v in value.items())}}}"
        elif isinstance(value, list) and isinstance(value[0], list):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - [{', '.join(number(v) for v in line)}]" for line in value)
        elif isinstance(value, list):
            yield f"{indent}{key}: [{', '.join(number(v) for v in value)}]"
        else:
            yield f"{indent}{key}: {number(value)}"


def number(value: float) -> str:
    """A number that every YAML reader takes for one: 1.0e-05, not 1e-05."""
    mantissa, e, exponent = f"{value:.12g}".partition("e")
    return f"{mantissa}.0{e}{exponent}" if e and "." not in mantissa else f"{mantissa}{e}{exponent}"
