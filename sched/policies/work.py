"""WorkGuard: nobody waits while much more work is done for others than first come first served would have done before it.

Work is counted in slot-steps (a row for a decode step), a clock that both sides of the comparison share: what was ahead of a
request when it came is what FCFS would have served first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..policy import INF, Policy
from ..ports import View
from ..request import Request, predicted
from .quantum import QuantumGuard


class WorkGuard(QuantumGuard):
    """A request is promoted once `factor` x the most work that any request has found waiting before it so far, plus `slack`
    slot-steps, was done since it came; work that waits is counted in predicted tokens. quantum: for so many tokens, and again
    when as much was done since it left the batch, or by `backoff` more with each wait; None: until it ends.

    The most so far, not what it found itself: a bound for each request alone would forbid all gain from order where queues
    build up, since waits weighted by work add up to the same under any order (Kleinrock's conservation law), while a tail like
    P99.9 is of the longest waits only. Declared bound: the promoted stand in order of eligibility, so that past its mark a
    request is passed by nobody who became eligible later.
    """

    def __init__(
        self, policy: Policy, factor: float = 1.2, slack: float = 2000.0, quantum: int | None = None, backoff: float = 1.0
    ) -> None:
        if not 1.0 <= factor < math.inf:
            raise ValueError(f"factor={factor}: finite and at least 1, what first come first served waits")
        if not 0.0 <= slack < math.inf:
            raise ValueError(f"slack={slack} slot-steps: a finite number >= 0")
        super().__init__(policy, quantum, backoff)
        self.needs = self.needs | {"prediction"}
        self.factor, self.slack = factor, slack
        self._clock = 0  # slot-steps done
        self._waits = 0.0  # predicted tokens of those off the batch
        self._most = 0.0
        self._work: dict[Request, float] = {}  # what each of them counts for

    def due(self, view: View) -> Iterator[tuple[float, Request]]:
        for _, number, req in self.passed(self._clock):
            yield number, req

    def next_due(self) -> float:
        return INF  # a number of steps, not a time

    def stable(self, view: View) -> tuple[int, float]:
        steps, until = super().stable(view)
        left = self.next_mark() - self._clock
        if left < INF:
            steps = min(steps, max(math.ceil(left / max(view.num_running, 1)), 1))
        return steps, until

    def on_steps(self, num_steps: int, view: View) -> None:
        self.policy.on_steps(num_steps, view)
        self._clock += num_steps * view.num_running

    def on_arrival(self, req: Request) -> None:
        super().on_arrival(req)
        self._most = max(self._most, self._waits)
        self._mark(req)
        self._wait(req, 0)

    def renew(self, req: Request, view: View) -> None:
        self._mark(req)

    def on_schedule(self, req: Request, view: View) -> None:
        super().on_schedule(req, view)
        self._waits -= self._work.pop(req)

    def on_preempt(self, req: Request, view: View) -> None:
        super().on_preempt(req, view)
        self._wait(req, view.generated(req))

    def on_finish(self, req: Request) -> None:
        self._waits -= self._work.pop(req, 0.0)
        super().on_finish(req)

    def _mark(self, req: Request) -> None:
        self.set_mark(req, self._clock, self.factor * self._most + self.slack)

    def _wait(self, req: Request, generated: int) -> None:
        self._work[req] = work = predicted(req).expected_remaining(generated)
        self._waits += work
