"""Shortest remaining predicted tokens first (SRPT with an oracle, SPRPT with a learned predictor)."""

from __future__ import annotations

import math
from typing import Literal

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request, predicted
from .size import By, size


class SRPT(Policy):
    """Key: predicted tokens still to come, preemptive (Schrage 1968; SPRPT, Mitzenmacher, arXiv 1902.00732).

    by: what stands for the total: the mean, the quantile at `level`, or the score (`rank`) where it counts tokens.
    overrun: what a request is taken for once it has outlived its prediction. `clip`: one token to come, for ever, as in
    SPRPT, so it is not preempted any more. `reestimate`: as much again as its distribution then expects, at least as many
    tokens as it has generated so far when the prediction was a point (doubling), so that a bad prediction loses its rank.
    """

    needs = frozenset({"prediction", "preempt"})
    preemptive = True
    drift = -1.0

    def __init__(self, overrun: Literal["clip", "reestimate"] = "clip", by: By = "mean", level: float = 0.9) -> None:
        if overrun not in ("clip", "reestimate"):
            raise ValueError(f"overrun={overrun!r}: choose clip or reestimate")
        self.rekey_decides = overrun == "reestimate"
        self._reestimates = self.rekey_decides
        self._size = size(by, level, tokens=True)
        self._totals: dict[int, float] = {}  # rid -> re-estimated total of requests that outlived their prediction

    def key(self, req: Request, view: View) -> float:
        return max(self._total(req) - view.generated(req), 1.0)

    def rekey_at(self, req: Request, generated: int) -> float:
        total = self._total(req)
        if self._reestimates:
            while total - generated < 1.0:
                total = self._totals[req.rid] = generated + self._more(req, generated)
            return math.floor(total)  # there, less than one token of the estimate is left
        end = math.ceil(total - 1.0)
        return end if end > generated else INF

    def drifts(self, req: Request, generated: int) -> bool:
        return self._total(req) - generated > 1.0 or self._reestimates

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF

    def on_refine(self, req: Request) -> None:
        self._totals.pop(req.rid, None)

    def on_finish(self, req: Request) -> None:
        self._totals.pop(req.rid, None)

    def _total(self, req: Request) -> float:
        total = self._totals.get(req.rid)
        return self._size(predicted(req)) if total is None else total

    def _more(self, req: Request, generated: int) -> float:
        assert req.prediction is not None
        expected = max(req.prediction.expected_remaining(generated), 1.0)
        return max(expected, float(generated)) if req.prediction.is_point else expected
