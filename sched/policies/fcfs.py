"""First come first served: the order of vLLM, SGLang and Orca."""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request


class FCFS(Policy):
    """Key: arrival time. Never preempts for a slot."""

    def key(self, req: Request, view: View) -> float:
        return req.arrival

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF
