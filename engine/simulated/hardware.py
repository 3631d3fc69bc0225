"""Hardware: a model on a device, with the cost model that prices its steps and the KV pool that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.sched import Swap
from lengthwise.sched.plan import DEVICE

from .cost import CostModel

SWAP_BANDWIDTH = {"cpu": 25e9, "disk": 3e9}


@dataclass(frozen=True)
class Hardware:
    """One model on one device, or on one tensor-parallel group of `num_gpus`, whose memory, KV and rates are then counted as
    one. Bytes throughout.

    provenance: data, form, held_out_error, range, validated: what the coefficients rest on, printed with results.
    swap_bandwidth: effective bytes/s between one device and each swap tier; the devices of a group copy at the same time. The
    defaults are assumed, not measured: a PCIe Gen4 x16 link (31.5e9 by the standard, some 25e9 in practice) and an NVMe drive.
    """

    name: str
    model: str
    memory: float
    weights: float
    activations: float
    kv_bytes_per_token: float
    cost: CostModel
    provenance: Mapping[str, Any]
    memory_share: float = 0.9
    swap_bandwidth: Mapping[str, float] = field(default_factory=lambda: dict(SWAP_BANDWIDTH))
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if bad := {name: x for name, x in self.swap_bandwidth.items() if not x > 0}:
            raise ValueError(f"{self.name}: swap_bandwidth {bad} must be > 0 bytes/s")
        if self.num_gpus < 1:
            raise ValueError(f"{self.name}: num_gpus {self.num_gpus}, the least is 1")

    def kv_pool_tokens(self) -> int:
        """(memory x memory_share - weights - activations) / bytes per token. Raises ValueError when nothing is left."""
        left = self.memory * self.memory_share - self.weights - self.activations
        if left < self.kv_bytes_per_token:
            raise ValueError(
                f"{self.name}: {self.memory:.3g} B x {self.memory_share} - weights {self.weights:.3g} - activations "
                f"{self.activations:.3g} leaves no KV memory"
            )
        return int(left / self.kv_bytes_per_token)

    def swap_seconds(self, swaps: Sequence[Swap], block_size: float) -> float:
        """Seconds of the copies, one after the other: blocks x block_size (tokens of all layers: KVCache.block_tokens) x bytes
        per token / (bandwidth x devices). Raises ValueError for a tier without a bandwidth."""
        total = 0.0
        for _, num_blocks, source, target, _ in swaps:
            tier = source if target == DEVICE else target
            if tier not in self.swap_bandwidth:
                raise ValueError(f"{self.name} has no bandwidth for swap tier {tier}; it has {dict(self.swap_bandwidth)}")
            total += num_blocks * block_size * self.kv_bytes_per_token / (self.swap_bandwidth[tier] * self.num_gpus)
        return total
