"""WAIT: let prompts in only when a batchful of them has come together (Ao et al., arXiv 2504.11320)."""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request


class Wait(Policy):
    """First come first served, through a gate: it opens when `threshold` requests wait, and lets in so many a step.

    This is WAIT with one type of prompt, or the first segment of Nested WAIT. Departures: the paper's later segments are left
    out, for they let requests in mid-answer rest until enough have come as far, and here whoever decodes decodes in every step;
    the threshold is given, not derived from arrival rates; when nothing runs the gate opens for however few there are, whom the
    authors' code drops at the end of a run; who is preempted stands at the gate again.
    """

    def __init__(self, threshold: int = 8) -> None:
        if threshold < 1:
            raise ValueError(f"threshold={threshold} requests, the least is 1")
        self._threshold = threshold
        self._step = (-1.0, -1)  # (time, decode step) of the plan that `_left` is for
        self._left = 0  # requests that may still pass in this plan

    def key(self, req: Request, view: View) -> float:
        return req.arrival

    def admit(self, req: Request, view: View) -> bool:
        if self._step != (view.now, view.step) or not view.num_running:
            self._step = view.now, view.step
            opens = view.num_waiting >= self._threshold or not view.num_running
            self._left = self._threshold if opens else 0
        return self._left > 0

    def on_schedule(self, req: Request, view: View) -> None:
        self._left -= 1

    def stable(self, view: View) -> tuple[int, float]:
        return (1 if view.num_waiting >= self._threshold else FOREVER), INF
