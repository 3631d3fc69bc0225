"""JITServe: the most service gain per second of remaining work first (NSDI 2026; as Tempo, arXiv 2504.20068)."""

from __future__ import annotations

from collections import deque

from ..policy import INF
from ..ports import View
from ..request import Request, predicted
from .objectives import Objectives
from .refreshed import Refreshed


class JITServe(Refreshed):
    """Key: (-gain / remaining time, remaining time), preemptive, by the `quantile` of the predicted length; the authors' code.

    The gain of a token of the answer is `decode_weight`, of one of the prompt 1 while it is not answered; what comes late
    counts (objective / predicted latency) ** penalty of that. With ttft or tpot: of the prompt by ttft, of the tokens to come
    by the deadline of the last; with e2e alone: of both by e2e. Seconds a token: the mean of the step times at the last ten
    refreshes, `step_time` to begin with.
    Departures: who outlives the quantile has one token to come (there, 1 microsecond); a step time is that of a step, not the
    time between refreshes, which counts idle time; the gain of the last step, 8 at most, is not added; an arrival between
    refreshes may preempt; requests of one program are not counted together.
    """

    remembers = True
    needs = frozenset({"distribution", "slo", "step_time", "preempt"})
    preemptive = True

    def __init__(
        self,
        ttft: float | None = None,
        tpot: float | None = None,
        e2e: float | None = None,
        quantile: float = 0.95,
        decode_weight: float = 8.0,
        penalty: float = 1.0,
        every: int = 50,
        step_time: float = 0.02,
    ) -> None:
        super().__init__(every)
        if not (0.0 < quantile < 1.0 and 0 < decode_weight < INF and 0 <= penalty < INF and 0 < step_time < INF):
            given = f"quantile {quantile}, decode_weight {decode_weight}, penalty {penalty}, step_time {step_time} s"
            raise ValueError(f"{given}: wanted within (0, 1), and finite: > 0, >= 0 and > 0")
        self._objectives = Objectives(ttft, tpot, e2e)
        self._quantile, self._decode_weight, self._penalty = quantile, decode_weight, penalty
        self._now = 0.0
        self._times = deque([step_time], maxlen=10)
        self._seconds = step_time
        self._terms: dict[
            int, tuple[float, float, float | None]
        ] = {}  # rid -> predicted tokens, end (s), ttft (s; None: e2e alone)

    def refresh(self, view: View) -> bool:
        self._now = view.now
        if view.step_time > 0:
            self._times.append(view.step_time)
            self._seconds = sum(self._times) / len(self._times)
        return True

    def worth(self, req: Request, view: View) -> tuple[float, float]:
        out, end, ttft = self._terms.get(req.rid) or self._note(req)
        generated = view.generated(req)
        left = out - generated if out - generated > 1.0 else 1.0  # no calls of max: a refresh is of all who wait
        remaining = left * self._seconds
        served = self._now - req.arrival if self._now > req.arrival else 0.0  # s since arrival
        in_time = self._share(end, served + remaining)
        if ttft is None:
            gain = (req.prompt_len + self._decode_weight * out) * in_time
        elif generated:
            gain = self._decode_weight * left * in_time
        else:
            gain = req.prompt_len * self._share(ttft, served + self._seconds) + self._decode_weight * out * in_time
        return -gain / remaining, remaining

    def on_refine(self, req: Request) -> None:
        self._terms.pop(req.rid, None)

    def on_finish(self, req: Request) -> None:
        super().on_finish(req)
        self._terms.pop(req.rid, None)

    def _share(self, objective: float, latency: float) -> float:
        share = objective / latency
        return 1.0 if share >= 1.0 else float(max(share, 1e-6) ** self._penalty)

    def _note(self, req: Request) -> tuple[float, float, float | None]:
        out, asked = max(predicted(req).quantile(self._quantile), 1.0), self._objectives
        ttft = None if asked.ttft(req) == asked.tpot(req) == INF else asked.ttft(req)
        terms = self._terms[req.rid] = out, asked.end(req, out), ttft
        return terms
