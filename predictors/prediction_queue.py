"""PredictionQueue: the predictor as a server whose arrivals are not known beforehand; the same rule as `LatencyModel`."""

from __future__ import annotations

import math
from collections import deque

from .latency import LatencyModel


class PredictionQueue:
    """Tell it of each arrival, in order of time, and ask it what is ready. With all arrivals known beforehand
    `LatencyModel.ready_times` says the same."""

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._waiting: deque[tuple[float, int]] = deque()  # (arrival, rid) of those in no batch yet
        self._made: deque[tuple[float, int]] = deque()  # (ready, rid) of those in a batch
        self._free = -math.inf

    def add(self, rid: int, arrival: float) -> None:
        """Raises ValueError on an arrival (s) before the last one told."""
        if self._waiting and arrival < self._waiting[-1][0]:
            raise ValueError(f"request {rid} arrives at {arrival} s, before the last one told, {self._waiting[-1][0]} s")
        self._waiting.append((arrival, rid))

    def next(self) -> float:
        """A time (s) at or before which nothing more is ready than is known now; infinity when nobody waits."""
        if self._made:
            return self._made[0][0]
        if self._waiting:
            model = self._model
            return self._start() + model.per_batch + model.per_request
        return math.inf

    def pop(self, now: float) -> list[tuple[float, int]]:
        """(ready, rid) of every prediction ready at or before `now` (s), once each; all arrivals up to `now` must be told."""
        model = self._model
        while self._waiting and (start := self._start()) <= now:
            batch: list[int] = []
            while self._waiting and self._waiting[0][0] <= start and len(batch) < model.max_batch:
                batch.append(self._waiting.popleft()[1])
            self._free = start + model.per_batch + model.per_request * len(batch)
            self._made.extend((self._free, rid) for rid in batch)
        ready = []
        while self._made and self._made[0][0] <= now:
            ready.append(self._made.popleft())
        return ready

    def _start(self) -> float:
        """When the next batch starts."""
        return max(self._free, self._waiting[0][0] + self._model.window)
