"""Waiting: requests in policy order, as a heap whose stale entries are dropped when they surface.

The paused among them, who yield their KV from the end of that order, stand in a second heap by the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from .last import Last
from .request import Phase, Request

PAUSED = Phase.PAUSED


class Waiting:
    """A lazy-deletion heap of (key, arrival, order of entry). A request's `_ticket` tells its live entry. paused: those with KV
    that they keep off the batch."""

    __slots__ = ("_heap", "_num", "paused")

    def __init__(self) -> None:
        self._heap: list[tuple[Any, float, int, int, Request]] = []
        self._num = 0
        self.paused = Last()

    def __len__(self) -> int:
        return self._num

    def push(self, req: Request, key: Any) -> None:
        req._ticket += 1
        heappush(self._heap, (key, req.arrival, req._entry, req._ticket, req))
        self._num += 1
        if req._phase == PAUSED:
            self.paused.push(req, key)
            if len(self.paused.heap) > 2 * self._num + 64:
                self.paused.compact()

    def peek(self) -> Request | None:
        """The first in order, or None."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[3] == entry[4]._ticket:
                return entry[4]
            heappop(heap)
        return None

    def remove(self, req: Request) -> None:
        """Take `req` out; its entry goes at once when it is the first, else when it surfaces or when most entries are stale."""
        self._num -= 1
        if self._heap and self._heap[0][4] is req:
            heappop(self._heap)
        req._ticket += 1
        if len(self._heap) > 2 * self._num + 64:  # who left from the middle may never surface: behind shorter ones, say
            self._heap = [e for e in self._heap if e[3] == e[4]._ticket]
            heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return (e[4] for e in self._heap if e[3] == e[4]._ticket)

    def rekey(self, key: Any) -> None:
        """Compute all keys anew by `key(req)`."""
        self._heap = [(key(r), r.arrival, r._entry, r._ticket, r) for r in self]
        heapify(self._heap)
        if self.paused.heap:
            self.paused = Last()
            for entry in self._heap:
                if entry[4]._phase == PAUSED:
                    self.paused.push(entry[4], entry[0])
