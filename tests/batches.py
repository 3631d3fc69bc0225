"""A Batch for attention alone: what rows attend, and nothing of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lengthwise.engine.native.batch import Batch, Placed


def attention_batch(counts: Sequence[int], lens: Sequence[int], num_decode: int, tables: Any) -> Batch:
    """Row r has counts[r] queries, the last of which attends lens[r] tokens; tables (R, B) int32. Nothing is stored or
    emitted."""
    return Batch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.zeros(sum(counts), dtype=torch.int64),
        query_start=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        context_len=torch.tensor(lens, dtype=torch.int32),
        num_decode=num_decode,
        max_query=max(counts),
        max_context=max(lens),
        emit=torch.zeros(0, dtype=torch.int64),
        groups=[Placed(torch.zeros(sum(counts), dtype=torch.int64), torch.from_numpy(tables))],
    )
