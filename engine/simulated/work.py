"""Work: the operations and bytes that steps take by the model's sizes alone, beside what the device could do.

Counted: every token through the layers, every pair of a query and a key; the weights read once a step, the KV of every token
that a decoding row attends, and the KV that is written. Not counted: the head's products, activations, padding rows, what a
chunk reads of its own prompt's KV, communication. So both are lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .check import not_negative, positive

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """flops_per_token: of the layers' products. attention_flops: per pair of a query and a key. weight_bytes: read once a step.
    kv_bytes_per_token: of all layers. peak_flops (1/s), bandwidth (bytes/s): of the device, or of the whole group."""

    flops_per_token: float
    weight_bytes: float
    kv_bytes_per_token: float
    attention_flops: float
    peak_flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        positive(peak_flops=self.peak_flops, bandwidth=self.bandwidth)
        not_negative(
            flops_per_token=self.flops_per_token, weight_bytes=self.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token, attention_flops=self.attention_flops,
        )  # fmt: skip

    def flops(self, rows: Any, context: Any, prefill_tokens: Any, prefill_pairs: Any, num_steps: Any) -> Floats:
        """(N,) operations of N plans, all their steps. rows: decoding; context: tokens they attend in the first step, which
        grows by `rows` in each further one; prefill_pairs: sum over chunks of length x (start + length / 2)."""
        rows, prefill, steps = _floats(rows), _floats(prefill_tokens), _floats(num_steps)
        pairs = _attended(rows, _floats(context), steps) + _floats(prefill_pairs)
        return np.asarray(self.flops_per_token * (rows * steps + prefill) + self.attention_flops * pairs)

    def bytes_moved(self, rows: Any, context: Any, prefill_tokens: Any, num_steps: Any) -> Floats:
        """(N,) bytes that N plans move between memory and the device, all their steps; arguments as for `flops`."""
        rows, prefill, steps = _floats(rows), _floats(prefill_tokens), _floats(num_steps)
        tokens = _attended(rows, _floats(context), steps) + rows * steps + prefill  # read, and written
        return np.asarray(self.weight_bytes * steps + self.kv_bytes_per_token * tokens)


def _floats(column: Any) -> Floats:
    return np.asarray(column, dtype=np.float64)  # recorded as 32-bit integers, whose products would overflow


def _attended(rows: Floats, context: Floats, steps: Floats) -> Floats:
    """Tokens attended over all steps: context, context + rows, ..."""
    return context * steps + rows * (steps * (steps - 1.0) / 2.0)
