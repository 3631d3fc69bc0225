"""Borrowed arrivals: the gaps of a real trace, in their order, at any rate, for the requests of another workload."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..dataset import Dataset
from ..nodes import load_dataset
from .renewal import Floats, renewal_times


@dataclass(frozen=True)
class Borrowed:
    """workload: a Dataset with arrival times, or the node of one. normalised: exactly n arrivals within n / rate seconds.

    The seed draws where in the trace to begin; after its last gap comes its first. So bursts and silences stay as they were,
    and no gap of these n comes twice before all have come (arrivals that a run asks for beyond n begin elsewhere). Seeds see
    other parts only where n is well below the trace's length; else the same bursts, met by other requests. Gaps are scaled by
    one factor: the trace's mean gap becomes that of the rate. Raises FileNotFoundError where the trace's file is not there,
    ValueError where the workload has no arrival times, or all are at once.
    """

    workload: Any = field(repr=False)
    normalised: bool = False

    def __post_init__(self) -> None:
        times = self._dataset.arrival
        if times is None or len(times) < 2 or not times[-1] > times[0]:
            raise ValueError(f"dataset {self._dataset.name} has no two arrival times to take gaps from")

    @cached_property
    def _dataset(self) -> Dataset:
        return load_dataset({"workload": self.workload})

    @cached_property
    def _gaps(self) -> Floats:
        """In the order of the trace, of mean one."""
        times = self._dataset.arrival
        assert times is not None  # as was looked at when this was made
        gaps: Floats = np.diff(times)
        return np.asarray(gaps / gaps.mean())

    def times(self, n: int, rate: float | None, rng: np.random.Generator) -> Floats:
        """n arrival times (s) at `rate` requests/s; at another rate the same pattern, scaled."""
        start = int(rng.integers(len(self._gaps)))
        gaps = np.take(self._gaps, np.arange(start, start + n + 1), mode="wrap")
        return renewal_times(gaps, rate, self.normalised)

    def describe(self) -> dict[str, Any]:
        return {
            "process": "borrowed, normalised" if self.normalised else "borrowed",
            "trace": self._dataset.name,
            "num_gaps": len(self._gaps),
            "cv": float(self._gaps.std()),
        }
