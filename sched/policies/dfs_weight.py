"""DFS-weight: cached prefixes depth first, the branch that most requests wait for first (SGLang, NeurIPS 2024, section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..ports import View
from ..request import Request
from .cache_aware import CacheAware
from .sharing import RUNS


class DFSWeight(CacheAware):
    """Each waiting request stands in the tree of cached prefixes where its match ends; a branch weighs as many requests as
    stand in it. Depth first, heavier branches first, equal ones by their first arrival; a node's own requests after those
    below it, by arrival. So those who share a prefix go one after the other, and it is not evicted in between. Non-preemptive.

    piece: tokens of a piece that `block_hashes` name. The order is made anew when somebody comes, goes or is cached, in
    O(waiting). As released it knows no bound on the queue; here, while more than `max_waiting` wait, it is first come, first
    served, as LPM is there.
    """

    def __init__(self, piece: int = 16, max_waiting: int = 128) -> None:
        super().__init__(max_waiting, 0, piece)
        self._places: dict[Request, int] = {}

    def rank(self, req: Request, view: View) -> float:
        return self._places.get(req, len(self._places))  # who has just come: last, until the next plan

    def key_epoch(self, view: View) -> object:
        seen = self._seen
        super().key_epoch(view)
        if self._seen != seen:
            self._places.clear()
            if not self._falls_back:
                waiting = (req for req in self._live if req.phase not in RUNS)
                self._places |= {req: place for place, req in enumerate(self.depth_first(waiting, view))}
            self._version += 1
        return self._version

    def depth_first(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
        """`waiting` in that order."""
        paths = {r: self._path(r, view) for r in sorted(waiting, key=lambda r: (r.arrival, r._entry))}
        stack: list[tuple[list[Request], int]] = [([*paths], 0)]
        while stack:
            group, depth = stack.pop()
            if depth < 0 or len(group) == 1:
                yield from group
                continue
            own: list[Request] = []
            below: dict[int, list[Request]] = {}
            for req in group:
                path = paths[req]
                if len(path) == depth:
                    own.append(req)
                else:
                    below.setdefault(path[depth], []).append(req)
            stack.append((own, -1))
            stack += [(branch, depth + 1) for branch in sorted(reversed(below.values()), key=len)]

    def _path(self, req: Request, view: View) -> Sequence[int]:
        """Names of the pieces of its prompt that are cached."""
        return () if req.block_hashes is None else req.block_hashes[: view.cached_len(req) // self.piece]
