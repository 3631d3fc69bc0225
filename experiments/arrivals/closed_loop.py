"""Closed loop: N users, each of whom asks, waits for the answer, thinks, and asks again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dataset import Dataset, Ints, Workload
from .pause import Pause


@dataclass(frozen=True)
class ClosedLoop:
    """users: how many; each begins with a pause, then takes the next request in the order of the draw. think: its pauses.

    The rate follows from the answers, so none may be asked for. All requests count, those of the end too, when users who
    find no further request have left.
    """

    users: int
    think: Pause = field(default_factory=lambda: Pause(0.0))

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(f"users {self.users} must be at least 1")

    @property
    def keeps_times(self) -> bool:
        """It has a rate of its own."""
        return True

    def lay(self, dataset: Dataset, rows: Ints, rate: float | None, rng: np.random.Generator) -> Workload:
        """The workload of these rows (N,). Raises ValueError when a rate is asked for."""
        if rate is not None:
            raise ValueError(
                f"a closed loop has the rate its users come to, {rate:g} requests/s cannot be set: load=null rate=null"
            )
        n = len(rows)
        gap = self.think.times(n, rng)
        first = np.sort(gap[: self.users])
        gap[: len(first)] = first
        arrival = np.concatenate((first, np.full(n - len(first), first[-1])))
        return Workload(dataset, rows, arrival, users=self.users, gap=gap)

    def describe(self) -> dict[str, Any]:
        return {"process": "closed loop", "users": self.users, "think": self.think.describe()}
