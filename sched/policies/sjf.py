"""Shortest job first by predicted output length, without and with preemption.

With an oracle these are SJF and PSJF; with a learned predictor they are SPJF and PSPJF (Mitzenmacher, arXiv 1902.00732;
SSJF, Qiu et al., AIOps@ASPLOS 2024).
"""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request


def predicted(req: Request) -> float:
    """The prediction's score (lower = shorter). Raises ValueError when there is none."""
    if req.prediction is None:
        raise ValueError(f"request {req.rid} has no prediction; choose a predictor other than `none`")
    return req.prediction.score


class SJF(Policy):
    """Key: predicted total output tokens. Never preempts for a slot."""

    needs = frozenset({"prediction"})

    def key(self, req: Request, view: View) -> float:
        return predicted(req)

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF


class PSJF(SJF):
    """Key: predicted total output tokens, preemptive: a shorter arrival takes the slot of a longer running request."""

    needs = frozenset({"prediction", "preempt"})
    preemptive = True
