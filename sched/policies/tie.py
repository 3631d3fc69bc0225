"""TIE, tail inflated expectation: a mean made longer by its tail, and shorter by waiting (Zheng et al., arXiv 2604.00499).

The decay of a waiting request's score, score x decay^(wait / interval), multiplies every score by the same factor per second.
So the order is that of log(score) + arrival x log(1 / decay) / interval, which never moves: the decay costs nothing.
"""

from __future__ import annotations

import math

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request, predicted


class TIE(Policy):
    """Score: E[X] + weight x CVaR_alpha[X], in tokens and at least 1, X the predicted length cut at `max_new_tokens`. Never
    preempts for a slot.

    weight: least_weight x (number waiting / batch), within [least_weight, most_weight], as of when the request came and kept
    (the released code, equation 12 of the paper); `batch` stands for its maximal batch. decay, interval (s): of the score.
    Declared bound: i is passed only by who came within interval / log(1 / decay) x log(score_i) seconds after it.

    Departures: the distribution is the predictor's, not a log-t with 3.5 degrees of freedom, and its CVaR is exact, where the
    released code samples; the decay is continuous, where that updates it every 5 s; a request waits for its prediction, where
    that puts it last until there is one.
    """

    needs = frozenset({"distribution"})

    def __init__(
        self,
        alpha: float = 0.9,
        least_weight: float = 0.1,
        most_weight: float = 0.5,
        batch: int = 32,
        decay: float = 0.9,
        interval: float = 30.0,
    ) -> None:
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha={alpha} is not within (0, 1)")
        if not 0.0 <= least_weight <= most_weight < math.inf:
            raise ValueError(
                f"least_weight={least_weight} and most_weight={most_weight} must be 0 <= least <= most, and finite"
            )
        if batch < 1:
            raise ValueError(f"batch={batch} must be >= 1")
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay={decay} is not within (0, 1]")
        if not 0.0 < interval < math.inf:
            raise ValueError(f"interval={interval} s must be > 0 and finite")
        self.alpha, self.least_weight, self.most_weight, self.batch = alpha, least_weight, most_weight, batch
        self.per_second = math.log(1.0 / decay) / interval  # of the log of the score
        self._keys: dict[int, float] = {}

    def key(self, req: Request, view: View) -> float:
        key = self._keys.get(req.rid)
        if key is None:  # it has come this moment
            weight = min(max(self.least_weight * (view.num_waiting + 1) / self.batch, self.least_weight), self.most_weight)
            key = self._keys[req.rid] = math.log(max(self.score(req, weight), 1.0)) + self.per_second * req.arrival
        return key

    def score(self, req: Request, weight: float) -> float:
        """E[X] + weight x CVaR_alpha[X] in tokens."""
        prediction, most = predicted(req), float(req.max_new_tokens)
        beyond = prediction.excess(most)
        quantile = min(prediction.quantile(self.alpha), most)
        tail = quantile + (prediction.excess(quantile) - beyond) / (1.0 - self.alpha)
        return prediction.mean() - beyond + weight * tail

    def overtaking_horizon(self, req: Request, view: View) -> float:
        """The arrival time (s) from which on nobody may pass `req` any more."""
        return self.key(req, view) / self.per_second if self.per_second else INF

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF

    def on_finish(self, req: Request) -> None:
        self._keys.pop(req.rid, None)
