"""PolicyQueue: vLLM's waiting queue in the order of a policy, which it tells what vLLM does; it is also the policy's View.

vLLM pops a request both to run it and to set it aside until the end of a step (a grammar is not compiled yet, say), so who was
popped is told from what has become of it, when the queue is next looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from lengthwise.sched import Phase, Policy, Request
from lengthwise.sched.policy import overrides
from lengthwise.sched.waiting import Waiting

from .request import as_request


class PolicyQueue(RequestQueue):  # type: ignore[misc]  # vLLM is not typed here
    """usage: the share of KV that is taken; pool_tokens: of KV there are. Times in s since it was made, by `clock`."""

    def __init__(self, policy: Policy, usage: Callable[[], float], pool_tokens: int, max_num_seqs: int) -> None:
        self.policy, self.pool_tokens, self._usage, self.max_num_seqs = policy, pool_tokens, usage, max_num_seqs
        self.clock: Callable[[], float] = time.time  # vLLM's arrival times are on it
        self._start = self.clock()
        self.now = self.step_time = 0.0
        self.step = 0  # decode steps
        self._in_flight = 0  # steps scheduled that have not ended
        self._mark = 0.0  # when the first of them began, or the one before it ended
        self._num = 0  # requests so far
        self._ours: dict[str, Request] = {}
        self._theirs: dict[Request, VllmRequest] = {}
        self._heap = Waiting()
        self._batch: dict[Request, None] = {}  # admitted, prefilling or decoding
        self._prefilling: dict[Request, None] = {}  # of these, who has had no token since
        self._popped: Request | None = None  # not known yet what for
        self._aside: list[Request] = []  # skipped by vLLM in this step
        self._order: Iterator[Request] | None = None  # of this step, where the policy orders otherwise than by key
        self._first: Request | None = None  # what it has said and is not let in yet
        self._epoch = policy.key_epoch(self)
        self._orders, self._admits = overrides(policy, "order"), overrides(policy, "admit")

    # --- what a policy may know (View) --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._heap)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def free_tokens(self) -> int:
        return round(self.pool_tokens * (1.0 - self._usage()))

    def generated(self, req: Request) -> int:
        return int(self._theirs[req].num_output_tokens)

    def computed(self, req: Request) -> int:
        return int(self._theirs[req].num_computed_tokens)

    def client_running(self, client: str | None) -> int:
        return sum(r.client == client for r in self._batch)

    # --- a step of vLLM -----------------------------------------------------------------------------------------------

    def begin(self, ended: Iterable[str]) -> None:
        """Before a step is scheduled: tell the policy who ended, by id, and look at keys anew."""
        self._tick()
        self._end_all(ended)
        if not self._in_flight:
            self._mark = self.now
        if (epoch := self.policy.key_epoch(self)) != self._epoch:
            self._epoch = epoch
            self._heap.rekey(lambda r: self.policy.key(r, self))
        for req in self.policy.turned(self):
            if req._phase == Phase.WAITING:
                self._heap.remove(req)
                self._push(req)
        self._order = self._first = None

    def scheduled(self, ran: bool) -> None:
        """The step is scheduled; `ran`: there was work for it."""
        self._settle()
        self._in_flight += ran

    def ended(self, ran: bool, ended: Iterable[str]) -> None:
        """What came of a step is known: tell the policy of it, and who ended with it, before anybody else arrives."""
        self._tick()
        if ran:
            self._in_flight -= 1
            self.step_time, self._mark = self.now - self._mark, self.now
            self.step += len(self._batch) > len(self._prefilling)
            for req in [r for r in self._prefilling if self.generated(r) > r._generated]:
                del self._prefilling[req]
                req._phase = Phase.DECODING
            self.policy.on_steps(1, self)
        self._end_all(ended)

    def _tick(self) -> None:
        self.now = max(self.now, self.clock() - self._start)

    def _end_all(self, ended: Iterable[str]) -> None:
        gone = [self._ours[i] for i in ended if i in self._ours]
        for req in sorted(gone, key=lambda r: r.rid):  # `ended` is a set
            if self._theirs[req].is_finished():  # else it is another one by the same id
                self._end(req)

    def _settle(self) -> None:
        req, self._popped = self._popped, None
        if req is None:
            return
        if self._theirs[req].status != RequestStatus.RUNNING:
            self._aside.append(req)
            return
        req._generated = self.generated(req)
        self.policy.on_schedule(req, self)
        req._phase = Phase.PREFILLING
        self._batch[req] = self._prefilling[req] = None

    def _end(self, req: Request) -> None:
        self._batch.pop(req, None)
        self._prefilling.pop(req, None)
        req._phase = Phase.FINISHED
        self.policy.on_finish(req)
        del self._ours[self._theirs.pop(req).request_id]

    def _push(self, req: Request) -> None:
        self._heap.push(req, self.policy.key(req, self))

    def _next(self) -> Request | None:
        """Who is next in order."""
        self._settle()
        if not self._orders:
            return self._heap.peek()
        if self._first is None:
            if self._order is None:
                self._order = self.policy.order(self._heap, self)
            self._first = next((r for r in self._order if r not in self._aside), None)
        return self._first

    # --- vLLM's queue -------------------------------------------------------------------------------------------------

    def add_request(self, request: VllmRequest) -> None:
        known = self._ours.get(request.request_id)
        if known is not None:  # the id of one that has ended, or a session's that goes on: another request to the policy
            self._end(known)
        self._tick()
        self._num += 1
        req = as_request(request, self._num, self._start, self.now)
        self._ours[request.request_id], self._theirs[req] = req, request
        req._entry, req._phase = self._num, Phase.WAITING
        self.policy.on_arrival(req)
        self._push(req)

    def prepend_request(self, request: VllmRequest) -> None:
        """Back comes who was preempted, or set aside: to its place in order."""
        self._settle()
        req = self._ours[request.request_id]
        if req in self._batch:
            del self._batch[req]
            self._prefilling.pop(req, None)
            req._phase = Phase.WAITING
            self.policy.on_preempt(req, self)
        elif req in self._aside:
            self._aside.remove(req)
        self._push(req)

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        for request in requests:
            self.prepend_request(request)

    def __bool__(self) -> bool:
        """Whether somebody may be admitted: vLLM stops looking where nobody may."""
        req = self._next()
        return req is not None and (not self._admits or self.policy.admit(req, self))

    def peek_request(self) -> VllmRequest:
        req = self._next()
        if req is None:
            raise IndexError("peek from an empty queue")
        return self._theirs[req]

    def pop_request(self) -> VllmRequest:
        request = self.peek_request()
        self._popped = self._ours[request.request_id]
        self._heap.remove(self._popped)
        self._first = None
        return request

    def remove_request(self, request: VllmRequest) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        """Whoever of them waits here; `begin` is told that they ended."""
        for req in (self._ours.get(r.request_id) for r in requests):
            if req is not None and req._phase == Phase.WAITING:
                self._heap.remove(req)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[VllmRequest]:
        """By key."""
        rows: list[Any] = sorted(self._heap, key=lambda r: (self.policy.key(r, self), r.arrival, r._entry))
        return (self._theirs[r] for r in rows)
