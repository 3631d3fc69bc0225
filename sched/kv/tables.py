"""BlockTables: which blocks the KV of each request lies in, for an engine that has memory behind its counts.

A KVCache that keeps tables moves ids wherever it moves counts. Growth while decoding is the one thing that it only counts: who
executes takes a row's next block by `grow`, in the step that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Request


class BlockTables:
    """`free`: ids that nobody has, the next to be taken last."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self._of: dict[Request, list[int]] = {}

    def of(self, req: Request) -> list[int]:
        """The blocks of `req`, in the order of its tokens; not to be changed."""
        return self._of[req]

    def admit(self, req: Request, shared: Sequence[int], num_own: int) -> None:
        """`req` starts with `shared` blocks of the prefix index and `num_own` of its own behind them."""
        self._of[req] = [*shared, *self._take(num_own)]

    def grow(self, req: Request) -> int:
        """One block more for `req`; returns its id."""
        (block,) = self._take(1)
        self._of[req].append(block)
        return block

    def share(self, req: Request, at: int, shared: Sequence[int]) -> None:
        """From block `at` on, those of `req` go back and `shared` ones, with the same in them, take their place."""
        table = self._of[req]
        self.free += table[at : at + len(shared)]
        table[at : at + len(shared)] = shared

    def release(self, req: Request, num_indexed: int = 0) -> None:
        """Give back the blocks of `req`, but for the first `num_indexed`, which the prefix index has."""
        self.free += self._of.pop(req)[num_indexed:]

    def give(self, blocks: Iterable[int]) -> None:
        """Blocks that the prefix index has evicted."""
        self.free += blocks

    def _take(self, num: int) -> list[int]:
        if num > len(self.free):
            raise AssertionError(f"{num} blocks to take, {len(self.free)} free: the counts let more in than there is")
        if not num:
            return []
        taken = self.free[-num:]
        del self.free[-num:]
        return taken[::-1]

    def check(self, num_free: int, indexed: Sequence[int], num_indexed: Iterable[tuple[Request, int]]) -> None:
        """Assert that every block is in one place: free, in the prefix index, or one request's own. num_indexed: for each
        request that holds KV, how many of its first blocks are the index's."""
        places = [*self.free, *indexed]
        holders = dict(num_indexed)
        if holders.keys() != self._of.keys():
            raise AssertionError(f"{len(self._of)} requests have block tables, {len(holders)} hold KV")
        known = set(indexed)
        for req, num in holders.items():
            table = self._of[req]
            places += table[num:]
            if not known.issuperset(table[:num]):
                raise AssertionError(f"request {req.rid} shares blocks that the prefix index does not have")
        if len(self.free) != num_free:
            raise AssertionError(f"{len(self.free)} blocks are free, counted {num_free}")
        if sorted(places) != list(range(self.num_blocks)):
            raise AssertionError(f"{len(places)} blocks in all places, {self.num_blocks} there are, or one is in two places")
