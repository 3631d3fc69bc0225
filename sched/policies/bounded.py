"""OvertakingGuard: nobody is passed by more than so many who came later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..policy import INF, Policy
from ..ports import View
from ..request import Phase, Request
from .guard import Guard


class OvertakingGuard(Guard):
    """A request is promoted when more than `most` others have become eligible after it, and keeps its place until it ends.

    Declared bound: at most `most` requests that became eligible later ever pass it (bounded bypass, as in mutual exclusion;
    Burns et al., JACM 1982), namely the next `most`; counted, not timed, so that it holds at any load.
    """

    def __init__(self, policy: Policy, most: int) -> None:
        if most < 0 or most != int(most):
            raise ValueError(f"most={most} overtakings: a whole number, at least 0")
        super().__init__(policy)
        self.most = most
        self._behind: deque[Request] = deque()  # in order of eligibility, those not promoted yet
        self._first = 0  # number of the first of them
        self._num = 0

    def due(self, view: View) -> Iterator[tuple[float, Request]]:
        while self._behind and self._num - self._first > self.most + 1:
            req = self._behind.popleft()
            self._first += 1
            if req.phase < Phase.FINISHED:
                yield self._first, req

    def next_due(self) -> float:
        return INF  # only an arrival makes somebody due

    def on_arrival(self, req: Request) -> None:
        super().on_arrival(req)
        self._behind.append(req)
        self._num += 1
