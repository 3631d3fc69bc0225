"""Replay: the arrival times a trace recorded, in file order, as they were or faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..dataset import Dataset
from .renewal import Floats, check_rate
from .summary import describe_arrivals


@dataclass(frozen=True)
class Replay:
    """speedup: 2 halves every gap and doubles the rate. rescale: stretch the trace to the rate asked for, instead.

    Without `rescale` the trace's own rate holds and no other may be asked for. The achieved rate stands in the workload's
    notes. recorded: arrival times (s) from 0, set by `of`.
    """

    speedup: float = 1.0
    rescale: bool = False
    recorded: Floats | None = None

    def __post_init__(self) -> None:
        if not 0 < self.speedup < float("inf"):
            raise ValueError(f"speedup {self.speedup} must be a finite number above 0")
        if self.rescale and self.speedup != 1.0:
            raise ValueError(f"rescale sets the rate, so speedup {self.speedup} would have no effect: give one of them")

    @property
    def keeps_times(self) -> bool:
        """Whether it has a rate of its own, so that none need be given."""
        return not self.rescale

    def of(self, dataset: Dataset) -> Replay:
        """The replay of this dataset's arrivals. Raises ValueError when it has none."""
        if dataset.arrival is None:
            raise ValueError(f"dataset {dataset.name} has no arrival times to replay")
        return replace(self, recorded=dataset.arrival)

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """The first n recorded times (s), from 0; `rng` is not used."""
        if self.recorded is None or n > len(self.recorded):
            have = 0 if self.recorded is None else len(self.recorded)
            raise ValueError(f"the trace has {have} arrivals, {n} are asked for")
        times: Floats = self.recorded[:n] - self.recorded[0]
        if not self.rescale:
            if rate is not None:
                raise ValueError(f"a replay keeps the trace's own rate, {rate} requests/s cannot be set: use rescale=true")
            times = times / self.speedup
            return times
        achieved = describe_arrivals(times)["rate"]
        if achieved is None:
            raise ValueError(f"{n} arrivals over {times[-1]} s have no rate to rescale")
        times = times * (achieved / check_rate(rate))
        return times

    def describe(self) -> dict[str, Any]:
        return {"process": "replay, rescaled" if self.rescale else "replay", "speedup": self.speedup}
