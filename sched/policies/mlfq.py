"""Skip-join multi-level feedback queue (FastServe: Wu et al., arXiv 2305.05920, NSDI 2026), with no prediction."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request
from .sharing import RUNS


class MLFQ(Policy):
    """Queues 0, 1, 2, ... of quantum `quantum` x `ratio` ^ level (s), the first that has somebody goes first. Preemptive.

    A request joins the end of the first queue whose quantum is not below its profiled first iteration, `prefill_base` +
    `prefill_token` x prompt (s). Once the time it has been on the batch exceeds the quantum, at the end of a step, it goes one
    queue down and its time starts anew. As released, who has run stands before who has not, whoever ran last first, so that a
    queue is served to the end of a quantum. promote_after: every `promote_every` steps, who has not run for so long (s) goes to
    the front of queue 0, its time kept; None: nobody does.

    Here and not as released: those that stopped in the same step stand by arrival, not each time reversed; time on the batch is
    counted by the step, chunks of a prompt too. Left out: proactive swapping. FastServe keeps a batch's worth of blocks free by
    copying out the last queue's KV before anybody needs the room, and copies the next to run back while others compute;
    preemption=swap copies when the room is needed, and the step waits for it. Nor are new prompts held back when the CPU's
    memory is nearly full.
    """

    needs = frozenset({"preempt"})
    preemptive = True

    def __init__(
        self,
        quantum: float = 0.01,
        ratio: float = 2.0,
        prefill_base: float = 0.0064,
        prefill_token: float = 1.8e-5,
        promote_after: float | None = 3.0,
        promote_every: int = 1000,
    ) -> None:
        if not 0.0 < quantum < INF or not 1.0 < ratio < INF:
            raise ValueError(f"quantum={quantum} s must be > 0 and ratio={ratio} > 1")
        if min(prefill_base, prefill_token) < 0.0 or max(prefill_base, prefill_token) == INF:
            raise ValueError(f"prefill_base={prefill_base} and prefill_token={prefill_token} (s) must be >= 0 and finite")
        if promote_every < 1 or (promote_after is not None and promote_after <= 0.0):
            raise ValueError(
                f"promote_every={promote_every} steps, the least is 1; promote_after={promote_after} s must be > 0"
            )
        self.quantum = quantum
        self.ratio = ratio
        self.prefill_base = prefill_base
        self.prefill_token = prefill_token
        self.promote_after = promote_after
        self.promote_every = promote_every
        self._level: dict[Request, int] = {}  # of all that are here
        self._joined: dict[Request, float] = {}  # since when (s) it has been on the batch
        self._zero: dict[Request, float] = {}  # of those on the batch: when (s) their time would have been 0
        self._attained: dict[Request, float] = {}  # of those off the batch (s)
        self._left: dict[Request, float] = {}  # when (s) it last ran, or was promoted
        self._until: dict[Request, float] = {}  # when (s) its time has reached the quantum
        self._due: list[tuple[float, int, Request]] = []  # a heap of these, stale ones among them
        self._boundary = 0.0  # end of the last step (s)
        self._num_steps = 0
        self._rounds = 0  # of promotions

    def level(self, req: Request) -> int:
        """The queue that `req` is in."""
        level = self._level.get(req)
        if level is None:
            level, first = 0, self.prefill_base + self.prefill_token * req.prompt_len
            while self._quantum(level) < first:
                level += 1
        return level

    def _quantum(self, level: int) -> float:
        return self.quantum * self.ratio**level

    def key(self, req: Request, view: View) -> tuple[float, float]:
        return self.level(req), -INF if req.phase in RUNS else -self._left.get(req, -INF)

    def turned(self, view: View) -> Iterator[Request]:
        """Those demoted and promoted, as of the end of the last step."""
        now, due = self._boundary, self._due
        while due and due[0][0] < now:
            until, _, req = heappop(due)
            if self._until.get(req) == until:
                self._level[req] = self.level(req) + 1
                self._start(req, now)
                yield req
        rounds = self._num_steps // self.promote_every
        if self.promote_after is None or rounds == self._rounds:
            return
        self._rounds = rounds
        for req in self._level:
            if req.phase not in RUNS and self._left.get(req, req.arrival) <= now - self.promote_after:
                self._level[req] = 0
                self._left[req] = now
                yield req

    def _start(self, req: Request, zero: float) -> None:
        self._zero[req] = zero
        self._until[req] = until = zero + self._quantum(self.level(req))
        heappush(self._due, (until, req._entry, req))

    def stable(self, view: View) -> tuple[int, float]:
        due = self._due
        while due and self._until.get(due[0][2]) != due[0][0]:
            heappop(due)
        steps = FOREVER if self.promote_after is None else self.promote_every - self._num_steps % self.promote_every
        return steps, due[0][0] if due else INF

    def on_arrival(self, req: Request) -> None:
        self._level[req] = self.level(req)

    def on_schedule(self, req: Request, view: View) -> None:
        self._joined[req] = view.now
        self._start(req, view.now - self._attained.get(req, 0.0))

    def on_preempt(self, req: Request, view: View) -> None:
        zero = self._zero.pop(req)
        del self._until[req]
        if self._joined.pop(req) < self._boundary:  # else it never ran
            self._attained[req] = self._boundary - zero
            self._left[req] = self._boundary

    def on_steps(self, num_steps: int, view: View) -> None:
        self._boundary = view.now
        self._num_steps += num_steps

    def on_finish(self, req: Request) -> None:
        for table in (self._level, self._joined, self._zero, self._attained, self._left, self._until):
            table.pop(req, None)
