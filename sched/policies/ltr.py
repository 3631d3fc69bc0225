"""LTR: learning to rank. All requests in the order of a predicted score, fully preemptive (Fu et al., NeurIPS 2024).

A rank says who is shorter, not how long anybody is. So nothing is counted down, and who starves is promoted by a guard that
counts scheduler steps, as the released code (vllm-ltr) does.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Literal

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Phase, Request, predicted

_HEARD = ("turned", "stable", "on_arrival", "on_schedule", "on_preempt", "on_steps", "on_finish")


class LTR(Policy):
    """Key: (0 if promoted else 1, score), lower first. No request is passed over for one behind it that would fit.

    threshold: who has been off the batch for so long is promoted, until it has run for `quantum` (both in `unit`: scheduler
    steps, or seconds); None: no guard. Published: no guard in the main figures, 200 and 10 steps where fairness is measured.

    A promotion and its end cost O(log waiting) each. Departures: a quantum counts from the step that emits a token, so that
    each promotion is worth at least one (the released code counts steps of prefill too; it swaps, and so never loses them);
    preemption is what the `preemption` node says.
    """

    needs = frozenset({"prediction", "preempt"})
    preemptive = True

    def __init__(
        self, threshold: float | None = None, quantum: float = 10, unit: Literal["steps", "seconds"] = "steps"
    ) -> None:
        self.guard = None if threshold is None else Promotion(threshold, quantum, unit)
        for name in _HEARD if self.guard is not None else ():
            setattr(self, name, getattr(self.guard, name))

    def key(self, req: Request, view: View) -> tuple[float, float]:
        return 0.0 if self.guard is not None and req in self.guard.promoted else 1.0, predicted(req).score

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF


class Promotion:
    """Who is promoted: idle for `threshold`, until it has run for `quantum`. Idle counts from the last step on the batch, or
    from the arrival; who is promoted, leaves the batch and is idle for so long again has a whole quantum again."""

    def __init__(self, threshold: float, quantum: float, unit: str) -> None:
        if unit not in ("steps", "seconds"):
            raise ValueError(f"unit={unit!r}: choose steps or seconds")
        for name, value in (("threshold", threshold), ("quantum", quantum)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} {unit} must be > 0 and finite")
        self.threshold, self.quantum = threshold, quantum
        self.promoted: dict[Request, float] = {}  # what was left of its quantum when it last came on the batch
        self._in_seconds = unit == "seconds"
        self._now = 0.0  # steps, or seconds: when the step that is planned begins
        self._idle: dict[Request, float] = {}  # when it is due
        self._due: list[tuple[float, int, Request]] = []  # a heap of these, stale ones among them
        self._starting: dict[Request, None] = {}  # promoted, on the batch, and not seen decoding yet
        self._until: dict[Request, float] = {}  # promoted and decoding: when its quantum is used up
        self._spent: list[tuple[float, int, Request]] = []  # a heap of these, stale ones among them

    def turned(self, view: View) -> list[Request]:
        """Those promoted now, and those no longer."""
        if self._in_seconds:
            self._now = view.now
        turned: list[Request] = []
        while _first(self._due, self._idle) <= self._now:
            req = heappop(self._due)[2]
            del self._idle[req]
            if req not in self.promoted:
                turned.append(req)
            self.promoted[req] = self.quantum
        while _first(self._spent, self._until) <= self._now:
            req = heappop(self._spent)[2]
            del self._until[req], self.promoted[req]
            turned.append(req)
        return turned

    def stable(self, view: View) -> tuple[int, float]:
        """(steps, time) until somebody is promoted, or no longer."""
        self._start()
        first = min(_first(self._due, self._idle), _first(self._spent, self._until))
        if self._in_seconds:
            return FOREVER, first
        return (max(math.ceil(first - self._now), 1) if first < INF else FOREVER), INF

    def on_arrival(self, req: Request) -> None:
        self._rests(req, req.arrival if self._in_seconds else self._now)

    def on_schedule(self, req: Request, view: View) -> None:
        self._idle.pop(req, None)
        if req in self.promoted:
            self._starting[req] = None

    def on_preempt(self, req: Request, view: View) -> None:
        self._starting.pop(req, None)
        if (end := self._until.pop(req, None)) is not None:
            self.promoted[req] = min(end - self._now, self.promoted[req])
        self._rests(req, self._now)

    def on_steps(self, num_steps: int, view: View) -> None:
        self._start()  # whose prompt is done has had a step of its quantum
        self._now = view.now if self._in_seconds else self._now + num_steps

    def on_finish(self, req: Request) -> None:
        for kept in (self.promoted, self._idle, self._starting, self._until):
            kept.pop(req, None)

    def _start(self) -> None:
        """The quantum of those who decode now runs."""
        for req in [req for req in self._starting if req.phase == Phase.DECODING]:
            del self._starting[req]
            self._until[req] = self._now + self.promoted[req]
            heappush(self._spent, (self._until[req], req._entry, req))

    def _rests(self, req: Request, since: float) -> None:
        self._idle[req] = since + self.threshold
        heappush(self._due, (since + self.threshold, req._entry, req))


def _first(heap: list[tuple[float, int, Request]], times: dict[Request, float]) -> float:
    """The first time on `heap` that `times` still has; infinity: none. Mutates `heap`: stale ones go."""
    while heap and times.get(heap[0][2]) != heap[0][0]:
        heappop(heap)
    return heap[0][0] if heap else INF
