"""Highest response ratio next: (wait + estimate) / estimate, so that waiting makes up for length (Brinch Hansen 1971; Magnus,
ICWS 2024, between batches; SGLang has one on a clock of tokens)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..policy import FOREVER, Policy
from ..ports import View
from ..request import Request, predicted
from .kinetic import Kinetic
from .size import By, size


class HRRN(Policy):
    """Order: greatest response ratio first, the estimate being the predicted tokens (at least one; `by` mean, quantile at
    `level` or score). Never preempts for a slot; of those on the batch the last to come yields KV first.

    A ratio is 1 + wait / estimate, so that the unit of the estimate does not matter, nor how fast tokens come: only that the
    time is proportional to the tokens. The prompt's share is left out.

    Ratios are lines in time: a kinetic tournament keeps the first of them, at O(log waiting) for who comes and who goes, and
    says when it will be another. `order` does not look at the list that it is given.
    """

    needs = frozenset({"prediction"})

    def __init__(self, by: By = "mean", level: float = 0.9) -> None:
        self._size = size(by, level, tokens=True)
        self._waiting = Kinetic()

    def key(self, req: Request, view: View) -> float:
        return req.arrival

    def order(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
        last = None
        while (best := self._waiting.best(view.now)) is not last and best is not None:
            yield best
            last = best

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, self._waiting.until(view.now)

    def on_arrival(self, req: Request) -> None:
        self._waiting.add(req, req.arrival, max(self._size(predicted(req)), 1.0), req._entry)

    def on_schedule(self, req: Request, view: View) -> None:
        self._waiting.remove(req.rid)

    def on_preempt(self, req: Request, view: View) -> None:
        self.on_arrival(req)

    def on_finish(self, req: Request) -> None:
        self._waiting.remove(req.rid)
