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
from ..request import Phase, Request
from .attendance import Attendance
from .size import predicted


class LTR(Policy):
    """Key: (0 if promoted else 1, score), lower first. No request is passed over for one behind it that would fit.

    threshold: who has been off the batch for so long is promoted, until it has run for `quantum` (both in `unit`: scheduler
    steps, or seconds); None: no guard. Published: no guard in the main figures, 200 and 10 steps where fairness is measured.

    With the guard each promotion and its end costs O(waiting), for the scheduler can only compute all keys anew; without it
    keys never move. Departures: a quantum counts from the step that emits a token, so that each promotion is worth at least
    one (the released code counts steps of prefill too; it swaps, and so never loses them); preemption is what the
    `preemption` node says.
    """

    needs = frozenset({"prediction", "preempt"})
    preemptive = True

    def __init__(
        self, threshold: float | None = None, quantum: float = 10, unit: Literal["steps", "seconds"] = "steps"
    ) -> None:
        self.guard = None if threshold is None else Promotion(threshold, quantum, unit)

    def key(self, req: Request, view: View) -> tuple[float, float]:
        return 0.0 if self.guard is not None and req.rid in self.guard.promoted else 1.0, predicted(req).score

    def key_epoch(self, view: View) -> object:
        return None if self.guard is None else self.guard.num_moves

    def stable(self, view: View) -> tuple[int, float]:
        return (FOREVER, INF) if self.guard is None else self.guard.stable(view)

    def admit(self, req: Request, view: View) -> bool:
        if self.guard is not None:
            self.guard.joins(req)
        return True

    def on_arrival(self, req: Request) -> None:
        if self.guard is not None:
            self.guard.arrives(req)

    def on_steps(self, num_steps: int, view: View) -> None:
        if self.guard is not None:
            self.guard.advance(num_steps, view)

    def on_finish(self, req: Request) -> None:
        if self.guard is not None:
            self.guard.ends(req)


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
        self.promoted: dict[int, float] = {}  # rid -> what was left of its quantum when it last came on the batch
        self.num_moves = 0  # promotions, and ends of promotions
        self._in_seconds = unit == "seconds"
        self._now = 0.0  # steps, or seconds
        self._batch = Attendance()
        self._joined: list[int] = []  # since the last step
        self._idle: dict[int, float] = {}  # rid -> since when
        self._due: list[tuple[float, float, int]] = []  # (promotion, idle since, rid); stale where `_idle` says otherwise
        self._starting: dict[int, Request] = {}  # promoted, on the batch, and not seen decoding yet
        self._until: dict[int, float] = {}  # rid, promoted and decoding -> when its quantum is used up
        self._spent: list[tuple[float, int]] = []  # (that, rid); stale where `_until` says otherwise

    def arrives(self, req: Request) -> None:
        self._rests(req.rid, req.arrival if self._in_seconds else self._now)

    def joins(self, req: Request) -> None:
        """It comes on the batch with the step that is planned; it is idle until that is taken."""
        self._batch.joins(req)
        self._joined.append(req.rid)
        if req.rid in self.promoted:
            self._starting[req.rid] = req

    def advance(self, num_steps: int, view: View) -> None:
        before, self._now = self._now, view.now if self._in_seconds else self._now + num_steps
        for req in self._batch.gone(view):
            self._starting.pop(req.rid, None)
            if (end := self._until.pop(req.rid, None)) is not None:
                self.promoted[req.rid] = min(end - before, self.promoted[req.rid])
            if req.rid not in self._idle:
                self._rests(req.rid, before)
        for rid in self._joined:
            if rid in self._batch:
                self._idle.pop(rid, None)
        self._joined.clear()
        self._start(before)
        while self._due and self._due[0][0] <= self._now:
            _, since, rid = heappop(self._due)
            if self._idle.get(rid) == since:
                self.num_moves += rid not in self.promoted
                self.promoted[rid] = self.quantum
                del self._idle[rid]
        while self._spent and self._spent[0][0] <= self._now:
            end, rid = heappop(self._spent)
            if self._until.get(rid) == end:
                del self._until[rid], self.promoted[rid]
                self.num_moves += 1

    def ends(self, req: Request) -> None:
        self._batch.ends(req)
        for kept in (self.promoted, self._idle, self._starting, self._until):
            kept.pop(req.rid, None)

    def stable(self, view: View) -> tuple[int, float]:
        """(steps, time) until somebody is promoted, or no longer."""
        self._start(view.now if self._in_seconds else self._now)
        due, spent = self._due, self._spent
        while due and self._idle.get(due[0][2]) != due[0][1]:
            heappop(due)
        while spent and self._until.get(spent[0][1]) != spent[0][0]:
            heappop(spent)
        first = min(due[0][0] if due else INF, spent[0][0] if spent else INF)
        if self._in_seconds:
            return FOREVER, first
        return (max(math.ceil(first - self._now), 1) if first < INF else FOREVER), INF

    def _start(self, begin: float) -> None:
        """The quantum of those who decode now runs from `begin`."""
        for rid in [rid for rid, req in self._starting.items() if req.phase == Phase.DECODING]:
            del self._starting[rid]
            self._until[rid] = begin + self.promoted[rid]
            heappush(self._spent, (self._until[rid], rid))

    def _rests(self, rid: int, since: float) -> None:
        self._idle[rid] = since
        heappush(self._due, (since + self.threshold, since, rid))
