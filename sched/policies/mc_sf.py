"""MC-SF: the shortest first, as many as memory will bear until the last of them ends (Jaillet et al., arXiv 2502.07115)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..admission.estimates import Predicted
from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request

if TYPE_CHECKING:
    from ..outlook import Outlook


class MCSF(Policy):
    """Key: predicted output tokens. The longest prefix of that order enters with which, at the predicted end of everybody who
    runs or enters, memory stays within the pool; non-preemptive.

    quantile: of the prediction; None: its mean (the paper takes an upper bound for given). Alone, a request enters anyway. With
    predictions that nobody outlives nobody is ever preempted; else memory may run out, and the last in order yields. While
    somebody waits each step is planned, as with every step more may fit; the test is one pass over two columns (Outlook).
    """

    needs = frozenset({"prediction", "future_peak"})

    def __init__(self, quantile: float | None = None) -> None:
        self._estimate = Predicted(quantile)
        self._outlook: Outlook | None = None

    def key(self, req: Request, view: View) -> float:
        return self.total(req, view.generated(req))

    def total(self, req: Request, generated: int) -> float:
        """Output tokens that `req` is taken to end with."""
        return self._estimate.total(req, generated)

    def admit(self, req: Request, view: View) -> bool:
        if not view.num_running:
            return True
        if self._outlook is None:
            self._outlook = view.outlook(self.total)
        return self._outlook.peak(req) <= view.pool_tokens

    def stable(self, view: View) -> tuple[int, float]:
        return (1 if view.num_waiting else FOREVER), INF
