"""SessionSource: requests that wait for answers: turns of a conversation, calls of an agent's program, users in a closed loop.

A turn arrives `gap` seconds after the one before it has ended, however it ended: a person who was refused asks the next
question all the same, so that every policy is asked the same questions. Only when they arrive depends on the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.prediction_queue import PredictionQueue
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import INF, Event, EventKind, LengthDistribution, Request

from .births import Nursery
from .dataset import Workload


class SessionSource:
    """Events of a workload whose requests wait for others (`Workload.after`) or for a free user (`Workload.users`).

    predictions: row i is request i's. latency: None for predictions that are there at once. A policy that needs predictions
    lets a request wait for its own. After the run `arrival` and `ready` (N,) hold when each request arrived and when its
    prediction was there (s, NaN for one that never came); `num_born` is how many came.
    """

    def __init__(self, workload: Workload, predictions: Predictions | None, latency: LatencyModel | None = None) -> None:
        n = len(workload)
        if workload.gap is None:
            raise ValueError("no request of this workload waits for another: take a WorkloadSource")
        if predictions is not None and len(predictions) != n:
            raise ValueError(f"{len(predictions)} predictions for {n} requests")
        self.num_born = 0
        self.arrival: NDArray[np.float64] = np.full(n, np.nan)
        self.ready: NDArray[np.float64] = np.full(n, np.nan)
        self._gap = workload.gap.tolist()
        self._nursery = Nursery(workload, predictions)
        self._queue = None if latency is None or predictions is None else PredictionQueue(latency)
        timeout = workload.column("timeout")
        self._timeout = None if timeout is None else np.asarray(timeout, dtype=np.float64)
        if self._timeout is not None and (bad := np.flatnonzero(self._timeout < 0)).size:
            raise ValueError(f"timeout of request {bad[0]} is {self._timeout[bad[0]]} s, it must not be negative")
        self._heap: list[tuple[float, int, int]] = []  # (time, kind, rid)
        self._live: dict[int, Request] = {}
        self._held: dict[int, LengthDistribution] = {}  # predictions made, not ready yet
        self._made: list[tuple[float, int]] = []  # ready, not told yet, last first
        self._users = workload.users is not None
        self._next_row = n if workload.users is None else min(workload.users, n)
        self._children: dict[int, list[int]] = {}
        after = np.full(n, -1) if workload.after is None else workload.after
        for rid, parent in enumerate(after[: self._next_row].tolist()):
            if parent < 0:
                heappush(self._heap, (float(workload.arrival[rid]), int(EventKind.ARRIVAL), rid))
            else:
                self._children.setdefault(parent, []).append(rid)

    def peek(self) -> float:
        """The time of the next event (s); infinity when there is none for now."""
        time = self._heap[0][0] if self._heap else INF
        return time if self._queue is None else min(time, self._queue.next())

    def pop(self, now: float) -> Iterator[Event]:
        """Events with time <= now, in order; take them all."""
        while True:
            ready = self._next_ready(now)
            if ready is not None:
                yield ready
            elif self._heap and self._heap[0][0] <= now:
                time, kind, rid = heappop(self._heap)
                if kind == EventKind.ARRIVAL:
                    yield Event(time, EventKind.ARRIVAL, self._arrive(rid, time))
                elif rid in self._live:  # else it has ended
                    yield Event(time, EventKind(kind), self._live[rid])
            else:
                return

    def on_finish(self, request: Request, now: float) -> None:
        """A request ended: who waited for it follows, `gap` seconds later."""
        rid = request.rid
        self._live.pop(rid, None)
        self._held.pop(rid, None)
        followers = self._children.pop(rid, [])
        if self._users and self._next_row < len(self._gap):
            followers = [self._next_row]
            self._next_row += 1
        for follower in followers:
            heappush(self._heap, (now + self._gap[follower], int(EventKind.ARRIVAL), follower))

    def _arrive(self, rid: int, time: float) -> Request:
        request = self._nursery.born(rid, time)
        self.num_born += 1
        self.arrival[rid] = self.ready[rid] = time
        self._live[rid] = request
        if self._timeout is not None and np.isfinite(self._timeout[rid]):
            heappush(self._heap, (time + float(self._timeout[rid]), int(EventKind.TIMEOUT), rid))
        if self._queue is not None and request.prediction is not None:
            self._held[rid], request.prediction = request.prediction, None
            self.ready[rid] = np.nan
            self._queue.add(rid, time)
        return request

    def _next_ready(self, now: float) -> Event | None:
        """The next prediction that is ready before any other event; None when there is none up to `now`."""
        if self._queue is None:
            return None
        if not self._made:  # a batch takes all who are there when it starts, so arrivals of that very time come first
            first, kind, _ = self._heap[0] if self._heap else (INF, 0, 0)
            if first <= now:
                now = first if kind != EventKind.ARRIVAL else float(np.nextafter(first, -INF))
            self._made = self._queue.pop(now)[::-1]
        while self._made:
            time, rid = self._made.pop()
            self.ready[rid] = time
            if rid in self._live:  # else it has ended
                self._live[rid].prediction = self._held.pop(rid)
                return Event(time, EventKind.PREDICTION_READY, self._live[rid])
        return None
