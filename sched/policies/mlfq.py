"""Skip-join multi-level feedback queue (FastServe: Wu et al., arXiv 2305.05920, NSDI 2026), with no prediction."""

from __future__ import annotations

from heapq import heappop, heappush

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Phase, Request
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
        self._live: dict[Request, None] = {}
        self._level: dict[Request, int] = {}  # of those that have changed theirs
        self._joined: dict[Request, float] = {}  # since when (s) it has been on the batch
        self._gone: dict[Request, None] = {}  # off it again since the last step
        self._zero: dict[Request, float] = {}  # of those on the batch: when (s) their time would have been 0
        self._attained: dict[Request, float] = {}  # of those off the batch (s)
        self._left: dict[Request, float] = {}  # when (s) it last ran, or was promoted
        self._until: dict[Request, float] = {}  # when (s) its time has reached the quantum
        self._due: list[tuple[float, int, Request]] = []  # a heap of these, stale ones among them
        self._turn: dict[Request, int] = {}  # number of generated tokens at which its key is stored anew
        self._view: View | None = None
        self._boundary = 0.0  # end of the last step (s)
        self._longest = 0.0  # step seen (s)
        self._num_steps = 0
        self._epoch = 0

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
        joined = self._joined.get(req)
        if joined is not None:
            if req.phase in RUNS:
                return self.level(req), -INF
            self._gone[req] = None
            if joined < self._boundary:
                return self.level(req), -self._boundary
        return self.level(req), -self._left.get(req, -INF)

    def key_epoch(self, view: View) -> int:
        return self._epoch

    def admit(self, req: Request, view: View) -> bool:
        self._view = view
        if req in self._gone:
            del self._gone[req]
            return True
        self._joined[req] = view.now
        self._start(req, view.now - self._attained.get(req, 0.0))
        return True

    def _start(self, req: Request, zero: float) -> None:
        self._zero[req] = zero
        self._until[req] = until = zero + self._quantum(self.level(req))
        heappush(self._due, (until, req._entry, req))

    def _demote(self, req: Request, now: float) -> None:
        self._level[req] = self.level(req) + 1
        self._start(req, now)

    def rekey_at(self, req: Request, generated: int) -> float:
        """Not after it is demoted, unless steps take longer than any before; then `key_epoch` moves. It may be demoted here."""
        now = self._view.now if self._view is not None else 0.0
        if self._until.get(req, INF) < now and self._joined[req] < now:  # not who has just been let in: it has yet to run
            self._demote(req, now)
        left = self._until.get(req, now) - now
        steps = max(int(left / self._longest), 1) if self._longest > 0.0 else 1
        self._turn[req] = generated + steps
        return generated + steps

    def stable(self, view: View) -> tuple[int, float]:
        due = self._due
        while due and self._until.get(due[0][2]) != due[0][0]:
            heappop(due)
        steps = FOREVER if self.promote_after is None else self.promote_every - self._num_steps % self.promote_every
        return steps, due[0][0] if due else INF

    def on_arrival(self, req: Request) -> None:
        self._live[req] = None

    def on_steps(self, num_steps: int, view: View) -> None:
        for req in self._gone:
            self._take_back(req)
        self._gone.clear()
        self._boundary = now = view.now
        self._longest = max(self._longest, view.step_time)
        due = self._due
        while due and due[0][0] < now:
            until, _, req = heappop(due)
            if self._until.get(req) == until:
                self._demote(req, now)
                if req.phase == Phase.DECODING and view.generated(req) < self._turn[req]:
                    self._epoch += 1
        rounds = self._num_steps // self.promote_every
        self._num_steps += num_steps
        if self.promote_after is not None and self._num_steps // self.promote_every > rounds:
            self._promote(now - self.promote_after)

    def on_finish(self, req: Request) -> None:
        for table in (
            self._live, self._level, self._joined, self._gone, self._zero, self._attained, self._left, self._until, self._turn,
        ):  # fmt: skip
            table.pop(req, None)

    def _take_back(self, req: Request) -> None:
        zero = self._zero.pop(req)
        del self._until[req]
        if self._joined.pop(req) < self._boundary:  # else it never ran
            self._attained[req] = self._boundary - zero
            self._left[req] = self._boundary

    def _promote(self, before: float) -> None:
        for req in self._live:
            if req.phase not in RUNS and self._left.get(req, req.arrival) <= before:
                self._level[req] = 0
                self._left[req] = self._boundary
                self._epoch += 1
