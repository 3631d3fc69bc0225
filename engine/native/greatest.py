"""Greatest: the greatest logit of each row, left on the device for whoever goes on there, and on its way to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import moved
from .draw import on_host


class Greatest(NamedTuple):
    """Of E rows. token_ids (E,) int64: where the logits are. copies: those ids and the logits, on the host once `ready` (a CUDA
    event; None: they are there)."""

    token_ids: Tensor
    copies: tuple[Tensor, Tensor]
    ready: Any = None

    def picked(self, rows: Sequence[int] | None) -> Tensor:
        """Token ids of `rows`, or of all, on the device; of a row without a finite logit, any id of the vocabulary."""
        if rows is None:
            return self.token_ids
        return self.token_ids.index_select(0, moved(torch.tensor(rows), self.token_ids.device))

    def read(self, rows: Sequence[int] | None = None) -> tuple[list[int], dict[int, str]]:
        """Wait for them: token ids of `rows`, or of all, and why those of -1 have none, by place."""
        if self.ready is not None:
            self.ready.synchronize()
        ids, values = (copy.tolist() for copy in self.copies)
        if rows is not None:
            ids, values = [ids[i] for i in rows], [values[i] for i in rows]
        if math.isfinite(sum(values)):
            return ids, {}
        failures = {}
        for i, value in enumerate(values):
            if not math.isfinite(value):
                failures[i] = f"its greatest logit is {value}, no token can be chosen"
                ids[i] = -1
        return ids, failures


def greatest(logits: Tensor) -> Greatest:
    """Of each row of logits (E, V), of equal ones the first; NaN counts as greatest. Waits for nothing on a GPU."""
    if on_host(logits):  # 13 times as fast as torch's argmax at 32 x 49,152
        array = logits.detach().numpy()
        best = array.argmax(-1)
        ids = torch.from_numpy(best)
        return Greatest(ids, (ids, torch.from_numpy(array[np.arange(len(array)), best])))
    values, ids = logits.max(-1)
    waits = logits.device.type != "cuda"
    copies = ids.to("cpu", non_blocking=not waits), values.to("cpu", non_blocking=not waits)  # into pinned memory
    ready: Any = None
    if not waits:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return Greatest(ids, copies, ready)
