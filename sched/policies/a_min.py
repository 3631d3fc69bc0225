"""A_min: take every answer for as short as it may be, and give way when it is not (Chen, Ye, Zhou, arXiv 2508.14544)."""

from __future__ import annotations

from collections.abc import Iterable

from ..ports import View
from ..request import Request
from .mc_sf import MCSF


class AMin(MCSF):
    """MC-SF by the lower end of the predicted interval, which rises to what has been generated.

    When memory runs out after all, those with the smallest bound go first, each with the tokens it has by then for its new
    bound; so whoever has come farthest is never hit, and ends. Where the interval is a point this is MC-SF to the letter.
    lower: the quantile that stands for the lower end. Departures: the paper's evicted start from nothing, here the tokens stay
    and are computed again; ties in the bound go by arrival, the last first.
    """

    needs = frozenset({"distribution", "future_peak", "victim"})

    def __init__(self, lower: float = 0.1) -> None:
        super().__init__(lower)

    def total(self, req: Request, generated: int) -> float:
        return max(super().total(req, generated), float(generated))

    def victim(self, running: Iterable[Request], view: View) -> Request | None:
        return min(running, key=lambda r: (self.key(r, view), -r.arrival, -r._entry), default=None)
