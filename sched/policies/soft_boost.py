"""Soft boost: first come first served, with short requests treated as if they had come earlier.

The form is that of gamma-Boost (Yu and Scully, arXiv 2404.08826), optimal for the response time tail of one server with light
tails. UniBoost (ICML 2026, arXiv 2606.18431) brought it to LLM serving: one gamma between SJF and FCFS.
"""

from __future__ import annotations

import math

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request, predicted
from .size import By, size


class SoftBoost(Policy):
    """Key: arrival - boost in seconds, boost = log(1 / (1 - exp(-gamma x s))) / gamma, s = token_time x predicted tokens (at
    least one). gamma to 0 is SJF, gamma to infinity FCFS. Never preempts for a slot; its keys never move.

    gamma (1/s): in theory the decay rate of the response time's tail under FCFS. token_time: seconds a token.
    Declared bound: i is passed only by who came before key_i + the boost of one token.

    Departures from UniBoost: that predicts no length, but takes statistical signals whose form we could not read; here the
    boost is of the predicted size, as in gamma-Boost. Its cache-aware preemption is left out.
    """

    needs = frozenset({"prediction"})

    def __init__(self, gamma: float = 0.05, token_time: float = 0.02, by: By = "mean", level: float = 0.9) -> None:
        for name, value in (("gamma", gamma), ("token_time", token_time)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value} must be > 0 and finite")
        self.gamma = gamma
        self.token_time = token_time
        self._size = size(by, level, tokens=True)

    def boost(self, tokens: float) -> float:
        """Seconds that a request of `tokens` tokens is treated as having come earlier."""
        return -math.log(-math.expm1(-self.gamma * self.token_time * max(tokens, 1.0))) / self.gamma

    def key(self, req: Request, view: View) -> float:
        return req.arrival - self.boost(self._size(predicted(req)))

    def overtaking_horizon(self, req: Request, view: View) -> float:
        """The arrival time (s) from which on nobody may pass `req` any more."""
        return self.key(req, view) + self.boost(1.0)

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF
