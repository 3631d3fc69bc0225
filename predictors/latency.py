"""LatencyModel: a predictor is a server too, and its time is charged to the requests that wait for it.

One FIFO server: a batch opens when its first member is there, starts when the server is free and the window after that
member has passed, takes what has arrived by then, and lasts per_batch + per_request x size. All its members are ready at its
end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class LatencyModel:
    """Seconds per batch and per request, the window in seconds that a batch waits for company, and the most a batch takes."""

    per_batch: float
    per_request: float
    window: float = 0.0
    max_batch: int = 64

    def __post_init__(self) -> None:
        for name in ("per_batch", "per_request", "window"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}={value}: a finite number of seconds >= 0 is needed")
        if self.max_batch < 1:
            raise ValueError(f"max_batch={self.max_batch}: at least 1")

    def ready_times(self, arrival: ArrayLike) -> NDArray[np.float64]:
        """When each prediction is there: arrivals (N,) in s, not decreasing -> (N,) in s. O(N).

        Raises ValueError on unsorted or infinite arrivals.
        """
        times = np.asarray(arrival, dtype=np.float64)
        if times.size and not (np.all(np.isfinite(times)) and np.all(np.diff(times) >= 0.0)):
            raise ValueError("arrivals must be finite and not decreasing")
        at = times.tolist()
        n, most = len(at), self.max_batch
        ready = [0.0] * n
        free = -math.inf
        i = 0
        while i < n:
            start = max(free, at[i] + self.window)
            j = i
            end_of_batch = min(i + most, n)
            while j < end_of_batch and at[j] <= start:
                j += 1
            free = start + self.per_batch + self.per_request * (j - i)
            ready[i:j] = [free] * (j - i)
            i = j
        return np.array(ready, dtype=np.float64)

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float | int]) -> LatencyModel:
        return cls(
            float(values["per_batch"]), float(values["per_request"]), float(values["window"]), int(values["max_batch"])
        )  # fmt: skip
