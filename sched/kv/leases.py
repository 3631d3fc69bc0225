"""Leases: prefixes that must not be evicted before a time, because somebody elsewhere is still to read them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from ..policy import INF
from .radix import Node


class Lease:
    """Keeps `num_tokens` tokens of one prefix from eviction until `until` (s). `live` is False once it is released, or has
    expired: what it kept may then be gone."""

    __slots__ = ("live", "node", "num_tokens", "until")

    def __init__(self, node: Node, num_tokens: int, until: float) -> None:
        self.node = node
        self.num_tokens = num_tokens
        self.until = until
        self.live = True


class Leases:
    """Live leases, the first to expire in front: a heap whose dead entries go when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Lease]] = []
        self._num = 0  # so far, the tie-breaker

    def add(self, lease: Lease) -> None:
        self._num += 1
        heappush(self._heap, (lease.until, self._num, lease))

    def first(self) -> Lease | None:
        heap = self._heap
        while heap and not heap[0][2].live:
            heappop(heap)
        return heap[0][2] if heap else None

    @property
    def next_expiry(self) -> float:
        """When the first one ends (s)."""
        lease = self.first()
        return INF if lease is None else lease.until

    def __iter__(self) -> Iterator[Lease]:
        return (lease for _, _, lease in self._heap if lease.live)
