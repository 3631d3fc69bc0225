"""IdleGuard: who has been off the batch for too long runs first, for a quantum of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from ..policy import INF, Policy
from ..ports import View
from ..request import Request
from .guard import Guard


class IdleGuard(Guard):
    """A request off the batch for `idle` s since it came or last ran is promoted until it has generated `quantum` tokens more.

    The guard of LTR (NeurIPS 2024, section 4.3) and FastServe (NSDI 2026), whose code counts steps or looks every so many; here
    time is counted, and nobody is missed. Declared bound: whoever is off the batch for `idle` s is passed from then on only by
    those promoted before, each of whom gives way after its quantum where the policy preempts.
    """

    def __init__(self, policy: Policy, idle: float, quantum: int) -> None:
        if not 0.0 < idle < math.inf:
            raise ValueError(f"idle={idle}: a finite number of seconds > 0")
        if quantum < 1 or quantum != int(quantum):
            raise ValueError(f"quantum={quantum} tokens: a whole number, at least 1")
        super().__init__(policy)
        self.idle, self.quantum = idle, quantum
        self.rekey_decides = True
        self._since: dict[Request, int] = {}  # number of its entry in the heap, while off the batch and not promoted
        self._dues: list[tuple[float, int, Request]] = []
        self._num = 0
        self._until: dict[Request, int] = {}  # generated tokens at which the quantum of a promoted request ends

    def due(self, view: View) -> Iterator[tuple[float, Request]]:
        while self.next_due() <= view.now:
            due, _, req = heappop(self._dues)
            del self._since[req]
            yield due, req

    def next_due(self) -> float:
        heap = self._dues
        while heap and self._since.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][0] if heap else INF

    def rekey_at(self, req: Request, generated: int) -> float:
        if self.is_promoted(req):
            if generated < (end := self._until[req]):
                return end
            self.demote(req)
        return self.policy.rekey_at(req, generated)

    def on_arrival(self, req: Request) -> None:
        super().on_arrival(req)
        self._wait(req, req.arrival)

    def on_schedule(self, req: Request, view: View) -> None:
        super().on_schedule(req, view)
        self._since.pop(req, None)
        self._until[req] = view.generated(req) + self.quantum

    def on_preempt(self, req: Request, view: View) -> None:
        super().on_preempt(req, view)
        if not self.is_promoted(req):
            self._wait(req, view.now)

    def on_finish(self, req: Request) -> None:
        self._since.pop(req, None)
        self._until.pop(req, None)
        super().on_finish(req)

    def _wait(self, req: Request, since: float) -> None:
        self._num += 1
        self._since[req] = self._num
        heappush(self._dues, (since + self.idle, self._num, req))
