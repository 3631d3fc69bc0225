"""Measured kernels: reads the tables of aiconfigurator-core and composes whole engine steps of a dense model from them.

A step is priced kernel by kernel: matrix products by the tokens of the step, the head by the rows that emit, attention by rows
and context, elementwise kernels by the bytes they move (no table has those: bytes / bandwidth + a launch, from the package's
description of the device). Host time, sampling and communication are not in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .table import interpolate

Curve = tuple[list[float], list[float]]  # knots ascending, seconds


@dataclass(frozen=True)
class ModelShape:
    """A dense Llama-like decoder in 2-byte numbers. Sizes in elements."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    num_params: float

    @property
    def products(self) -> list[tuple[int, int]]:
        """(n, k) of the matrix products of one layer: qkv, o, gate and up, down."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (q + 2 * kv, self.hidden),
            (self.hidden, q),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def layer_params(self) -> int:
        return self.num_layers * sum(n * k for n, k in self.products)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Per pair of a query and a key, all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def elementwise_bytes(self) -> int:
        """Bytes a token moves in a layer's fused elementwise kernels: two add + norm, rotary + KV write, gated activation."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 2 * (2 * 4 * self.hidden + 2 * (q + 2 * kv) + 3 * self.intermediate)


NUM_ELEMENTWISE = 4  # fused elementwise kernels in a layer


@dataclass(frozen=True)
class KernelTables:
    """Seconds of single kernels. products: (n, k) -> curve over tokens; decode: rows -> curve over context per row;
    prefill: sequences -> curve over their length. elementwise: (seconds per byte, seconds per launch)."""

    products: Mapping[tuple[int, int], Curve]
    decode: Mapping[int, Curve]
    prefill: Mapping[int, Curve]
    elementwise: tuple[float, float]
    peak_flops: float
    bandwidth: float
    source: Mapping[str, Any] = field(default_factory=dict)


class Batch(NamedTuple):
    """What one step computes: decoding rows, the tokens they attend in all, and chunks as (start, length)."""

    num_rows: int
    context: int
    chunks: tuple[tuple[int, int], ...]


class StepComposer:
    """Seconds of whole steps, composed from kernel tables. Shapes between two table shapes are interpolated; beyond the
    greatest one they grow in proportion (the head's 128,256 columns)."""

    def __init__(self, tables: KernelTables, shape: ModelShape) -> None:
        self.shape = shape
        self.tables = tables
        layer = [_product(tables.products, n, k) for n, k in shape.products]
        knots = sorted({m for curve in layer for m in curve[0]})
        per_byte, launch = tables.elementwise
        self._layers: Curve = (
            knots,
            [shape.num_layers * sum(interpolate(m, *curve) for curve in layer) for m in knots],
        )
        self._head = _product(tables.products, shape.vocab, shape.hidden)
        self._per_token = shape.num_layers * shape.elementwise_bytes * per_byte
        self._launches = shape.num_layers * NUM_ELEMENTWISE * launch

    def step(self, batch: Batch) -> float:
        """Seconds of a step. Rows and chunks both go through the head: a chunk's last token is projected in any case."""
        tokens = batch.num_rows + sum(length for _, length in batch.chunks)
        t = interpolate(tokens, *self._layers) + self._per_token * tokens + self._launches
        t += interpolate(batch.num_rows + len(batch.chunks), *self._head)
        if batch.num_rows:
            t += self.shape.num_layers * self._decode(batch.num_rows, batch.context / batch.num_rows)
        return t + self.shape.num_layers * self._prefill(batch.chunks)

    def _decode(self, num_rows: int, context: float) -> float:
        return sum(w * interpolate(context, *self.tables.decode[b]) for b, w in _bracket(self.tables.decode, num_rows))

    def _prefill(self, chunks: Sequence[tuple[int, int]]) -> float:
        """The tables hold whole prompts only. A chunk costs its share of the score matrix of the prompt so far, at least what
        its own tokens cost as a prompt, and at least what one row takes to read the context."""
        k, t = len(chunks), 0.0
        for start, length in chunks:
            total = start + length
            share = self._sequences(k, total) * (1 - (start / total) ** 2)
            t += max(share, self._sequences(k, length), self._decode(k, total) if start else 0.0) / k
        return t

    def _sequences(self, k: int, length: int) -> float:
        """Seconds of a layer's attention over k prompts of `length`: a power law between knots."""
        t = 0.0
        for b, w in _bracket(self.tables.prefill, k):
            xs, ys = self.tables.prefill[b]
            t += w * math.exp(interpolate(math.log(length), [math.log(x) for x in xs], [math.log(y) for y in ys]))
        return t


def _bracket(known: Mapping[int, Any] | Sequence[int], x: float) -> list[tuple[int, float]]:
    """[(key, weight)] that interpolates x between the known keys; in proportion beyond the greatest."""
    keys = sorted(known)
    i = bisect_right(keys, x)
    if i == 0:
        return [(keys[0], 1.0)]
    if keys[i - 1] == x:
        return [(keys[i - 1], 1.0)]
    if i == len(keys):
        return [(keys[-1], x / keys[-1])]
    low, high = keys[i - 1], keys[i]
    w = (x - low) / (high - low)
    return [(low, 1 - w), (high, w)]


def _product(products: Mapping[tuple[int, int], Curve], n: int, k: int) -> Curve:
    """The curve of an (n, k) product, interpolated over the table's shapes."""
    parts: list[tuple[Curve, float]] = []
    for near_k, wk in _bracket(sorted({key[1] for key in products}), k):
        for near_n, wn in _bracket(sorted(a for a, b in products if b == near_k), n):
            parts.append((products[near_n, near_k], wk * wn))
    knots = sorted({m for curve, _ in parts for m in curve[0]})
    return knots, [sum(w * interpolate(m, *curve) for curve, w in parts) for m in knots]


def read_tables(shape: ModelShape, device: str, framework: str = "vllm", version: str | None = None) -> KernelTables:
    """The bf16 tables of `device` from the installed aiconfigurator-core; `version` None takes the newest there is.

    Raises ModuleNotFoundError without the package, ValueError for a device, framework, version or shape it does not hold.
    """
    from importlib import metadata, util
    from pathlib import Path

    spec = util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "kernel tables need the package aiconfigurator-core: install the extra `fit` (pip install 'lengthwise[fit]')"
        )
    import pandas as pd
    import yaml  # type: ignore[import-untyped]

    systems = Path(spec.origin).parent / "systems"
    data = systems / "data"
    devices = sorted(p.name for p in data.iterdir() if (systems / f"{p.name}.yaml").is_file())
    if device not in devices:
        raise ValueError(f"device={device} is not in aiconfigurator-core; it has {', '.join(devices)}")
    found = {kind: _versions(data / device / kind / framework) for kind in ("gemm", "attention")}
    both = sorted(set(found["gemm"]) & set(found["attention"]), key=lambda v: [int(x) for x in v.split(".") if x.isdigit()])
    if not both or (version is not None and version not in both):
        raise ValueError(f"{device} has no gemm and attention tables for {framework} {version or ''}; versions: {both}")
    version = version or both[-1]

    def table(kind: str, name: str) -> Any:
        return pd.read_parquet(data / device / kind / framework / version / f"{name}_perf.parquet")

    gemm = table("gemm", "gemm")
    gemm = gemm[gemm.gemm_dtype == "bfloat16"]
    products = {(int(n), int(k)): _curve(part, "m") for (n, k), part in gemm.groupby(["n", "k"])}
    attention: dict[str, dict[int, Curve]] = {}
    for name, x, offset in (("generation", "step", 1), ("context", "isl", 0)):
        rows = table("attention", f"{name}_attention")
        keep = (rows.num_heads == shape.num_heads) & (rows.num_key_value_heads == shape.num_kv_heads)
        keep &= (rows.head_dim == shape.head_dim) & (rows.attn_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16")
        if "window_size" in rows:
            keep &= rows.window_size == 0
        attention[name] = {int(b): _curve(part, x, offset) for b, part in rows[keep].groupby("batch_size")}
        if not attention[name]:
            raise ValueError(f"{device} {framework} {version} has no {name} attention for the heads of {shape.name}")
    gpu = yaml.safe_load((systems / f"{device}.yaml").read_text())["gpu"]
    bandwidth = float(gpu["mem_bw"])
    return KernelTables(
        products=products,
        decode=attention["generation"],
        prefill=attention["context"],
        elementwise=(1 / (bandwidth * gpu["mem_bw_empirical_scaling_factor"]), gpu["mem_empirical_constant_latency"]),
        peak_flops=float(gpu["bfloat16_tc_flops"]),
        bandwidth=bandwidth,
        source={
            "package": f"aiconfigurator-core {metadata.version('aiconfigurator-core')}",
            "engine": f"{framework} {version}",
            "device": str(gemm.device.iloc[0]),
            "tables": ["gemm_perf", "generation_attention_perf", "context_attention_perf"],
        },
    )


def _versions(folder: Any) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def _curve(frame: Any, x: str, offset: int = 0) -> Curve:
    """Medians by knot: duplicates are repeats. Milliseconds become seconds."""
    medians = frame.groupby(x).latency.median()
    return [float(v) + offset for v in medians.index], [float(v) * 1e-3 for v in medians]
