"""Gittins: the best ratio of work to chance of finishing, for a length of which only the distribution is known.

Gittins 1979; optimal for the mean on one server (Aalto, Ayesta, Righter, QUESTA 2009). One pass over a distribution gives its
ranks at all ages that it tells apart; whoever decodes takes the next of them when it has had another `quantum` tokens.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..prediction import EDGES, LengthDistribution
from ..request import Request, predicted

AGES = (0, *(int(edge) for edge in EDGES))  # tokens


class Gittins(Policy):
    """Key: the Gittins rank of the predicted distribution in tokens, lower first, preemptive. Its age is what has been
    generated, down to a multiple of `quantum` tokens and from there to an edge of the distribution's grid (between two edges
    its hazard rises, whatever the law was). A point's rank is what is left of it, and follows every token.
    """

    needs = frozenset({"distribution", "preempt"})
    preemptive = True
    drift = -1.0  # of a point; ranks of distributions stand between two multiples

    def __init__(self, quantum: int = 64) -> None:
        if quantum < 1:
            raise ValueError(f"quantum={quantum} tokens must be >= 1")
        self.quantum = quantum
        self._ranks: dict[int, tuple[LengthDistribution, array[float]]] = {}  # rid -> prediction, its rank at each of AGES

    def key(self, req: Request, view: View) -> float:
        prediction, generated = predicted(req), view.generated(req)
        if prediction.is_point:
            return prediction.gittins(generated)
        known = self._ranks.get(req.rid)
        if known is None or known[0] is not prediction:
            known = self._ranks[req.rid] = prediction, array("d", prediction.gittins_ranks())
        return known[1][bisect_right(AGES, generated - generated % self.quantum) - 1]

    def rekey_at(self, req: Request, generated: int) -> float:
        prediction, turn = predicted(req), generated - generated % self.quantum + self.quantum
        end = math.ceil(prediction.mean() - 1.0) if prediction.is_point else INF
        return min(end, turn) if end > generated else turn

    def drifts(self, req: Request, generated: int) -> bool:
        prediction = predicted(req)
        return prediction.is_point and prediction.mean() - generated > 1.0

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF

    def on_finish(self, req: Request) -> None:
        self._ranks.pop(req.rid, None)
