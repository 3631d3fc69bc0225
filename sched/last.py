"""Last: requests from the end of the policy's order, as a heap whose stale entries are dropped when they surface.

A preemption hits whoever is last in order. Three sets are asked for theirs, each in O(log n): the decode set (Running, where
keys drift), the paused (Waiting, by the keys they wait by), and those in mid-prefill (Yielding, whose heap lasts for a plan).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import neg
from typing import Any

from .request import Request

Entry = tuple[Any, float, int, int, Request]  # (minus the key, minus arrival, minus order of entry, ticket, whose)


def negated(key: Any) -> Any:
    return tuple(map(neg, key)) if isinstance(key, tuple) else -key


def popped(first: Callable[[], list[Entry] | None]) -> Iterator[Request]:
    """Whoever stands on top of the heap that `first` names, again and again; an O(log n) each. What was popped is pushed back
    when the iterator is closed or exhausted, and before that nobody may come or go."""
    taken: list[tuple[list[Entry], Entry]] = []
    try:
        while heap := first():
            entry = heappop(heap)
            taken.append((heap, entry))
            yield entry[4]
    finally:
        for heap, entry in taken:
            heappush(heap, entry)


class Last:
    """A lazy-deletion heap, the last in order first. An entry is live while its request's `_ticket` is what it was then."""

    __slots__ = ("heap",)

    def __init__(self) -> None:
        self.heap: list[Entry] = []

    def push(self, req: Request, key: Any) -> None:
        heappush(self.heap, (negated(key), -req.arrival, -req._entry, req._ticket, req))

    def top(self) -> Request | None:
        """The last in order, or None."""
        heap = self._live()
        return heap[0][4] if heap else None

    def descending(self) -> Iterator[Request]:
        """The last in order first; as `popped`."""
        return popped(self._live)

    def compact(self) -> None:
        """Drop all that is stale."""
        self.heap[:] = [entry for entry in self.heap if entry[3] == entry[4]._ticket]
        heapify(self.heap)

    def _live(self) -> list[Entry]:
        """The heap, its stale tops dropped; empty when nobody is there."""
        heap = self.heap
        while heap and heap[0][3] != heap[0][4]._ticket:
            heappop(heap)
        return heap
