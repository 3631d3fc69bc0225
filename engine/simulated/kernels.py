"""Measured kernels: composes whole engine steps of a dense model from tables of single kernels.

A step is priced kernel by kernel: matrix products by the tokens of the step, the head by the rows that emit, attention by rows
and context, elementwise kernels by the bytes they move (no table has those: bytes / bandwidth + a launch, from the package's
description of the device), and in a tensor-parallel group two all-reduces a layer by the numbers they add up. A group takes as
long as one of its ranks. Host time, sampling, the embedding's all-reduce and the gathering of logits are not in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .shapes import ModelShape
from .table import interpolate

Curve = tuple[list[float], list[float]]  # knots ascending, seconds

NUM_ELEMENTWISE = 4  # fused elementwise kernels in a layer
NUM_ALL_REDUCES = 2  # in a layer: after attention's o and after down


@dataclass(frozen=True)
class KernelTables:
    """Seconds of single kernels. products: (n, k) -> curve over tokens; decode: rows -> curve over context per row;
    prefill: sequences -> curve over their length; both for the heads of one rank. elementwise: (seconds per byte, seconds per
    launch). all_reduce: curve over 2-byte numbers; None for one device. peak_flops, bandwidth: of one device."""

    products: Mapping[tuple[int, int], Curve]
    decode: Mapping[int, Curve]
    prefill: Mapping[int, Curve]
    elementwise: tuple[float, float]
    peak_flops: float
    bandwidth: float
    source: Mapping[str, Any] = field(default_factory=dict)
    all_reduce: Curve | None = None


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
        self._head = _product(tables.products, *shape.head)
        self._per_token = shape.num_layers * shape.elementwise_bytes * per_byte
        self._launches = shape.num_layers * NUM_ELEMENTWISE * launch
        self._log_prefill = {
            b: ([math.log(x) for x in xs], [math.log(y) for y in ys]) for b, (xs, ys) in tables.prefill.items()
        }
        if shape.tp > 1 and tables.all_reduce is None:
            raise ValueError(f"tp={shape.tp} of {shape.name} needs a table of all-reduces")
        self._all_reduce = tables.all_reduce if shape.tp > 1 else None

    def step(self, batch: Batch) -> float:
        """Seconds of a step. Rows and chunks both go through the head: a chunk's last token is projected in any case."""
        tokens = batch.num_rows + sum(length for _, length in batch.chunks)
        t = interpolate(tokens, *self._layers) + self._per_token * tokens + self._launches
        t += interpolate(batch.num_rows + len(batch.chunks), *self._head)
        if self._all_reduce is not None:
            t += NUM_ALL_REDUCES * self.shape.num_layers * interpolate(tokens * self.shape.hidden, *self._all_reduce)
        if batch.num_rows:
            t += self.shape.num_layers * self._decode(batch.num_rows, batch.context / batch.num_rows)
        return t + self.shape.num_layers * self._prefill(batch.chunks)

    def _decode(self, num_rows: int, context: float) -> float:
        return sum(w * interpolate(context, *self.tables.decode[b]) for b, w in bracket(self.tables.decode, num_rows))

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
        for b, w in bracket(self.tables.prefill, k):
            t += w * math.exp(interpolate(math.log(length), *self._log_prefill[b]))
        return t


def bracket(known: Mapping[int, Any] | Sequence[int], x: float) -> list[tuple[int, float]]:
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
    for near_k, wk in bracket(sorted({key[1] for key in products}), k):
        for near_n, wn in bracket(sorted(a for a, b in products if b == near_k), n):
            parts.append((products[near_n, near_k], wk * wn))
    knots = sorted({m for curve, _ in parts for m in curve[0]})
    return knots, [sum(w * interpolate(m, *curve) for curve, w in parts) for m in knots]
