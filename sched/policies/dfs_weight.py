"""DFS-weight: cached prefixes depth first, the branch that most requests wait for first (SGLang, NeurIPS 2024, section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request


class DFSWeight(Policy):
    """Each waiting request stands in the tree of cached prefixes where its match ends; a branch weighs as many requests as
    stand in it. Depth first, heavier branches first, equal ones by their first arrival; a node's own requests after those
    below it, by arrival. So those who share a prefix go one after the other, and it is not evicted in between. Non-preemptive.

    piece: tokens of a piece that `block_hashes` name. As released it knows no bound on the queue: a plan costs O(waiting).
    """

    needs = frozenset({"cached_len"})

    def __init__(self, piece: int = 16) -> None:
        if piece < 1:
            raise ValueError(f"piece={piece} tokens, the least is 1")
        self.piece = piece

    def key(self, req: Request, view: View) -> float:
        return req.arrival

    def order(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
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

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF
