"""Kinetic: the first of many lines a x + b at a time that only moves on, while lines come and go.

A tournament in a binary tree: each node knows who of its two wins now, and until when that is sure. A question looks only at
the nodes where that has run out, or where somebody came or went since: O(log n) for each change, and each pair of winners is
compared again only when they meet.
"""

from __future__ import annotations

from ..policy import INF
from ..request import Request

Line = tuple[float, float, int, Request]  # (start s, size, order of entry, whose)
STALE = -INF


class Kinetic:
    """Requests by (time - start) / size, greatest first; ties by start, then by order of entry. Times asked must not fall."""

    def __init__(self) -> None:
        self._width = 1  # leaves: a power of two
        self._best: list[Line | None] = [None, None]  # by node: 1 is the root, 2n and 2n + 1 stand below n
        self._until = [INF, INF]
        self._leaf: dict[int, int] = {}  # rid -> node
        self._free = [1]

    def __len__(self) -> int:
        return len(self._leaf)

    def __contains__(self, rid: int) -> bool:
        return rid in self._leaf

    def add(self, req: Request, start: float, size: float, entry: int) -> None:
        """size > 0."""
        if not self._free:
            self._grow()
        node = self._leaf[req.rid] = self._free.pop()
        self._set(node, (start, size, entry, req))

    def remove(self, rid: int) -> None:
        """A no-op for one that is not there."""
        node = self._leaf.pop(rid, None)
        if node is not None:
            self._free.append(node)
            self._set(node, None)

    def best(self, time: float) -> Request | None:
        """The first at `time`, or None."""
        if self._until[1] <= time:
            self._refresh(1, time)
        line = self._best[1]
        return None if line is None else line[3]

    def until(self, time: float) -> float:
        """When `best` will be another, if nobody comes or goes; early is possible, late is not. Infinity: never."""
        self.best(time)
        return self._until[1]

    def _set(self, leaf: int, line: Line | None) -> None:
        self._best[leaf] = line
        node = leaf >> 1
        while node and self._until[node] != STALE:
            self._until[node] = STALE
            node >>= 1

    def _refresh(self, node: int, time: float) -> None:
        """The winner of `node` at `time`. Mutates the nodes below whose winner is not sure."""
        best, until = self._best, self._until
        left, right = 2 * node, 2 * node + 1
        if until[left] <= time:
            self._refresh(left, time)
        if until[right] <= time:
            self._refresh(right, time)
        one, two = best[left], best[right]
        sure = min(until[left], until[right])
        if one is None or two is None:
            best[node], until[node] = one or two, sure
            return
        ahead, behind = (two, one) if _before(two, one, time) else (one, two)
        if behind[1] < ahead[1]:  # smaller, so its ratio rises faster
            meet = (behind[0] * ahead[1] - ahead[0] * behind[1]) / (ahead[1] - behind[1])
            sure = min(sure, meet)
        best[node], until[node] = ahead, sure

    def _grow(self) -> None:
        lines = [line for line in self._best[self._width :] if line is not None]
        width = self._width = 2 * self._width
        self._best = [None] * width + lines + [None] * (width - len(lines))
        self._until = [STALE] * width + [INF] * width
        self._leaf = {line[3].rid: width + i for i, line in enumerate(lines)}
        self._free = list(range(2 * width - 1, width + len(lines) - 1, -1))


def _before(one: Line, two: Line, time: float) -> bool:
    """Whether `one` goes before `two` at `time`."""
    a, b = (time - one[0]) / one[1], (time - two[0]) / two[1]
    return a > b if a != b else one[::2] < two[::2]
