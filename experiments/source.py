"""WorkloadSource: a workload as a stream of events, open loop: arrivals do not wait for completions (see sessions.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import INF, Event, EventKind, LengthDistribution, Request

from .births import births
from .dataset import Workload

ARRIVAL, READY, TIMEOUT = EventKind.ARRIVAL, EventKind.PREDICTION_READY, EventKind.TIMEOUT
KINDS = tuple(EventKind)  # by number; plain numbers are compared in the loops, enum members are slow there


class WorkloadSource:
    """Events of a workload, in order of time, then kind (arrivals first), then row.

    predictions: row i is request i's; None when there is no predictor. ready: when each prediction is there (s), None for at
    arrival. One that is there at arrival travels with it; else PREDICTION_READY follows, and attaches it. gate: the policy
    needs the prediction, so an arrival without it changes no plan and `peek` looks past it. A `timeout` column gives TIMEOUT
    events, dropped when the request has ended. measured: arrivals go on until the first `measured` requests have ended, and no
    longer; None: all arrive. `num_born` requests have arrived so far.
    """

    def __init__(
        self,
        workload: Workload,
        predictions: Predictions | None,
        ready: NDArray[np.float64] | None,
        gate: bool,
        measured: int | None = None,
    ) -> None:
        n = len(workload)
        if predictions is not None and len(predictions) != n:
            raise ValueError(f"{len(predictions)} predictions for {n} requests")
        if predictions is None and (ready is not None or gate):
            raise ValueError("the policy needs predictions and there are none" if gate else "ready times without predictions")
        arrival = np.ascontiguousarray(workload.arrival, dtype=np.float64)
        self._late = _late(arrival, ready)
        timeout = workload.column("timeout")
        timeout = None if timeout is None else np.asarray(timeout, dtype=np.float64)
        self._simple = self._late is None and timeout is None  # nothing but arrivals
        self._measured = n if measured is None else measured
        self._to_end = self._measured if self._measured < n else n + 1  # measured requests that have not ended
        time, kind, rid, wakes = _events(arrival, ready, self._late, timeout, gate)
        # Views give Python numbers one at a time: as fast as lists, without holding a million of them.
        self._time: Any = time.data
        self._kind: Any = kind.data
        self._rid: Any = rid.data
        self._wakes: Any = wakes.data
        self._num_events = len(time)
        self._at = 0  # the next event
        self._wake = 0  # the next one that may change a plan, at or after it
        self.num_born = 0
        self._live: dict[int, Request] = {}  # requests that have events ahead of them
        self._held: dict[int, LengthDistribution] = {}  # predictions made, not ready yet
        self._births = births(workload, predictions, self._late)
        self._settle()

    def peek(self) -> float:
        """The time of the next event that may change a plan (s); infinity when there is none."""
        return self._peek

    def pop(self, now: float) -> Iterable[Event]:
        """Events with time <= now, in order; take them all. A late prediction is attached when its event is taken."""
        if not self._simple:
            return self._pop_each(now)
        out: list[Event] = []
        at, end, time, births = self._at, self._num_events, self._time, self._births
        while at < end and time[at] <= now:
            request, _ = next(births)
            out.append(Event(request.arrival, ARRIVAL, request))
            at += 1
        self._at = self.num_born = at
        self._peek = time[at] if at < end else INF
        return out

    def _pop_each(self, now: float) -> Iterator[Event]:
        end, times, kinds, rids, live, held = self._num_events, self._time, self._kind, self._rid, self._live, self._held
        while (at := self._at) < end and (time := times[at]) <= now:
            self._at = at + 1
            rid, kind = rids[at], kinds[at]
            if kind == 0:  # an arrival
                if not self._to_end:
                    continue
                request, prediction = next(self._births)
                self.num_born += 1
                live[rid] = request
                if prediction is not None:
                    held[rid] = prediction
                yield Event(time, ARRIVAL, request)
            elif rid in live:  # else it has ended
                request = live[rid]
                if kind == 1:
                    request.prediction = held.pop(rid)
                yield Event(time, KINDS[kind], request)
        self._settle()

    def on_finish(self, request: Request, now: float) -> None:
        """Forget a request that ended: what lay ahead of it is void. The last measured one ends the arrivals."""
        if request.rid < self._measured:
            self._to_end -= 1
            if not self._to_end and self._simple:
                self._num_events, self._peek = self._at, INF
        if not self._simple:
            self._live.pop(request.rid, None)
            self._held.pop(request.rid, None)
            self._settle()

    def _settle(self) -> None:
        """Move on to the next event that may change a plan. It only ever moves forward: void events stay void."""
        end, wakes, kinds, rids, live, num_born, to_end = (
            self._num_events, self._wakes, self._kind, self._rid, self._live, self.num_born, self._to_end,
        )  # fmt: skip
        wake = max(self._wake, self._at)
        while wake < end:
            if wakes[wake] and (to_end if kinds[wake] == 0 or rids[wake] >= num_born else rids[wake] in live):
                break
            wake += 1
        self._wake = wake
        self._peek = self._time[wake] if wake < end else INF


def _late(arrival: NDArray[np.float64], ready: NDArray[np.float64] | None) -> NDArray[np.bool_] | None:
    """Which predictions come after their request (N,); None when none does."""
    if ready is None:
        return None
    if ready.shape != arrival.shape:
        raise ValueError(f"{len(ready)} ready times for {len(arrival)} requests")
    bad = np.flatnonzero(~np.isfinite(ready) | (ready < arrival))
    if bad.size:
        raise ValueError(f"prediction {bad[0]} is ready at {ready[bad[0]]} s, its request arrives at {arrival[bad[0]]} s")
    late = ready > arrival
    return late if late.any() else None


def _events(
    arrival: NDArray[np.float64],
    ready: NDArray[np.float64] | None,
    late: NDArray[np.bool_] | None,
    timeout: NDArray[np.float64] | None,
    gate: bool,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Columns of all events in order: time (s), kind, rid, and whether one may change a plan."""
    n = len(arrival)
    rids = np.arange(n, dtype=np.int64)
    parts = [(arrival, np.full(n, int(ARRIVAL)), rids, np.ones(n, dtype=bool) if late is None or not gate else ~late)]
    if late is not None and ready is not None:
        who = np.flatnonzero(late)
        parts.append((ready[who], np.full(who.size, int(READY)), who, np.ones(who.size, dtype=bool)))
    if timeout is not None:
        bad = np.flatnonzero(timeout < 0)
        if bad.size:
            raise ValueError(f"timeout of request {bad[0]} is {timeout[bad[0]]} s, it must not be negative")
        who = np.flatnonzero(np.isfinite(timeout))  # NaN and infinity: none
        parts.append((arrival[who] + timeout[who], np.full(who.size, int(TIMEOUT)), who, np.ones(who.size, dtype=bool)))
    time, kind, rid, wakes = (np.concatenate(column) for column in zip(*parts, strict=True))
    if len(parts) > 1:
        order = np.lexsort((rid, kind, time))
        time, kind, rid, wakes = time[order], kind[order], rid[order], wakes[order]
    return time, kind, rid, wakes
