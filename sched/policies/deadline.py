"""DeadlineGuard: who has been here too long goes first. Too long is a time, or grows with the expected length, or both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from ..policy import INF, Policy
from ..ports import View
from ..request import Phase, Request
from .guard import Guard


class DeadlineGuard(Guard):
    """A request is promoted `wait` + `per_token` x predicted length s after its arrival, on the batch or not, until it ends.

    wait alone bounds the wait. per_token > 0 lets those wait who are long anyway, which bounds the slowdown: ageing relative to
    the expected length (SSJF, arXiv 2404.08509, reorders at 10 x the true duration; here only the prediction is known).
    Declared bound: request i is passed by nobody who arrives at or after its deadline, frozen when it became eligible.
    """

    def __init__(self, policy: Policy, wait: float = 0.0, per_token: float = 0.0) -> None:
        for name, value in (("wait", wait), ("per_token", per_token)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value}: a finite number of seconds >= 0")
        if wait + per_token == 0.0:
            raise ValueError("wait=0 and per_token=0 promote everybody at arrival: state one of them")
        super().__init__(policy)
        self.wait, self.per_token = wait, per_token
        if per_token:
            self.needs = self.needs | {"prediction"}
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap of those not promoted yet
        self._num = 0

    def overtaking_horizon(self, req: Request, view: View) -> float:
        """The arrival time (s) from which on nobody may pass `req` any more."""
        return self._deadline(req)

    def due(self, view: View) -> Iterator[tuple[float, Request]]:
        while self.next_due() <= view.now:
            deadline, _, req = heappop(self._deadlines)
            yield deadline, req

    def next_due(self) -> float:
        heap = self._deadlines
        while heap and heap[0][2].phase >= Phase.FINISHED:
            heappop(heap)
        return heap[0][0] if heap else INF

    def on_arrival(self, req: Request) -> None:
        super().on_arrival(req)
        self._num += 1
        heappush(self._deadlines, (self._deadline(req), self._num, req))

    def _deadline(self, req: Request) -> float:
        if not self.per_token:
            return req.arrival + self.wait
        if req.prediction is None:
            raise ValueError(f"request {req.rid} has no prediction, and per_token={self.per_token} needs one")
        return req.arrival + self.wait + self.per_token * req.prediction.mean()
