"""Least laxity first: who can afford least to wait another moment."""

from __future__ import annotations

import math

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request, predicted
from .objectives import Objectives
from .pace import Pace


class LLF(Policy):
    """Key: deadline - predicted tokens to come x step time, preemptive (Mok, MIT 1983; Dertouzos and Mok, TSE 1989).

    Laxity is that less the time now, which is the same for all: so this latest start stands in the heap while a request waits,
    rises by one step time with each of its own tokens (`drift`), and nothing is sorted again as time passes. The deadline is
    that of the last token (Objectives.end); who has outlived its prediction has one token to come. step_time (s): to begin
    with; measured then (Pace). margin (s): what a preemption must gain; at 0, the textbook's, equals keep swapping.
    """

    needs = frozenset({"prediction", "slo", "step_time", "preempt"})
    preemptive = True
    rekey_decides = False

    def __init__(
        self,
        ttft: float | None = None,
        tpot: float | None = None,
        e2e: float | None = None,
        step_time: float = 0.02,
        margin: float = 0.0,
    ) -> None:
        if not 0.0 <= margin < INF:
            raise ValueError(f"margin={margin} s must be >= 0 and finite")
        self._objectives = Objectives(ttft, tpot, e2e)
        self._pace = Pace(step_time)
        self._margin = margin
        self.drift = step_time

    def key(self, req: Request, view: View) -> float:
        total = self._total(req)
        left = max(total - view.generated(req), 1.0)
        return req.arrival + self._objectives.end(req, total) - left * self._pace.seconds

    def key_epoch(self, view: View) -> object:
        epoch = self._pace.epoch(view)
        self.drift = self._pace.seconds
        return epoch

    def may_preempt(self, incoming: Request, victim: Request, view: View) -> bool:
        return self.key(incoming, view) + self._margin < self.key(victim, view)

    def rekey_at(self, req: Request, generated: int) -> float:
        end = math.ceil(self._total(req) - 1.0)
        return end if end > generated else INF

    def drifts(self, req: Request, generated: int) -> bool:
        return self._total(req) - generated > 1.0

    def stable(self, view: View) -> tuple[int, float]:
        return (1 if view.num_waiting else FOREVER), INF  # who runs falls behind who waits

    def on_finish(self, req: Request) -> None:
        self._pace.look()

    def _total(self, req: Request) -> float:
        return predicted(req).mean()
