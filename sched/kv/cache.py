"""KVCache: the only door to KV memory accounting.

A request holds blocks from `allocate` to `release`. While it decodes (`join` to `leave`) it grows by one token a step, and
nobody counts per request: `room` says how many steps fit, `advance` books them. A cache that keeps what requests leave behind
says so by `indexes`; then `enter` tells it what has been computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..policy import FOREVER, INF
from .tables import BlockTables

if TYPE_CHECKING:
    from ..plan import Copy
    from ..request import Request


class KVCache(ABC):
    """Memory of one device in blocks of `block_size` tokens. `free` is exact at every step boundary.

    Token counts: `tokens` is what the KV of a request holds: prompt + n - 1 after n generated tokens.
    indexes: whether it keeps prefixes for reuse. next_expiry: when the next lease ends (s). epoch: changes whenever what
    `lookup` says may. tables: which blocks each request has, for an engine with memory behind the counts; None: only counts.
    groups: those of each group of layers, where layers keep different tokens; else `tables` alone. block_tokens: tokens of all
    layers that a block has memory for. copies: those of blocks that no plan has told yet. frees: whether blocks come free while
    a request goes on. passed: how many did in the last step of the last `advance`.
    """

    def __init__(self, num_tokens: int, block_size: int, watermark: float) -> None:
        if block_size < 1 or num_tokens < block_size:
            raise ValueError(f"a KV pool of {num_tokens} tokens does not hold one block of {block_size}")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark {watermark} is not within [0, 1)")
        self.block_size = block_size
        self.num_blocks = num_tokens // block_size
        self.watermark_blocks = int(watermark * self.num_blocks)
        self.free = self.num_blocks
        self.indexes = False
        self.next_expiry = INF
        self.epoch = 0
        self.block_tokens: float = block_size
        self.copies: dict[Request, Copy] = {}
        self.frees = False
        self.passed = 0
        self.tables: BlockTables | None = None
        self.groups: tuple[BlockTables, ...] = ()

    def keep_tables(self) -> BlockTables:
        """Keep `tables` from now on. Raises ValueError once something is held."""
        if self.free != self.num_blocks:
            raise ValueError(f"{self.num_blocks - self.free} KV blocks are held already: keep tables from the start")
        self.tables = BlockTables(self.num_blocks)
        self.groups = (self.tables,)
        return self.tables

    def slice_tokens(self, tokens: int) -> int:
        """Tokens that blocks hold in the memory of `tokens` tokens of all layers."""
        return tokens

    def use_chunks(self, tokens: int) -> None:  # noqa: B027
        """No chunk of a prefill is longer than `tokens`."""

    def blocks(self, tokens: int) -> int:
        """Blocks in which the KV of a request with `tokens` tokens computed lies."""
        return -(-tokens // self.block_size)

    @property
    def evictable(self) -> int:
        """Blocks of prefixes that nobody uses; they go when room is needed."""
        return 0

    @property
    def pinned(self) -> int:
        """Blocks under a lease."""
        return 0

    @property
    def in_use(self) -> int:
        """Blocks held or pinned, a shared one counted once."""
        return self.num_blocks - self.free - self.evictable

    @property
    def free_tokens(self) -> int:
        return self.free * self.block_size

    def use_hashes(self, tokens: int) -> None:  # noqa: B027
        """Requests name the pieces of their prompts, `tokens` tokens each (Request.block_hashes)."""

    def lookup(self, req: Request) -> int:
        """Tokens of `req`'s prompt that are cached already."""
        return 0

    def cached(self, req: Request, tokens: int) -> int:
        """Tokens that admission of `req` with `tokens` (prompt + generated) would find cached."""
        return 0

    @abstractmethod
    def blocks_at_end(self, req: Request) -> int:
        """Blocks `req` holds if it generates max_new_tokens: the door's question."""

    @abstractmethod
    def blocks_to_admit(self, req: Request, tokens: int) -> int:
        """Blocks that admission with `tokens` (prompt + generated) takes, of those free and evictable."""

    @abstractmethod
    def held(self, req: Request, tokens: int) -> int:
        """Blocks `req` holds while its KV has room for `tokens`."""

    def opens(self, req: Request, tokens: int) -> int:
        """Blocks that the next token of `req` takes when its KV holds `tokens`."""
        return self.held(req, tokens + 1) - self.held(req, tokens)

    def lies_in(self, req: Request, tokens: int) -> Sequence[int]:
        """The ids of those `blocks` of `req`, in an order that `tokens` alone decides; none where ids are not kept."""
        return () if self.tables is None else self.tables.of(req)[: self.blocks(tokens)]

    def fits(self, blocks: int) -> bool:
        """Do `blocks` more fit above the watermark, with every decoder still able to grow by a token?"""
        return self.short_of(blocks + self.watermark_blocks) <= 0

    def short_of(self, blocks: int) -> int:
        """How many blocks are missing for `blocks` more, with every decoder still able to grow by a token; 0 or less: none."""
        return blocks + self.growth() - self.free

    def brings(
        self, req: Request, tokens: int, others: Sequence[Request] = (), incoming: tuple[Request, int] | None = None
    ) -> int:
        """Blocks that come free, or evictable, for `incoming` (request, tokens) if `req` gives up its KV after `others` did."""
        return self.held(req, tokens)

    def allocate(self, req: Request, tokens: int) -> int:
        """Take the blocks for `req`'s prefill of `tokens`; returns how many of those tokens are cached. Mutates `free`."""
        blocks = self.blocks_to_admit(req, tokens)
        self.free -= blocks
        if self.tables is not None:
            self.tables.admit(req, (), blocks)
        return 0

    def enter(self, req: Request, computed: int) -> int:
        """The KV of the first `computed` tokens of `req` (prompt + generated) is there, for others to use. Returns how many
        blocks fewer are in use, as others hold the same or nobody will attend them. Mutates `free`."""
        return 0

    def release(self, req: Request, tokens: int) -> int:
        """Give back what `req` holds; returns the number of blocks that nobody holds now. Mutates `free`."""
        blocks = self.held(req, tokens)
        self.free += blocks
        if self.tables is not None:
            self.tables.release(req)
        return blocks

    @abstractmethod
    def growth(self) -> int:
        """Blocks the decoders need for their next step."""

    @abstractmethod
    def room(self, blocks: int | None = None) -> int:
        """Decode steps that fit into `blocks` (None: all that can be had)."""

    def steps_to_free(self) -> int:
        """Decode steps to the end of the first that frees blocks."""
        return FOREVER

    @abstractmethod
    def join(self, tokens: int) -> None:
        """A request whose KV holds `tokens` starts to decode."""

    @abstractmethod
    def leave(self, tokens: int) -> None:
        """A request whose KV holds `tokens` now stops decoding (it still holds its blocks)."""

    @abstractmethod
    def advance(self, num_steps: int) -> None:
        """All decoders grow by `num_steps` tokens. Mutates `free`."""

    def ready(self) -> bool:
        """Have free blocks, not only evictable ones, for the decoders' next step; returns whether something was evicted.
        Mutates `free`."""
        return False

    def expire(self, now: float) -> None:  # noqa: B027
        """End the leases that last until `now` (s) or less."""

    def check(self, holders: Iterable[tuple[Request, int]]) -> None:
        """Assert that free + held = total; `holders` are (request, tokens it has room for)."""
        holders = list(holders)
        held = sum(self.held(req, tokens) for req, tokens in holders)
        if self.free < 0 or self.free + held != self.num_blocks:
            raise AssertionError(f"KV blocks: free {self.free} + held {held} != total {self.num_blocks}")
        if self.tables is not None:
            self._check_tables(holders, self.tables)

    def _check_tables(self, holders: Sequence[tuple[Request, int]], tables: BlockTables) -> None:
        tables.check(self.free, (), ((req, self.held(req, tokens), ()) for req, tokens in holders))
