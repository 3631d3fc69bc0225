"""Watched: an observer that also says, every few seconds, how far a long simulation has come."""

from __future__ import annotations

import logging
import time

from lengthwise.sched import Observer, Request

log = logging.getLogger(__name__)
EVERY = 5.0  # s of wall time between lines; a cell that ends sooner says nothing
LOOK = 2000  # requests between looks at the clock


class Watched:
    """Hands everything on to `observer` and logs progress towards `total` requests."""

    def __init__(self, observer: Observer, total: int) -> None:
        self.step = observer.step  # as it is: this is called for every plan
        self._observer = observer
        self._total = total
        self._ended = 0
        self._begin = self._told = time.monotonic()

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        self._observer.ended(request, num_tokens, reason, now)
        self._ended += 1
        if self._ended % LOOK == 0 and (wall := time.monotonic()) - self._told >= EVERY:
            self._told = wall
            rate = self._ended / (wall - self._begin)
            left = (self._total - self._ended) / rate
            log.info("%d of %d requests, %.0f/s, about %.0f s left", self._ended, self._total, rate, left)
