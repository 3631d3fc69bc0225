"""Shortest job first by predicted output length, without and with preemption.

With an oracle these are SJF and PSJF; with a learned predictor they are SPJF and PSPJF (Mitzenmacher, arXiv 1902.00732;
SSJF, Qiu et al., AIOps@ASPLOS 2024).
"""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request, predicted
from .size import By, score, size


class SJF(Policy):
    """Key: predicted output tokens, `by` the score, the mean or the quantile at `level`. Never preempts for a slot."""

    needs = frozenset({"prediction"})
    _size = staticmethod(score)

    def __init__(self, by: By = "rank", level: float = 0.9) -> None:
        self._size = size(by, level)  # type: ignore[assignment]

    def key(self, req: Request, view: View) -> float:
        return self._size(predicted(req))

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF


class PSJF(SJF):
    """As SJF, preemptive: a shorter arrival takes the slot of a longer running request."""

    needs = frozenset({"prediction", "preempt"})
    preemptive = True
