"""Paged KV for models whose layers attend differently far back: layers with a sliding window free what they have passed.

Layers are cut into slices of equally many, each with a block table of its own over one pool; a block holds block_size tokens of
one slice (after vLLM's hybrid memory allocator and Jenga, SOSP 2025). A decoder takes a block per slice whenever a token opens
one, and gives one back per window slice block_size steps apart: two histograms by phase, so that no request is searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import gcd
from typing import TYPE_CHECKING

from ..policy import FOREVER
from .paged import Paged
from .tables import BlockTables

if TYPE_CHECKING:
    from ..request import Request


class Grouped(Paged):
    """groups: (number of layers, window in tokens or None) of each kind of layer. layers_per_block: layers a slice, by default
    the greatest common divisor of the numbers of layers; where it does not divide one, that kind's last slice is padded.
    num_tokens: tokens of KV of all layers that the memory would hold if nothing were freed. windows: of each slice.

    A window of w tokens: a token attends itself and the w - 1 before. While a prompt is prefilled, a window slice holds what it
    still attends and the longest chunk beside, rounded up to blocks; so that is reserved, not the prompt.
    """

    def __init__(
        self,
        num_tokens: int,
        groups: Sequence[Sequence[int | None]],
        block_size: int = 16,
        watermark: float = 0.01,
        layers_per_block: int | None = None,
    ) -> None:
        kinds = _kinds(groups)
        layers = layers_per_block or gcd(*(num for num, _ in kinds))
        if layers < 1:
            raise ValueError(f"layers_per_block {layers} must be at least 1")
        self.windows = [window for num, window in kinds for _ in range(-(-num // layers))]
        self.num_layers = sum(num for num, _ in kinds)
        self.layers_per_block = layers
        super().__init__(self.slice_tokens(num_tokens), block_size, watermark)
        self.block_tokens = block_size * layers / self.num_layers
        self.slices = len(self.windows)
        self.frees = any(window is not None for window in self.windows)
        self._full = self.windows.count(None)
        self._widths = {w: self.windows.count(w) for w in self.windows if w is not None}  # window -> slices
        self._most = dict.fromkeys(self._widths, FOREVER)  # window -> the most blocks that a slice ever holds
        self._chunk_len = 0
        self._frees = [0] * block_size  # blocks that decoders free at the end of decode step i mod block_size
        self._step = 0  # decode steps so far
        self._starts: dict[int, int] = {}  # decode step -> blocks that decoders free every block_size steps from then on
        self._first: list[int] = []  # the steps in `_starts`, as a heap; stale ones among them

    @classmethod
    def of_layers(cls, windows: Sequence[int | None], num_tokens: int, **options: float) -> Grouped:
        """For a model whose layer i has the window windows[i]; options as of the class."""
        kinds = dict.fromkeys(windows)
        return cls(num_tokens, [(list(windows).count(w), w) for w in kinds], **options)  # type: ignore[arg-type]

    def place(self, windows: Sequence[int | None]) -> list[tuple[int, int]]:
        """For each layer of a model, by its window: (its slice, which of the layers_per_block pools it lies in). Layers of
        different slices share a pool, as no two slices share a block. Raises ValueError for layers of another model."""
        seen = dict.fromkeys(self.windows, 0)
        out = []
        for window in windows:
            if window not in seen:
                raise ValueError(f"a layer has the window {window}, the KV groups have {list(seen)}")
            number = seen[window]
            seen[window] += 1
            out.append((self.windows.index(window) + number // self.layers_per_block, number % self.layers_per_block))
        for window, num in seen.items():
            there = self.windows.count(window)
            if -(-num // self.layers_per_block) != there:
                raise ValueError(f"{num} layers with the window {window} do not fit {there} slices of {self.layers_per_block}")
        return out

    def slice_tokens(self, tokens: int) -> int:
        return tokens * self.num_layers // self.layers_per_block

    # --- what a request holds -------------------------------------------------------------------------------------------

    def use_chunks(self, tokens: int) -> None:
        """Raises ValueError if something is held by the measure of another length."""
        if self._chunk_len not in (0, tokens) and self.free != self.num_blocks:
            raise ValueError(f"chunks of {self._chunk_len} tokens are in use; {tokens} cannot take their place")
        self._chunk_len = tokens
        self._most = {w: -(-(w + tokens - 2) // self.block_size) + 1 for w in self._widths}  # at any place in a block

    def _passed(self, window: int, computed: int) -> int:
        """Leading blocks that no token from `computed` on attends."""
        return max(computed - window + 1, 0) // self.block_size

    def _computed(self, req: Request, tokens: int) -> int:
        return tokens if req._prefilled else min(req._computed, tokens)

    def _held(self, computed: int, tokens: int) -> int:
        """Blocks with `computed` tokens there and room for a prefill up to `tokens`."""
        blocks = -(-tokens // self.block_size)
        return self._full * blocks + sum(
            width * min(blocks - self._passed(w, computed), self._most[w]) for w, width in self._widths.items()
        )

    def blocks(self, tokens: int) -> int:
        blocks = -(-tokens // self.block_size)
        return self.slices * blocks - sum(width * self._passed(w, tokens) for w, width in self._widths.items())

    def blocks_at_end(self, req: Request) -> int:
        """The most it ever holds: prefilled anew with all tokens but one generated."""
        return self._held(0, req.prompt_len + req.max_new_tokens - 1)

    def blocks_to_admit(self, req: Request, tokens: int) -> int:
        return self.held(req, tokens)

    def held(self, req: Request, tokens: int) -> int:
        return self._held(self._computed(req, tokens), tokens)

    def opens(self, req: Request, tokens: int) -> int:
        return 0 if tokens % self.block_size else self.slices

    @property
    def free_tokens(self) -> int:
        return self.free // self.slices * self.block_size

    # --- taking and giving ------------------------------------------------------------------------------------------------

    def allocate(self, req: Request, tokens: int) -> int:
        self.free -= self.held(req, tokens)
        for group in self.groups:
            first, num = self._span(group, self._computed(req, tokens), tokens)
            group.admit(req, [-1] * first, num)
        return 0

    def enter(self, req: Request, computed: int) -> int:
        """A chunk is there: what its successors do not attend goes back, but for what the longest of them may need."""
        tokens = req.prompt_len + req._generated
        freed = self._held(req._computed, tokens) - self._held(computed, tokens)
        self.free += freed
        for group in self.groups:
            group.trim(req, computed, sum(self._span(group, computed, tokens)))
        return freed

    def release(self, req: Request, tokens: int) -> int:
        blocks = self.held(req, tokens)
        self.free += blocks
        for group in self.groups:
            group.release(req)
        return blocks

    # --- decoding -----------------------------------------------------------------------------------------------------------

    def growth(self) -> int:
        return self.slices * self._crossings[self._phase]

    def room(self, blocks: int | None = None) -> int:
        """What those will free who have not begun to is not counted: early is right."""
        left, size = self.free if blocks is None else blocks, self.block_size
        needs, net = [], 0  # blocks that are needed up to each of block_size steps, less those freed before it
        for i in range(self._phase, self._phase + size):
            net += self.slices * self._crossings[i % size]
            needs.append(net)
            net -= self._frees[i % size]
        most = max(needs)
        if net == 0 and most <= left:  # every decoder gives back what it takes
            return FOREVER
        periods = max((left - most) // net + 1, 0) if net else 0
        left -= periods * net
        return periods * size + next(k for k, need in enumerate(needs) if need > left)

    def steps_to_free(self) -> int:
        for i in range(self.block_size):
            if self._frees[(self._phase + i) % self.block_size]:
                return min(i + 1, self._next_start() - self._step)
        return self._next_start() - self._step

    def join(self, tokens: int) -> None:
        super().join(tokens)
        self._count(tokens, 1)

    def leave(self, tokens: int) -> None:
        super().leave(tokens)
        self._count(tokens, -1)

    def _count(self, tokens: int, sign: int) -> None:
        """A window slice first frees a block after window - 1 + block_size tokens."""
        for window, width in self._widths.items():
            to_start = window - 1 - tokens
            if to_start <= 0:
                self._frees[(self._step + to_start - 1) % self.block_size] += sign * width
                continue
            at = self._step + to_start
            if at not in self._starts:
                self._starts[at] = 0
                heappush(self._first, at)
            self._starts[at] += sign * width
            if not self._starts[at]:
                del self._starts[at]

    def _next_start(self) -> int:
        while self._first and self._first[0] not in self._starts:
            heappop(self._first)
        return self._first[0] if self._first else self._step + FOREVER

    def advance(self, num_steps: int) -> None:
        size, frees = self.block_size, self._frees
        while num_steps:
            steps = min(num_steps, self._next_start() - self._step)
            free, periods, end = self.free, steps // size, self._phase + steps % size
            freed = periods * sum(frees) + sum(frees[self._phase : end]) + sum(frees[: max(end - size, 0)])
            super().advance(steps)
            self.free = free - self.slices * (free - self.free) + freed
            num_steps -= steps
            self._step += steps
            self.passed = frees[self._phase - 1]
            if weight := self._starts.pop(self._step, 0):
                frees[self._phase - 1] += weight

    # --- ids --------------------------------------------------------------------------------------------------------------

    def keep_tables(self) -> BlockTables:
        """`groups` has a table for each slice, over one pool; `tables` is the first of them."""
        self.tables = super().keep_tables()
        free, num, size = self.tables.free, self.num_blocks, self.block_size
        self.groups = tuple(BlockTables(num, window, size, free) for window in self.windows)
        self.tables = self.groups[0]
        return self.tables

    def lies_in(self, req: Request, tokens: int) -> Sequence[int]:
        end = -(-tokens // self.block_size)
        return [block for group in self.groups for block in group.of(req)[group.passed(tokens) : end]]

    def _span(self, group: BlockTables, computed: int, tokens: int) -> tuple[int, int]:
        """(blocks passed, blocks held) of one slice with `computed` tokens there and room for a prefill up to `tokens`."""
        first, blocks = group.passed(computed), -(-tokens // self.block_size)
        return first, blocks - first if group.window is None else min(blocks - first, self._most[group.window])

    def _check_tables(self, holders: Sequence[tuple[Request, int]], tables: BlockTables) -> None:
        places = [*tables.free]
        for group in self.groups:
            if group.num_requests != len(holders):
                raise AssertionError(f"{group.num_requests} requests have block tables, {len(holders)} hold KV")
            for req, tokens in holders:
                first, num = self._span(group, self._computed(req, tokens), tokens)
                table = group.of(req)
                if table[:first] != [-1] * first or len(table) != first + num:
                    raise AssertionError(f"request {req.rid} has blocks {table}, holds {num} behind {first} passed")
                places += table[first:]
        if len(tables.free) != self.free or sorted(places) != list(range(self.num_blocks)):
            raise AssertionError(f"{len(tables.free)} blocks are free, counted {self.free}; {len(places)} in all places")


def _kinds(groups: Sequence[Sequence[int | None]]) -> list[tuple[int, int | None]]:
    """Raises ValueError for what is no (number of layers, window)."""
    kinds: list[tuple[int, int | None]] = []
    for num, window in groups:
        if num is None or num < 1 or (window is not None and window < 1):
            raise ValueError(f"KV group of {num} layers with the window {window}: both must be at least 1, or no window")
        kinds.append((num, window))
    if not kinds or len({window for _, window in kinds}) < len(kinds):
        raise ValueError(f"KV groups {kinds}: at least one, and one for each window")
    return kinds
