"""Andes: KV goes to whom a token more does the most good, by what its reader sees (Liu et al., arXiv 2404.16283v1)."""

from __future__ import annotations

from ..policy import INF
from ..ports import View
from ..request import Phase, Request
from .objectives import Objectives
from .refreshed import Refreshed

RUNS = (Phase.PREFILLING, Phase.DECODING)


class Andes(Refreshed):
    """Key: -(QoE if served for the next `horizon` (s) - QoE if not) / its KV tokens, preemptive; the authors' greedy knapsack.

    A reader expects the first token after ttft and then one every tpot. QoE is 1 less the square of the share by which the
    tokens miss what is expected by the horizon, too many as well as too few, as in the authors' code: whoever is far ahead of
    its reader is preferred, which the paper does not mean. It is 1 for whoever is served and has tokens in hand; before the
    first token, not served, it is 1 or 0, as ttft is still ahead by then or not. Who runs counts `stay` times as much. Below
    `tight`, a share of the pool in use, all come in by arrival. token_time (s): of a token while served, a constant there.
    Departures: tokens for blocks; what a prefix cache keeps counts as in use; tokens in hand are told by the time now, not by
    that of the last token; as many may be preempted at once as it takes, where theirs has a limit; nobody is kept merely
    because all gains are negative; an arrival between refreshes may preempt.
    """

    needs = frozenset({"slo", "preempt"})
    preemptive = True

    def __init__(
        self,
        ttft: float | None = None,
        tpot: float | None = None,
        horizon: float = 50.0,
        token_time: float = 0.1,
        stay: float = 1.5,
        tight: float = 0.9,
        every: int = 5,
    ) -> None:
        super().__init__(every)
        if not (0 < horizon < INF and 0 < token_time < INF and stay >= 1 and 0 <= tight <= 1):
            given = f"horizon {horizon} s, token_time {token_time} s, stay {stay}, tight {tight}"
            raise ValueError(f"{given}: wanted finite and > 0 twice, >= 1 and within [0, 1]")
        self._objectives = Objectives(ttft, tpot, None)
        self._horizon, self._token_time, self._stay, self._tight = horizon, token_time, stay, tight
        self._now = 0.0
        self._short = False  # memory is

    def refresh(self, view: View) -> bool:
        before, self._now = self._short, view.now
        self._short = view.free_tokens <= (1.0 - self._tight) * view.pool_tokens
        return before or self._short

    def worth(self, req: Request, view: View) -> float:
        if not self._short:
            return req.arrival
        n = view.generated(req)
        gain = self.gain(req, n, max(self._now - req.arrival, 0.0))
        return -gain * (self._stay if req.phase in RUNS else 1.0) / (req.prompt_len + n)

    def gain(self, req: Request, generated: int, age: float) -> float:
        """QoE over the horizon if `req`, `age` (s) old, is served, less that if it is not."""
        ttft, tpot = self._objectives.ttft(req), self._objectives.tpot(req)
        if tpot == INF:
            return 0.0
        expected = (age + self._horizon) / tpot
        in_hand = generated > 0 and age < ttft + generated * tpot and self._token_time <= tpot
        served = 1.0 if in_hand else 1.0 - (1.0 - (generated + self._horizon / self._token_time) / expected) ** 2
        if generated:
            return served - (1.0 - (1.0 - generated / expected) ** 2)
        return served - float(age + self._horizon <= ttft)
