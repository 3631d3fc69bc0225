"""Fallback: a predictor that may fail, never makes the scheduler fail: bad or late predictions become the training median.

What is bad is counted by kind (raised, nan, infinite, negative, invalid, late), so that a table can show the share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import EDGES, LengthDistribution, Request

from .predictions import Predictions
from .predictor import LengthPredictor

Floats = NDArray[np.float64]
log = logging.getLogger(__name__)

KINDS: tuple[str, ...] = ("raised", "nan", "infinite", "negative", "invalid", "late")


class Fallback:
    """Wraps a fitted predictor. Each request's prediction is the predictor's, or a point at `length` tokens, counted.

    length: by default the predictor's training median. deadline: seconds a prediction may take, None for no limit. Mutates
    only `counts`.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        length: float | None = None,
        deadline: float | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        known = length if length is not None else predictor.training_median
        if known is None or not 1.0 <= known < float("inf"):
            raise ValueError(f"fallback length {known}: a finite number of tokens >= 1, or a predictor that was fitted")
        if deadline is not None and not deadline >= 0.0:
            raise ValueError(f"deadline={deadline}: seconds >= 0, or None")
        self.predictor, self.length, self.deadline = predictor, float(known), deadline
        self.counts: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.num_predictions = 0
        self._timer = timer

    @property
    def share(self) -> float:
        """Of all predictions, how many were the fallback; 0 before the first."""
        return sum(self.counts.values()) / self.num_predictions if self.num_predictions else 0.0

    def predict(self, requests: Sequence[Request]) -> list[LengthDistribution]:
        """One distribution a request. Raises nothing that the predictor raises."""
        if not requests:
            return []
        begin = self._timer()
        try:
            rows = list(self.predictor.predict(requests))
        except Exception as error:
            log.warning("predictor %s failed on %d requests: %s", self.predictor.name, len(requests), error)
            return self._all("raised", len(requests))
        if self.deadline is not None and self._timer() - begin > self.deadline:
            return self._all("late", len(requests))
        if len(rows) != len(requests):
            log.warning("predictor %s gave %d predictions for %d requests", self.predictor.name, len(rows), len(requests))
            return self._all("invalid", len(requests))
        self.num_predictions += len(rows)
        return [self._checked(row) for row in rows]

    def predict_columns(self, prompts: Sequence[str] | None, prompt_len: NDArray[Any]) -> Predictions:
        """The same in columns, (N,). Raises nothing that the predictor raises."""
        n = len(prompt_len)
        begin = self._timer()
        try:
            out = self.predictor.predict_columns(prompts, prompt_len)
        except Exception as error:
            log.warning("predictor %s failed on %d rows: %s", self.predictor.name, n, error)
            return Predictions.from_points(np.array([d.score for d in self._all("raised", n)]))
        late = self.deadline is not None and self._timer() - begin > self.deadline
        if late or len(out) != n:
            return Predictions.from_points(np.array([d.score for d in self._all("late" if late else "invalid", n)]))
        self.num_predictions += n
        return self._replaced(out, self._faults(out))

    def meet_deadline(self, predictions: Predictions, arrival: Floats, ready: Floats) -> tuple[Predictions, Floats]:
        """Predictions and the times (N,) in s they are there, with those later than `deadline` after arrival replaced at it."""
        if self.deadline is None:
            return predictions, ready
        late = ready - arrival > self.deadline
        faults = np.full(len(predictions), "", dtype="<U8")
        faults[late] = "late"
        return self._replaced(predictions, faults), np.where(late, arrival + self.deadline, ready)

    def _all(self, kind: str, n: int) -> list[LengthDistribution]:
        self.num_predictions += n
        self.counts[kind] += n
        return [LengthDistribution.point(self.length) for _ in range(n)]

    def _checked(self, row: LengthDistribution) -> LengthDistribution:
        columns = Predictions(np.array([row.score]))
        if row.is_point:
            columns = Predictions(columns.score, np.array([row.quantile(0.5)]))
        elif not row.is_rank_only:
            columns = Predictions(columns.score, None, np.array([[row.survival(e) for e in EDGES]]))
        kind = str(self._faults(columns)[0])
        if not kind:
            return row
        self.counts[kind] += 1
        return LengthDistribution.point(self.length)

    def _faults(self, predictions: Predictions) -> NDArray[np.str_]:
        """The kind of fault of each row, "" for none."""
        n = len(predictions)
        out = np.full(n, "", dtype="<U8")
        columns = [predictions.score.reshape(n, 1)]
        if predictions.survival is not None:
            columns.append(np.asarray(predictions.survival, dtype=np.float64))
            rising = np.any(np.diff(columns[-1], axis=1) > 1e-9, axis=1)
            out[rising | np.any(columns[-1] > 1.0 + 1e-9, axis=1)] = "invalid"
        if predictions.point is not None:
            columns.append(predictions.point.reshape(n, 1))
        if predictions.survival is not None or predictions.point is not None:  # a rank may be negative, a length may not
            out[np.any([np.any(c < 0.0, axis=1) for c in columns], axis=0)] = "negative"
        out[np.any([np.any(np.isinf(c), axis=1) for c in columns], axis=0)] = "infinite"
        out[np.any([np.any(np.isnan(c), axis=1) for c in columns], axis=0)] = "nan"
        return out

    def _replaced(self, predictions: Predictions, faults: NDArray[np.str_]) -> Predictions:
        bad = faults != ""
        if not bad.any():
            return predictions
        for kind in KINDS:
            self.counts[kind] += int(np.count_nonzero(faults == kind))
        score = np.where(bad, self.length, predictions.score)
        point = None if predictions.point is None else np.where(bad, self.length, predictions.point)
        survival = predictions.survival
        if survival is not None:
            survival = np.where(bad[:, None], _spike(self.length), np.asarray(survival, dtype=np.float64))
        return Predictions(score, point, survival)


def _spike(length: float) -> Floats:
    """The narrowest survival on EDGES whose mean is `length`: what a point is on the grid. (len(EDGES),)"""
    knots = np.concatenate(([0.0], EDGES))
    middles = (knots[:-1] + knots[1:]) / 2.0  # the mean when all survive up to a knot and none at the next
    at = int(np.searchsorted(middles, length, side="right"))  # knots[at] is survived in part
    part = (length - middles[at - 1]) / (middles[at] - middles[at - 1]) if 0 < at < len(middles) else float(at > 0)
    return np.where(knots[at] > EDGES, 1.0, np.where(knots[at] == EDGES, part, 0.0))
