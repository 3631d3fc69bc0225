"""Rows: the decoding requests in arrays, and the Batch that one plan makes of them and its chunks.

A row costs something when it joins, opens a block or leaves; a step costs a few array operations, whatever the batch.
Shapes: D decoding rows, B block-table width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lengthwise.sched import Chunk, Request
from lengthwise.sched.kv import BlockTables

from .batch import Batch, Placed, moved
from .generation import Generation


class Rows:
    """`members[i]` is the generation in row i; rows move when one leaves. Grows block tables as rows need it, and gives back
    blocks that a window has passed. tables: one for each group of layers, or one for all `num_groups`."""

    def __init__(
        self, tables: Sequence[BlockTables], block_size: int, max_rows: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self.members: list[Generation] = []
        self._tables = tuple(tables)
        self._windows = [(table, table.window) for table in tables if table.window is not None]
        self._block_size = block_size
        self._device = device
        self._num_groups = num_groups
        self._row: dict[Request, int] = {}
        self._token = np.zeros(max_rows, np.int64)  # the last token emitted: what the row feeds in next
        self._position = np.zeros(max_rows, np.int64)  # where that token stands
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._blocks = np.zeros((max_rows, len(self._tables), 16), np.int32)

    def __len__(self) -> int:
        return len(self.members)

    def join(self, generation: Generation) -> None:
        """Its KV is complete but for its last token."""
        row, request = len(self.members), generation.request
        num = len(self._tables[0].of(request))
        self._make_wide(num)
        if row == len(self._token):
            self._make_long()
        self.members.append(generation)
        self._row[request] = row
        self._token[row] = generation.tokens[-1]
        self._position[row] = len(generation.tokens) - 1
        self._num_blocks[row] = num
        for g, tables in enumerate(self._tables):
            self._blocks[row, g, :num] = tables.of(request)

    def by_joining(self, requests: Collection[Request]) -> list[Request]:
        """Those of the rows that are among `requests`, in the order in which they joined."""
        return [request for request in self._row if request in requests] if requests else []

    def leave(self, request: Request) -> None:
        """The last row takes its place."""
        row, last = self._row.pop(request), self.members.pop()
        if last.request is not request:
            end = len(self.members)
            self.members[row] = last
            self._row[last.request] = row
            for column in (self._token, self._position, self._num_blocks, self._blocks):
                column[row] = column[end]

    def advance(self, tokens: Sequence[int]) -> None:
        """Every row has emitted one token."""
        num = len(self.members)
        self._token[:num] = tokens
        self._position[:num] += 1
        for tables, window in self._windows:
            passed = self._position[:num] - window + 1
            for row in np.flatnonzero((passed > 0) & (passed % self._block_size == 0)).tolist():
                tables.trim(self.members[row].request, int(self._position[row]))

    def batch(self, num_decode: int, num_padding: int, chunks: Sequence[Chunk], texts: Sequence[Sequence[int]]) -> Batch:
        """What one step computes: all rows (num_decode of them, or none if that is 0), padding, and chunks. texts: of each
        chunk's request, prompt and answer. Mutates the block tables of rows that open a block."""
        if num_decode:
            if num_decode != len(self.members):
                raise AssertionError(f"{num_decode} rows are to decode, {len(self.members)} have joined")
            self.grow()
        return self._batch(self._token[:num_decode], self._position[:num_decode], num_padding, chunks, texts)

    def ahead(self, num_padding: int) -> Batch | None:
        """What the step after computes if all rows go on, but for their token_ids, which are 0. None where a row opens a block
        and none is free. No block table changes: `grow(foreseen=True)` then takes the blocks that were free."""
        at = self._position[: len(self.members)] + 1
        short, num_tables = self._short(at), len(self._tables)
        free = self._tables[0].upcoming(len(short) * num_tables)
        if len(free) < len(short) * num_tables:
            return None
        if free:
            blocks = np.array(free, np.int32).reshape(-1, num_tables)
            self._blocks[short, :, self._num_blocks[short]] = blocks
        return self._batch(np.zeros_like(at), at, num_padding, (), ())

    def grow(self, foreseen: bool = False) -> bool:
        """A block more for each row that opens one. foreseen: that which `ahead` found free; returns whether it always was."""
        num, same = len(self.members), True
        for row in self._short(self._position[:num]).tolist():
            at = self._num_blocks[row]
            for g, tables in enumerate(self._tables):
                wanted = int(self._blocks[row, g, at]) if foreseen else None
                self._blocks[row, g, at] = block = tables.grow(self.members[row].request, wanted)
                same = same and block == wanted
            self._num_blocks[row] = at + 1
        return same

    def _short(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that open a block at `position` (D,). Mutates the width of `_blocks`, which has room for it then."""
        num_blocks = self._num_blocks[: len(position)]
        short = np.flatnonzero(position >= num_blocks * self._block_size)
        if short.size:
            self._make_wide(int(num_blocks[short].max()) + 1)
        return short

    def _batch(
        self,
        last: NDArray[np.int64],
        at: NDArray[np.int64],
        num_padding: int,
        chunks: Sequence[Chunk],
        texts: Sequence[Sequence[int]],
    ) -> Batch:
        """Rows feed in `last` (D,), which stand at `at` (D,)."""
        rows = len(at)
        fixed = rows + num_padding
        num_rows = fixed + len(chunks)
        tokens = np.zeros(fixed + sum(chunk.length for chunk in chunks), np.int64)
        positions = np.zeros_like(tokens)
        context = np.zeros(num_rows, np.int32)
        start = np.arange(num_rows + 1, dtype=np.int32)
        size, num_tables = self._block_size, len(self._tables)
        width = max([-(-(chunk.start + chunk.length) // size) for chunk in chunks] + [1])
        if rows:
            width = max(width, int(at.max()) // size + 1)  # no wider: what a row may have reserved is not read
        blocks = np.zeros((num_tables, num_rows, width), np.int32)
        if rows:
            tokens[:rows], positions[:rows], context[:rows] = last, at, at + 1
            have = min(width, self._blocks.shape[2])
            blocks[:, :rows, :have] = self._blocks[:rows, :, :have].transpose(1, 0, 2)
        emit, at_token, row_of = list(range(rows)), fixed, np.arange(len(tokens))
        for row, (chunk, text) in enumerate(zip(chunks, texts, strict=True), fixed):
            end = at_token + chunk.length
            tokens[at_token:end] = text[chunk.start : chunk.start + chunk.length]
            positions[at_token:end] = np.arange(chunk.start, chunk.start + chunk.length)
            row_of[at_token:end] = row
            for g, tables in enumerate(self._tables):
                table = tables.of(chunk.request)[:width]
                blocks[g, row, : len(table)] = table
            context[row] = chunk.start + chunk.length
            start[row + 1] = end
            if chunk.last:
                emit.append(end - 1)
            at_token = end
        longest = max((chunk.length for chunk in chunks), default=1)
        most = int(context.max()) if num_rows else 0
        move, placed = self._move, []
        for lies_in in blocks:
            slots = lies_in[row_of, positions // size].astype(np.int64) * size + positions % size
            slots[rows:fixed] = -1
            placed.append(Placed(move(slots), move(lies_in)))
        return Batch(
            move(tokens), move(positions), move(start), move(context), fixed, longest, most, move(np.array(emit, np.int64)),
            placed if num_tables > 1 else placed * self._num_groups,
        )  # fmt: skip

    def _move(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return moved(torch.from_numpy(array), self._device)

    def _make_wide(self, width: int) -> None:
        have = self._blocks.shape[2]
        if width > have:
            self._blocks = np.pad(self._blocks, ((0, 0), (0, 0), (0, max(width, 2 * have) - have)))

    def _make_long(self) -> None:
        more = len(self._token)
        self._token, self._position, self._num_blocks = (
            np.pad(column, (0, more)) for column in (self._token, self._position, self._num_blocks)
        )
        self._blocks = np.pad(self._blocks, ((0, more), (0, 0), (0, 0)))
