"""Burst arrivals: everything at time 0, or groups at equal distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .renewal import Floats, check_rate


@dataclass(frozen=True)
class Burst:
    """size: requests per group; None puts all of them at 0, whatever the rate."""

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"burst size {self.size} must be at least 1")

    @property
    def keeps_times(self) -> bool:
        """Whether no rate need be given."""
        return self.size is None

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s): group k at k * size / rate; `rng` is not used."""
        if self.size is None:
            return np.zeros(n)
        return (np.arange(n) // self.size) * self.size / check_rate(rate)

    def describe(self) -> dict[str, Any]:
        return {"process": "burst", "size": self.size if self.size is not None else "all"}
