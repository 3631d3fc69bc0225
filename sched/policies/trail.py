"""TRAIL: shortest predicted remaining first, with preemption limited to the early part of a request (ICLR 2025).

Preempting late costs most: the KV is large and little is left to do. So a running request may be preempted only while it has
generated at most `c` times what was predicted at first. Past that its key is below every other.
"""

from __future__ import annotations

import math

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Phase, Request, predicted

PREFILLING, DECODING = Phase.PREFILLING, Phase.DECODING
BELOW = float(1 << 30)  # tokens: more than any prediction, and few enough that fractions of a token are kept


class TRAIL(Policy):
    """Key: predicted tokens to come, at least one; on the batch and past the limit, that minus BELOW (Shahout et al., ICLR
    2025). c = 0 never preempts for a slot (SPJF); c = 1 is SPRPT, where who outlives its prediction is not preempted either.

    The limit is of the prediction that a request came with, however often that is refined (every token in the paper, every 8
    in its launcher).

    Departures: who loses its KV past the limit, because memory has run out, waits by what is left of it; the released code
    sends it to the end of the queue. Its margin and its cap on the number of preemptions, both off there, are left out.
    """

    drift = -1.0

    def __init__(self, c: float = 0.8) -> None:
        if not 0.0 <= c < math.inf:
            raise ValueError(f"c={c} must be >= 0 and finite")
        self.c = c
        self.preemptive = c > 0.0
        self.needs = frozenset({"prediction", "preempt"} if self.preemptive else {"prediction"})
        self._limits: dict[int, float] = {}  # rid -> generated tokens up to which it may be preempted

    def key(self, req: Request, view: View) -> float:
        generated = view.generated(req)
        left = max(predicted(req).mean() - generated, 1.0)
        if generated > self._limit(req) and req.phase in (DECODING, PREFILLING):
            return left - BELOW
        return left

    def rekey_at(self, req: Request, generated: int) -> float:
        clip = math.ceil(predicted(req).mean() - 1.0)
        return min((t for t in (math.floor(self._limit(req)) + 1, clip) if t > generated), default=INF)

    def drifts(self, req: Request, generated: int) -> bool:
        return predicted(req).mean() - generated > 1.0

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF

    def on_arrival(self, req: Request) -> None:
        self._limit(req)

    def on_finish(self, req: Request) -> None:
        self._limits.pop(req.rid, None)

    def _limit(self, req: Request) -> float:
        limit = self._limits.get(req.rid)
        if limit is None:
            limit = self._limits[req.rid] = self.c * max(predicted(req).mean(), 1.0)
        return limit
