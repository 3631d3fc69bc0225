"""Batch: what one forward computes. Tokens of all requests lie packed in one row, decoding requests first, then chunks.

Shapes: N tokens, R rows (requests), D of them decoding, E rows that emit a token, B blocks of the widest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Placed:
    """Where the KV of one group of layers lies. slots (N,) int64: block * block_size + offset of each token's own KV, -1 for
    one that is not kept. block_tables (R, B) int32: a row's blocks in order; entries past its end, or of blocks that a sliding
    window has passed, are never read."""

    slots: Tensor
    block_tables: Tensor


@dataclass(slots=True)
class Batch:
    """token_ids (N,) int64, positions (N,) int64. query_start (R + 1,) int32: row r has tokens query_start[r] to
    query_start[r + 1]; the first `num_decode` rows have one each. context_len (R,) int32: tokens that the row's last token
    attends, itself included, so that it stands at position context_len - 1; 0 for a padding row, whose output is zeros.
    max_query, max_context: the greatest of either. emit (E,) int64: the tokens whose hidden state is wanted. groups: one Placed
    for each group of layers."""

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    num_decode: int
    max_query: int
    max_context: int
    emit: Tensor
    groups: Sequence[Placed]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.context_len.shape[0])


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the host on `device`. Waits for nothing there; from memory that is not pinned it might, for all before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
