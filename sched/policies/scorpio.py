"""SCORPIO's TTFT guard: least deadline first among those who can still be in time (Tang et al., arXiv 2505.23022)."""

from __future__ import annotations

from ..policy import INF
from ..ports import View
from ..request import Request
from .objectives import Objectives
from .refreshed import Refreshed


class Scorpio(Refreshed):
    """Key: (unattainable, arrival + ttft); non-preemptive; the authors' `ldf` with `delay`.

    At each refresh those without a first token are gone through in order of deadline: who would miss it, were the prompts
    before it and its own prefilled at `prefill_rate` (tokens/s) and then `margin` (s) spent, is put behind all others, for
    good, and counts no more for those after it. Fit the rate to the hardware, as the authors do their line.
    Departures: what the paper rejects is put last, as a policy drops nobody; the TPOT guard is left out, for its credits let
    some rows of a batch rest for a step, and its virtual batch size wants a model of the step time.
    """

    needs = frozenset({"slo"})

    def __init__(
        self, ttft: float | None = None, prefill_rate: float = 10_000.0, margin: float = 0.005, every: int = 1
    ) -> None:
        super().__init__(every)
        if not (0 < prefill_rate < INF and 0 <= margin < INF):
            raise ValueError(f"prefill_rate {prefill_rate} tokens/s and margin {margin} s: wanted finite, > 0 and >= 0")
        self._objectives = Objectives(ttft, None, None)
        self._rate, self._margin = prefill_rate, margin
        self._hopeful: dict[Request, tuple[float, float, int, Request]] = {}  # without a first token, not given up; by deadline
        self._late: dict[int, None] = {}  # rids of those given up

    def worth(self, req: Request, view: View) -> tuple[float, float]:
        return float(req.rid in self._late), req.arrival + self._objectives.ttft(req)

    def refresh(self, view: View) -> bool:
        end, num_late = view.now + self._margin, len(self._late)
        hopeful, self._hopeful = sorted(self._hopeful.values()), {}  # nearly sorted already
        for row in hopeful:
            deadline, _, _, req = row
            if view.generated(req):
                continue
            left = (req.prompt_len - view.computed(req)) / self._rate
            if end + left > deadline:
                self._late[req.rid] = None
            else:
                self._hopeful[req] = row
                end += left
        return len(self._late) > num_late

    def on_arrival(self, req: Request) -> None:
        self._hopeful[req] = req.arrival + self._objectives.ttft(req), req.arrival, req._entry, req

    def on_finish(self, req: Request) -> None:
        super().on_finish(req)
        self._hopeful.pop(req, None)
        self._late.pop(req.rid, None)
