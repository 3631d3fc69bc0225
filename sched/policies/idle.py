"""IdleGuard: who has been off the batch for too long runs first, for a quantum of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..policy import Policy
from ..ports import View
from ..request import Request
from .quantum import QuantumGuard


class IdleGuard(QuantumGuard):
    """A request off the batch for `idle` s since it came or last ran is promoted until it has generated `quantum` tokens more.

    The guard of LTR (NeurIPS 2024, section 4.3) and FastServe (NSDI 2026), whose code counts steps or looks every so many; here
    time is counted, and nobody is missed. Declared bound: whoever is off the batch for `idle` s is passed from then on only by
    those promoted before, each of whom gives way after its quantum where the policy preempts.
    """

    def __init__(self, policy: Policy, idle: float, quantum: int) -> None:
        if not 0.0 < idle < math.inf:
            raise ValueError(f"idle={idle}: a finite number of seconds > 0")
        super().__init__(policy, quantum)
        self.idle = idle

    def due(self, view: View) -> Iterator[tuple[float, Request]]:
        for due, _, req in self.passed(view.now):
            yield due, req

    def next_due(self) -> float:
        return self.next_mark()

    def on_arrival(self, req: Request) -> None:
        super().on_arrival(req)
        self.set_mark(req, req.arrival, self.idle)

    def renew(self, req: Request, view: View) -> None:
        self.set_mark(req, view.now, self.idle)
