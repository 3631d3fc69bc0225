"""Replay: the arrival times a trace recorded, in file order, as they were or faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..dataset import Dataset, Workload
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
        # a trace begins with its first arrival; a saved workload has the times of the run's clock
        return replace(self, recorded=dataset.arrival if dataset.notes.get("saved") else dataset.arrival - dataset.arrival[0])

    def times(self, n: int, rate: float | None, rng: np.random.Generator, extra: int = 0) -> Floats:
        """The first n recorded times (s), from 0, and `extra` more; `rate` is that of the first n. `rng` is not used."""
        if self.recorded is None or n + extra > len(self.recorded):
            have = 0 if self.recorded is None else len(self.recorded)
            raise ValueError(f"the trace has {have} arrivals, {n + extra} are asked for")
        times: Floats = self.recorded[: n + extra]
        if not self.rescale:
            if rate is not None:
                raise ValueError(
                    f"a replay keeps the trace's own rate, {rate:g} requests/s cannot be set: load=null rate=null, "
                    "or rescale=true"
                )
            times = times / self.speedup
            return times
        achieved = describe_arrivals(times[:n])["rate"]
        if achieved is None:
            raise ValueError(f"{n} arrivals over {times[n - 1]} s have no rate to rescale")
        times = times * (achieved / check_rate(rate))
        return times

    def workload(self, dataset: Dataset, n: int, rate: float | None, rng: np.random.Generator, extra: int = 0) -> Workload:
        """The first n rows at their times, and `extra` more. Rows that waited for answers (`after`, `gap`, as a saved workload
        has them) do so again; the pauses are not sped up."""
        columns = dataset.columns
        after, gap, users = columns.get("after"), columns.get("gap"), dataset.notes.get("users")
        rows = np.arange(n + extra, dtype=np.int64)
        if after is None and users is None:
            return Workload(dataset, rows, self.times(n, rate, rng, extra))
        if self.rescale or self.speedup != 1.0:
            raise ValueError(f"requests of {dataset.name} wait for answers: they cannot be sped up or rescaled")
        if gap is None:
            raise ValueError(f"requests of {dataset.name} wait for answers and have no column `gap`")
        waits_for = None if after is None else np.asarray(after, dtype=np.int64)[rows]
        times = self.times(n, rate, rng, extra)
        return Workload(dataset, rows, times, after=waits_for, gap=np.asarray(gap, np.float64)[rows], users=users)

    def describe(self) -> dict[str, Any]:
        return {"process": "replay, rescaled" if self.rescale else "replay", "speedup": self.speedup}
