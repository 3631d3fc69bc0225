"""WorkloadSource: a workload as a stream of events; requests are born when they are popped, never all at once.

It is open loop: arrivals do not wait for completions. It never reads a true length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import INF, SLO, Event, EventKind, LengthDistribution, Request

from .dataset import Workload

ARRIVAL, READY, TIMEOUT = EventKind.ARRIVAL, EventKind.PREDICTION_READY, EventKind.TIMEOUT
KINDS = tuple(EventKind)  # by number; plain numbers are compared in the loops, enum members are slow there
CHUNK = 4096  # requests whose columns are made into Python numbers at a time: fast, and nothing for the others yet

# Dataset columns that are request fields, and what they are made of. Other columns never reach a request.
FIELDS = {
    "client": str, "session": str, "program": str, "turn": int, "priority": float, "weight": float, "timeout": float,
}  # fmt: skip
SLO_FIELDS = ("ttft", "tpot", "e2e")  # columns slo_ttft, slo_tpot, slo_e2e in s; NaN is no objective


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
        timeout = workload.dataset.columns.get("timeout")
        timeout = None if timeout is None else np.asarray(timeout, dtype=np.float64)[workload.rows]
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
        self._births = _births(workload, predictions, self._late)
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


def _births(
    workload: Workload, predictions: Predictions | None, late: NDArray[np.bool_] | None
) -> Iterator[tuple[Request, LengthDistribution | None]]:
    """Request after request, each with the prediction that is not there yet (None when it travels with the request)."""
    dataset = workload.dataset
    fields = {f: make for f, make in FIELDS.items() if f in dataset.columns}
    objectives = [f for f in SLO_FIELDS if f"slo_{f}" in dataset.columns]
    plain = not fields and not objectives and dataset.prompts is None
    for start in range(0, len(workload), CHUNK):
        rows = workload.rows[start : start + CHUNK]
        arrival = workload.arrival[start : start + CHUNK].tolist()
        prompt_len = dataset.prompt_len[rows].tolist()
        asked = dataset.columns.get("max_new_tokens")
        limits = repeat(dataset.max_new_tokens, len(rows)) if asked is None else np.asarray(asked)[rows].tolist()
        made = _distributions(predictions, start, len(rows))
        given = zip(range(start, start + len(rows)), arrival, prompt_len, limits, made, strict=True)
        if plain and late is None:
            for rid, time, length, limit, prediction in given:
                yield Request(rid, time, length, limit, prediction=prediction), None
            continue
        waits = repeat(False, len(rows)) if late is None else late[start : start + CHUNK].tolist()
        more: Iterator[dict[str, Any]] = _more(workload, rows, fields, objectives)
        for (rid, time, length, limit, prediction), wait, other in zip(given, waits, more, strict=True):
            at_once = None if wait else prediction
            yield Request(rid, time, length, limit, prediction=at_once, **other), prediction if wait else None


def _distributions(predictions: Predictions | None, start: int, n: int) -> Iterable[LengthDistribution] | Iterable[None]:
    if predictions is None:
        return repeat(None, n)
    score = predictions.score[start : start + n].tolist()
    if predictions.point is not None:
        return map(LengthDistribution, score, predictions.point[start : start + n].tolist())
    return map(predictions.row, range(start, start + n))


def _more(
    workload: Workload, rows: NDArray[np.int64], fields: dict[str, type], objectives: list[str]
) -> Iterator[dict[str, Any]]:
    """Keyword arguments of the rows' requests: prompt text, client and the like, objectives. Missing values are left out."""
    dataset = workload.dataset
    columns = [(name, make, np.asarray(dataset.columns[name])[rows].tolist()) for name, make in fields.items()]
    bounds = [(name, np.asarray(dataset.columns[f"slo_{name}"], dtype=np.float64)[rows].tolist()) for name in objectives]
    kept: dict[tuple[float, ...], SLO | None] = {}
    for i, row in enumerate(rows.tolist()):
        out = {name: make(values[i]) for name, make, values in columns if not _missing(values[i])}
        if dataset.prompts is not None:
            out["prompt"] = dataset.prompts[row]
        if bounds:
            key = tuple(values[i] for _, values in bounds)
            if key not in kept:
                some = {name: v for (name, _), v in zip(bounds, key, strict=True) if not _missing(v)}
                kept[key] = SLO(**some) if some else None
            out["slo"] = kept[key]
        yield out


def _missing(value: Any) -> bool:
    return value is None or value != value
