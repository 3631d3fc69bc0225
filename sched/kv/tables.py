"""BlockTables: which blocks the KV of each request lies in, for an engine that has memory behind its counts.

A KVCache that keeps tables moves ids wherever it moves counts. Growth while decoding is the one thing that it only counts: who
executes takes a row's next block by `grow`, in the step that needs it; whoever computes that ahead looks at what is `upcoming`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Request


class BlockTables:
    """`free`: ids that nobody has, the next to be taken last; tables over one pool share it. window: tokens that a token
    attends, itself included; None: all before it."""

    def __init__(self, num_blocks: int, window: int | None = None, block_size: int = 1, free: list[int] | None = None) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self.free = list(range(num_blocks - 1, -1, -1)) if free is None else free
        self._block_size = block_size
        self._of: dict[Request, list[int]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._of)

    def of(self, req: Request) -> list[int]:
        """The blocks of `req`, in the order of its tokens, -1 for those given back; not to be changed."""
        return self._of[req]

    def admit(self, req: Request, shared: Sequence[int], num_own: int) -> None:
        """`req` starts with `shared` blocks of the prefix index and `num_own` of its own behind them."""
        self._of[req] = [*shared, *self._take(num_own)]

    def upcoming(self, num: int) -> list[int]:
        """The next `num` blocks to be taken, or as many as are free; they stay free."""
        return self.free[: -num - 1 : -1]

    def grow(self, req: Request, wanted: int | None = None) -> int:
        """One block more for `req`: `wanted`, if that is (still) free, else the next. Returns its id."""
        free = self.free
        if wanted is not None and free and free[-1] != wanted:
            at = next((i for i in range(len(free) - 1, -1, -1) if free[i] == wanted), -1)  # what came back since lies behind it
            free[at], free[-1] = free[-1], free[at]
        (block,) = self._take(1)
        self._of[req].append(block)
        return block

    def passed(self, computed: int) -> int:
        """Leading blocks that no token from `computed` on attends."""
        return 0 if self.window is None else max(computed - self.window + 1, 0) // self._block_size

    def trim(self, req: Request, computed: int, num_blocks: int = 0) -> None:
        """`req` has `computed` tokens of KV now: blocks that it has passed become -1 in its table, and go to its end until that
        has `num_blocks` entries, or back."""
        end = first = self.passed(computed)
        table = self._of[req]
        while first and table[first - 1] >= 0:
            first -= 1
        gone = table[first:end]
        table[first:end] = [-1] * len(gone)
        kept = max(num_blocks - len(table), 0)
        table += gone[:kept]
        self.free += gone[kept:]

    def share(self, req: Request, at: int, shared: Sequence[int]) -> None:
        """From block `at` on, those of `req` go back and `shared` ones, with the same in them, take their place."""
        table = self._of[req]
        self.free += table[at : at + len(shared)]
        table[at : at + len(shared)] = shared

    def release(self, req: Request, num_indexed: int = 0) -> None:
        """Give back the blocks of `req`, but for the first `num_indexed`, which the prefix index has."""
        table = self._of.pop(req)[num_indexed:]
        self.free += table if self.window is None else [block for block in table if block >= 0]

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

    def check(self, num_free: int, indexed: Sequence[int], holders: Iterable[tuple[Request, int, Sequence[int]]]) -> None:
        """Assert that every block is in one place: free, in the prefix index, or one request's own; and that tables are as
        counted. indexed: the index's blocks. holders: of each request that holds KV, how many blocks, and those of the index
        among them, which come first."""
        places, num = [*self.free, *indexed], 0
        for req, held, shared in holders:
            num += 1
            table = self._of.get(req, [])
            if len(table) != held:
                raise AssertionError(f"request {req.rid} has {len(table)} blocks in its table, holds {held}")
            if table[: len(shared)] != list(shared):
                raise AssertionError(f"request {req.rid} has blocks {table}, the prefix index {shared} for the first of them")
            places += table[len(shared) :]
        if num != len(self._of):
            raise AssertionError(f"{len(self._of)} requests have block tables, {num} hold KV")
        if len(self.free) != num_free:
            raise AssertionError(f"{len(self.free)} blocks are free, counted {num_free}")
        if sorted(places) != list(range(self.num_blocks)):
            raise AssertionError(f"{len(places)} blocks in all places, {self.num_blocks} there are, or one is in two places")
