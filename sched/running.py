"""Running: the decode set with lazy progress.

A decoding request stores the decode step at which it joined; what it has generated is derived. A step costs O(1), whatever
the batch, and k steps cost as much as one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, cast

from .last import negated, popped
from .policy import INF, Policy
from .ports import View
from .request import Request


class Running:
    """Decoding requests, their context, and who among them has the greatest key.

    Two lazy-deletion heaps by greatest key: `moving` for keys that follow the policy's drift (stored as key - drift x step,
    so that all move together), `still` for the others. `turns` holds when a key stops moving as it does.
    """

    __slots__ = ("_moving", "_policy", "_still", "_view", "context_tokens", "members", "step", "turns", "watchers")

    def __init__(self, policy: Policy, view: View) -> None:
        self.members: dict[Request, None] = {}
        self.step = 0  # decode steps taken
        # each is told who came, went or turned, and forgets them itself; who came and went before it looked is nothing to it
        self.watchers: list[tuple[dict[Request, None], Container[Request]]] = []  # (told, whom it knows)
        self.context_tokens = 0  # tokens attended in the next decode step: sum of prompt + generated
        self._policy = policy
        self._view = view
        self._moving: list[tuple[Any, ...]] = []
        self._still: list[tuple[Any, ...]] = []
        self.turns: list[tuple[float, int, int, Request]] = []  # (decode step, entry, ticket, request)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.members)

    def join(self, req: Request) -> None:
        req._decode_from = self.step
        self.context_tokens += req.prompt_len + req._generated
        self.members[req] = None
        for told, _ in self.watchers:
            told.pop(req, None)  # in the order in which they are members
            told[req] = None
        self._store(req, req._generated)

    def leave(self, req: Request) -> None:
        """Write lazy progress back. Mutates `req`."""
        steps = self.step - req._decode_from
        req._generated += steps
        req._computed += steps
        req._decode_from = -1
        req._ticket += 1
        self.context_tokens -= req.prompt_len + req._generated
        del self.members[req]
        for told, known in self.watchers:
            if req in known:
                told[req] = None
            else:
                told.pop(req, None)

    def advance(self, num_steps: int) -> None:
        self.step += num_steps
        self.context_tokens += num_steps * len(self.members)

    def generated(self, req: Request) -> int:
        since = req._decode_from
        return req._generated if since < 0 else req._generated + self.step - since

    def _store(self, req: Request, generated: int) -> None:
        policy = self._policy
        req._ticket += 1
        turn = policy.rekey_at(req, generated)  # first: it may re-estimate, and so change the key
        key = policy.key(req, self._view)
        if policy.drift and policy.drifts(req, generated):
            entry = (-(key - policy.drift * self.step), -req.arrival, -req._entry, req._ticket, req)  # type: ignore[operator]
            heappush(self._moving, entry)
        else:
            heappush(self._still, (negated(key), -req.arrival, -req._entry, req._ticket, req))
        if turn != INF:
            heappush(self.turns, (self.step + turn - generated, req._entry, req._ticket, req))
        if len(self._moving) + len(self._still) + len(self.turns) > 4 * len(self.members) + 64:
            self._compact()

    def turn_keys(self) -> None:
        """Store anew the keys whose way of moving has changed by now."""
        turns = self.turns
        while turns and turns[0][0] <= self.step:
            _, _, ticket, req = heappop(turns)
            if ticket == req._ticket:
                self._store(req, self.generated(req))

    def turn(self, req: Request) -> None:
        """Store anew the key of one that decodes, which may have another prediction now."""
        for told, _ in self.watchers:
            told[req] = None
        self._store(req, self.generated(req))

    def steps_to_turn(self) -> float:
        """Decode steps to the next change in how a key moves."""
        turns = self.turns
        while turns and turns[0][2] != turns[0][3]._ticket:
            heappop(turns)
        return turns[0][0] - self.step if turns else INF

    def greatest(self) -> Request | None:
        """The request with the greatest (key, arrival, order of entry), or None."""
        heap = self._greatest_heap()
        return cast("Request", heap[0][4]) if heap else None

    def descending(self) -> Iterator[Request]:
        """Requests by (key, arrival, order of entry), greatest first; costs O(log batch) each. The set must not change
        before the iterator is closed or exhausted."""
        return popped(self._greatest_heap)

    def _greatest_heap(self) -> list[Any] | None:
        """The heap whose top is the greatest, stale tops dropped; None when nobody is there."""
        moving, still = self._top(self._moving), self._top(self._still)
        if moving is None:
            return self._still if still is not None else None
        if still is None or still[:3] >= (moving[0] - self._policy.drift * self.step, *moving[1:3]):
            return self._moving
        return self._still

    @staticmethod
    def _top(heap: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
        while heap:
            if heap[0][3] == heap[0][4]._ticket:
                return heap[0]
            heappop(heap)
        return None

    def rekey(self) -> None:
        """Compute all keys anew."""
        self._moving.clear()
        self._still.clear()
        self.turns.clear()
        for req in self.members:
            self._store(req, self.generated(req))

    def _compact(self) -> None:
        heaps: tuple[list[Any], ...] = (self._moving, self._still, self.turns)
        for heap in heaps:
            heap[:] = [e for e in heap if e[-2] == e[-1]._ticket]
            heapify(heap)
