"""Earliest deadline first: optimal for one server while every deadline can be met, and no guide once some cannot."""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request
from .objectives import Objectives


class EDF(Policy):
    """Key: arrival + ttft before the first token, arrival + e2e after it; preemptive (Liu and Layland, JACM 1973).

    A key changes once, at the first token, so that heaps serve it and steps cost nothing. ttft, e2e (s): as in Objectives; with
    e2e alone it is the textbook's. Under overload late requests stay first (the domino effect): nothing here drops them.
    """

    needs = frozenset({"slo", "preempt"})
    preemptive = True

    def __init__(self, ttft: float | None = None, e2e: float | None = None) -> None:
        self._objectives = Objectives(ttft, None, e2e)

    def key(self, req: Request, view: View) -> float:
        e2e = self._objectives.e2e(req)
        return req.arrival + (e2e if view.generated(req) else min(self._objectives.ttft(req), e2e))

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF
