"""Client-given priority, as vLLM's `priority` policy."""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request


class Priority(Policy):
    """Key: the request's priority, lower first. With `preemptive`, a strictly more urgent arrival takes a running slot."""

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive
        self.needs = frozenset({"preempt"}) if preemptive else frozenset()

    def key(self, req: Request, view: View) -> float:
        return req.priority

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF
