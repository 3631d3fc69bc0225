"""Staged arrivals: Poisson with a rate that changes in steps, such as 5/s for a minute, then 10/s for a minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .renewal import Floats, check_rate


@dataclass(frozen=True)
class Staged:
    """stages: mappings with `rate` (requests/s, >= 0) and `duration` (s, > 0), in order; after the last the first returns."""

    stages: Sequence[Mapping[str, float]]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("no stages given")
        for i, stage in enumerate(self.stages):
            if set(stage) != {"rate", "duration"}:
                raise ValueError(f"stage {i} has {sorted(stage)}, it needs rate and duration")
            if not 0 <= stage["rate"] < float("inf") or not 0 < stage["duration"] < float("inf"):
                raise ValueError(f"stage {i}: rate {stage['rate']} must be >= 0 and duration {stage['duration']} above 0")
        if not any(stage["rate"] > 0 for stage in self.stages):
            raise ValueError("no stage has a rate above 0")

    @property
    def keeps_times(self) -> bool:
        """Whether no rate need be given: the stages state theirs."""
        return True

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s). rate: mean rate over a round of stages; None keeps the rates as they are stated.

        Another rate scales the stages' rates, not their durations, and keeps the random numbers.
        """
        duration = np.array([stage["duration"] for stage in self.stages], dtype=np.float64)
        per_second = np.array([stage["rate"] for stage in self.stages], dtype=np.float64)
        if rate is not None:
            per_second = per_second * (check_rate(rate) * duration.sum() / (per_second * duration).sum())
        # Unit-rate Poisson points on the axis of expected arrivals, mapped back to time stage by stage.
        ends = np.concatenate(([0.0], np.cumsum(duration * per_second)))
        rounds, within = np.divmod(np.cumsum(rng.standard_exponential(n)), ends[-1])
        last = np.flatnonzero(per_second)[-1]  # rounding may put a point on the very end of the round
        stage = np.minimum(np.searchsorted(ends, within, side="right") - 1, last)
        starts = np.concatenate(([0.0], np.cumsum(duration)))
        inside = np.minimum((within - ends[stage]) / per_second[stage], duration[stage])
        return np.maximum.accumulate(rounds * starts[-1] + starts[stage] + inside)

    def describe(self) -> dict[str, Any]:
        return {"process": "staged poisson", "stages": [dict(stage) for stage in self.stages]}
