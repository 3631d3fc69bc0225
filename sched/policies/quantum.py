"""QuantumGuard: who has waited up to its mark runs first, for a quantum of tokens or until it ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from heapq import heappop, heappush

from ..policy import INF, Policy
from ..ports import View
from ..request import Request
from .guard import Guard

MOST = float(1 << 30)  # a scale beyond which no wait is told from another


class QuantumGuard(Guard):
    """Marks are numbers on a clock of the subclass, one for each request that waits; who has passed its own is promoted until
    it has generated `quantum` tokens more, and gets another mark when it leaves the batch: with each wait `backoff` times as
    far away, and for `backoff` times as many tokens. quantum=None: until it ends, by the mark that it got when it came,
    whether it ran meanwhile or not.
    """

    def __init__(self, policy: Policy, quantum: int | None, backoff: float = 1.0) -> None:
        if quantum is not None and (quantum < 1 or quantum != int(quantum)):
            raise ValueError(f"quantum={quantum} tokens: a whole number, at least 1")
        if not 1.0 <= backoff < INF:
            raise ValueError(f"backoff={backoff}: finite and at least 1, every wait as long as the first")
        super().__init__(policy)
        self.quantum, self.backoff = quantum, backoff
        if quantum is not None:
            self.rekey_decides = True
        self._since: dict[Request, int] = {}  # number of its entry in the heap, while it has a mark
        self._marks: list[tuple[float, int, Request]] = []
        self._num = 0
        self._until: dict[Request, int] = {}  # generated tokens at which the quantum of a promoted request ends
        self._scale: dict[Request, float] = {}  # backoff to the power of the waits that it has behind it

    def passed(self, clock: float) -> Iterator[tuple[float, int, Request]]:
        """(mark, number, request) of those whose mark is at most `clock`, each once; numbers in order of eligibility."""
        while self.next_mark() <= clock:
            mark, number, req = heappop(self._marks)
            del self._since[req]
            yield mark, number, req

    def next_mark(self) -> float:
        heap = self._marks
        while heap and self._since.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][0] if heap else INF

    def set_mark(self, req: Request, now: float, span: float) -> None:
        """`span` from `now` on the clock; farther away for one that has waited before."""
        self._num += 1
        self._since[req] = self._num
        heappush(self._marks, (now + span * self._scale.get(req, 1.0), self._num, req))

    @abstractmethod
    def renew(self, req: Request, view: View) -> None:
        """Mark a request that has left the batch anew."""

    def rekey_at(self, req: Request, generated: int) -> float:
        if self.quantum is not None and self.is_promoted(req):
            if generated < (end := self._until[req]):
                return end
            self.demote(req)
        return super().rekey_at(req, generated)

    def on_schedule(self, req: Request, view: View) -> None:
        super().on_schedule(req, view)
        if self.quantum is not None:
            self._since.pop(req, None)
            self._until[req] = view.generated(req) + round(self.quantum * self._scale.get(req, 1.0))

    def on_preempt(self, req: Request, view: View) -> None:
        super().on_preempt(req, view)
        if self.quantum is not None and not self.is_promoted(req):
            self._scale[req] = min(self._scale.get(req, 1.0) * self.backoff, MOST)
            self.renew(req, view)

    def on_finish(self, req: Request) -> None:
        self._since.pop(req, None)
        self._until.pop(req, None)
        self._scale.pop(req, None)
        super().on_finish(req)
