"""Hardware: a model on a device, with the cost model that prices its steps and the KV pool that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cost import CostModel


@dataclass(frozen=True)
class Hardware:
    """One model on one device (or one tensor-parallel group). Bytes throughout.

    provenance: data, form, held_out_error, range, validated: what the coefficients rest on, printed with results.
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

    def kv_pool_tokens(self) -> int:
        """(memory x memory_share - weights - activations) / bytes per token. Raises ValueError when nothing is left."""
        left = self.memory * self.memory_share - self.weights - self.activations
        if left < self.kv_bytes_per_token:
            raise ValueError(
                f"{self.name}: {self.memory:.3g} B x {self.memory_share} - weights {self.weights:.3g} - activations "
                f"{self.activations:.3g} leaves no KV memory"
            )
        return int(left / self.kv_bytes_per_token)
