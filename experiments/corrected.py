"""Corrected: predictions of a run that are corrected by its own answers, each by what has come before it.

A simulated run is handed its predictions beforehand, out of fold, one a row; what a predictor learns while it serves depends on
when its answers end, which is known only in the run. So the correction stands between the source and the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lengthwise.predictors.correction import Correction
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import EDGES, Event, Request, Scheduler

LOOK = 16  # requests that arrive between two looks at how far those have come that run


def corrected(source: Any, scheduler: Scheduler, info: Mapping[str, Any]) -> Corrected | None:
    """The source of a run whose predictor learns while it serves, as `info` of its predictions says; None for any other."""
    return Corrected(source, scheduler, Correction(**info["correction"])) if "correction" in info else None


class Corrected:
    """A Source that hands on the events of `source`, each prediction corrected when its request is first seen with one.

    `heard` must be told of each request that ends. Only distributions are corrected; points and ranks are handed on.
    """

    def __init__(self, source: Any, scheduler: Scheduler, correction: Correction) -> None:
        self._source, self._scheduler, self._correction = source, scheduler, correction
        self._running: dict[int, Request] = {}  # asked, and not ended
        self._num_asked = 0

    def peek(self) -> float:
        peeked: float = self._source.peek()
        return peeked

    def pop(self, now: float) -> Iterable[Event]:
        return self._each(self._source.pop(now))

    def _each(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            request = event.request
            if request.rid not in self._running and request.prediction is not None:
                self._correct(request)
            yield event

    def _correct(self, request: Request) -> None:
        prediction = request.prediction
        assert prediction is not None
        if prediction.is_point or prediction.is_rank_only:
            return
        if self._num_asked % LOOK == 0:
            for rid, other in self._running.items():
                self._correction.observe(rid, self._scheduler.generated(other), True)
        self._num_asked += 1
        said = np.array([prediction.survival(edge) for edge in EDGES])
        self._correction.ask(request.rid, said)
        self._running[request.rid] = request
        request.prediction = Predictions.from_survivals(self._correction.corrected(said[None, :])).row(0)

    def heard(self, request: Request, num_tokens: int, reason: str) -> None:
        """An answer ended; it is a length where the model ended it itself (`stop`)."""
        self._correction.observe(request.rid, num_tokens, reason != "stop")

    def on_finish(self, request: Request, now: float) -> None:
        self._running.pop(request.rid, None)
        self._source.on_finish(request, now)
