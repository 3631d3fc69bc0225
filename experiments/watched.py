"""Watched: an observer that also says, every few seconds, how far a long simulation has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lengthwise.sched import Request

from .recorder import Recorder

log = logging.getLogger(__name__)
Forget = Callable[[Request], object]
Heard = Callable[[Request, int, str], object]
EVERY = 5.0  # s of wall time between lines; a cell that ends sooner says nothing
LOOK = 2000  # requests between looks at the clock, where thousands end in a second


class Watched:
    """Hands everything on to `recorder` and logs progress towards `total` requests, looking at the clock every `look`.
    forget, heard: told of each request that has ended; heard also how long its answer is, and why it ended."""

    def __init__(
        self, recorder: Recorder, total: int, look: int = LOOK, forget: Forget | None = None, heard: Heard | None = None
    ) -> None:
        self.step = recorder.step  # as it is: this is called for every plan
        self.recorder = recorder
        self._forget, self._heard = forget, heard
        self._total, self._look = total, look
        self._ended = 0
        self._begin = self._told = time.monotonic()

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        self.recorder.ended(request, num_tokens, reason, now)
        if self._forget is not None:
            self._forget(request)
        if self._heard is not None:
            self._heard(request, num_tokens, reason)
        self._ended += 1
        if self._ended % self._look == 0 and (wall := time.monotonic()) - self._told >= EVERY:
            self._told = wall
            rate = self._ended / (wall - self._begin)
            left = (self._total - self._ended) / rate
            log.info("%d of %d requests, %.3g/s, about %.0f s left", self._ended, self._total, rate, left)
