"""Fallback: a predictor that may fail, never makes the scheduler fail: bad or late predictions become the training median.

What is bad is counted by kind (raised, nan, infinite, negative, invalid, late), so that a table can show the share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import EDGES, LengthDistribution, Request

from .predictions import Predictions
from .predictor import LengthPredictor
from .prompts import Prompts

Floats = NDArray[np.float64]
log = logging.getLogger(__name__)

KINDS: tuple[str, ...] = ("raised", "nan", "infinite", "negative", "invalid", "late")


class Fallback:
    """Wraps a fitted predictor. Each request's prediction is the predictor's, or a point at `length` tokens, counted.

    length: by default the predictor's training median. Where the predictor gives ranks alone, which are no lengths, the middle
    of the good ones stands in. deadline: seconds a prediction may take, None for no limit. Mutates only its counts and
    `first_error`, what the predictor raised first.
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
        self.first_error: str | None = None
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
        except Exception as error:  # whatever it is, the scheduler goes on
            self._note(error, len(requests))
            return self._all("raised", len(requests))
        if self.deadline is not None and self._timer() - begin > self.deadline:
            return self._all("late", len(requests))
        if len(rows) != len(requests):
            log.warning("predictor %s gave %d predictions for %d requests", self.predictor.name, len(rows), len(requests))
            return self._all("invalid", len(requests))
        self.num_predictions += len(rows)
        checked = [(row, self._fault(row)) for row in rows]
        ranks = [row.score for row, kind in checked if row.is_rank_only and not kind]
        out = []
        for row, kind in checked:
            if kind:
                self.counts[kind] += 1
                middle = row.is_rank_only and ranks
                row = LengthDistribution(_middle(ranks)) if middle else LengthDistribution.point(self.length)
            out.append(row)
        return out

    def predict_columns(self, prompts: Prompts) -> Predictions:
        """The same in columns, (N,), with `fallback` saying where. Raises nothing that the predictor raises.

        When a batch raises, its halves are tried, down to the rows that raise alone: rows are independent of their batch.
        """
        n = len(prompts)
        self.num_predictions += n
        begin = self._timer()
        pieces, raised = self._pieces(prompts)
        late = self.deadline is not None and self._timer() - begin > self.deadline
        whole = all(len(out) == len(rows) for rows, out in pieces)
        kinds = {(out.point is not None, out.survival is not None) for _, out in pieces}
        if late or not whole or len(kinds) != 1:
            faults = np.full(n, "late" if late else "invalid", dtype="<U8")
            if not late:
                faults[raised] = "raised"
            return self._replaced(Predictions.from_points(np.full(n, self.length)), faults)
        out = Predictions.concatenate([piece for _, piece in pieces])
        faults = self._faults(out)
        if raised.any():
            place = np.zeros(n, dtype=np.int64)  # of each row in `out`; raised rows hold any, and are replaced
            place[~raised] = np.arange(len(out))
            out, faults = out.take(place), faults[place]
            faults[raised] = "raised"
        return self._replaced(out, faults)

    def _pieces(self, prompts: Prompts) -> tuple[list[tuple[range, Predictions]], NDArray[np.bool_]]:
        """(rows, their predictions) of the largest batches that do not raise, in order, and the rows (N,) that raise alone."""
        pieces: list[tuple[range, Predictions]] = []
        raised = np.zeros(len(prompts), dtype=bool)
        todo = [range(len(prompts))]
        while todo:
            rows = todo.pop()
            try:
                pieces.append((rows, self.predictor.predict_columns(prompts.take(rows))))
            except Exception as error:  # whatever it is, the scheduler goes on
                self._note(error, len(rows))
                middle = len(rows) // 2
                if middle:
                    todo += [rows[middle:], rows[:middle]]
                else:
                    raised[rows.start : rows.stop] = True
        return pieces, raised

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

    def _note(self, error: Exception, num_rows: int) -> None:
        if self.first_error is None:  # once: a predictor that always fails must not fill a log
            self.first_error = f"{type(error).__name__}: {error}"
            log.warning("predictor %s failed on %d rows: %s", self.predictor.name, num_rows, self.first_error)

    def _fault(self, row: LengthDistribution) -> str:
        columns = Predictions(np.array([row.score]))
        if row.is_point:
            columns = Predictions(columns.score, np.array([row.quantile(0.5)]))
        elif not row.is_rank_only:
            columns = Predictions(columns.score, None, np.array([[row.survival(e) for e in EDGES]]))
        return str(self._faults(columns)[0])

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
        before = predictions.fallback
        mask = bad if before is None else before | bad
        if not bad.any():
            return Predictions(predictions.score, predictions.point, predictions.survival, mask)
        for kind in KINDS:
            self.counts[kind] += int(np.count_nonzero(faults == kind))
        ranks = predictions.score[~bad] if predictions.point is None and predictions.survival is None else np.zeros(0)
        score = np.where(bad, _middle(ranks) if ranks.size else self.length, predictions.score)
        point = None if predictions.point is None else np.where(bad, self.length, predictions.point)
        survival = predictions.survival
        if survival is not None:
            survival = np.where(bad[:, None], _spike(self.length), np.asarray(survival, dtype=np.float64))
        return Predictions(score, point, survival, mask)


def like_the_others(parts: Sequence[Predictions]) -> list[Predictions]:
    """The same parts, those that fell back as a whole (points) put as the others put theirs, so that they concatenate."""
    lost = [p.fallback is not None and bool(p.fallback.all()) and p.point is not None for p in parts]
    others = [p for p, is_lost in zip(parts, lost, strict=True) if not is_lost]
    if not others or others[0].point is not None:
        return list(parts)
    ranks = np.concatenate([p.score for p in others])
    out = []
    for part, is_lost in zip(parts, lost, strict=True):
        if is_lost and others[0].survival is None:
            part = Predictions(np.full(len(part), _middle(ranks)), fallback=part.fallback)
        elif is_lost:
            spikes = np.array([_spike(x) for x in part.score]).reshape(-1, EDGES.size)
            part = Predictions(part.score, None, spikes, part.fallback)
        out.append(part)
    return out


def _middle(ranks: Sequence[float] | Floats) -> float:
    return float(np.median(ranks))


def _spike(length: float) -> Floats:
    """The narrowest survival on EDGES whose mean is `length`: what a point is on the grid. (len(EDGES),)"""
    knots = np.concatenate(([0.0], EDGES))
    middles = (knots[:-1] + knots[1:]) / 2.0  # the mean when all survive up to a knot and none at the next
    at = int(np.searchsorted(middles, length, side="right"))  # knots[at] is survived in part
    part = (length - middles[at - 1]) / (middles[at] - middles[at - 1]) if 0 < at < len(middles) else float(at > 0)
    return np.where(knots[at] > EDGES, 1.0, np.where(knots[at] == EDGES, part, 0.0))
