"""Predicting: lengths are predicted in a thread of their own, so that a slow predictor delays nobody's tokens.

Whatever waits is predicted in one batch. A row that is no length becomes a constant, counted by kind; one that is late is the
inbox's to replace, which looks at every step. A predictor that learns while it serves is told in the same thread, after the
batch, of the answers that have ended and of how far those have come that run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from statistics import median
from typing import NamedTuple

from lengthwise.sched import LengthDistribution, Predictor, Request, Scheduler

from .tally import MOMENTS, Histogram

log = logging.getLogger(__name__)

KINDS = ("raised", "nan", "infinite", "negative", "invalid")
MOST_RANKS = 256  # of the last ranks, whose middle stands in
LOOK = 64  # steps between two looks at how far those have come that run


class Seen(NamedTuple):
    """An answer has `length` tokens; censored: so far, or its end was not the model's."""

    request: Request
    length: int
    censored: bool


class Predicting:
    """predictor: its `predict` is called in one thread, with requests that have prompt and prompt_ids. fallback_len: tokens,
    what stands in for a prediction that is none. done: takes a request and its prediction; False if it is not wanted any more.

    `stand_in`: what takes the place of a prediction that is none: a point, or the middle of the last ranks of a predictor that
    only ranks. `counts`: fallbacks by kind; `seconds`: of each batch. All are mutated in its own thread. `learns`: whether the
    predictor is to be told, by `stepped` and `ended`, which are for the thread of the step loop.
    """

    def __init__(self, predictor: Predictor, fallback_len: float, done: Callable[[Request, LengthDistribution], bool]) -> None:
        self.counts = dict.fromkeys(KINDS, 0)
        self.seconds = Histogram(MOMENTS)
        self._predictor = predictor
        self.stand_in = LengthDistribution.point(fallback_len)
        self._done = done
        self._ranks: deque[float] = deque(maxlen=MOST_RANKS)
        self._asked: SimpleQueue[Request | Seen | None] = SimpleQueue()
        self._raised = False
        self.learns = bool(getattr(predictor, "learns", False))
        self._num_steps = 0
        self.thread = threading.Thread(target=self._run, name="lengthwise-predict", daemon=True)

    def ask(self, request: Request) -> None:
        self._asked.put(request)

    def stepped(self, scheduler: Scheduler) -> None:
        """A step has ended: now and then, tell how far those have come that decode."""
        self._num_steps += 1
        if self._num_steps % LOOK == 0:
            for request in scheduler.running.members:
                self._asked.put(Seen(request, scheduler.generated(request), True))

    def ended(self, request: Request, num_tokens: int, reason: str) -> None:
        """An answer has ended; only `stop` says that it would not have been longer."""
        self._asked.put(Seen(request, num_tokens, reason != "stop"))

    def close(self) -> None:
        """Nothing more is asked: the thread ends after the batch it is at, and leaves what waits."""
        self._asked.put(None)

    def _run(self) -> None:
        while True:
            batch = [self._asked.get()]
            try:
                while True:
                    batch.append(self._asked.get_nowait())
            except Empty:
                pass
            if None in batch:
                return
            requests = [one for one in batch if isinstance(one, Request) and one.prediction is None]
            if requests:
                self._predict(requests)
            for one in batch:
                if isinstance(one, Seen):
                    self._observe(one)

    def _observe(self, seen: Seen) -> None:
        try:
            self._predictor.observe(*seen)  # type: ignore[attr-defined]  # it says that it learns
        except Exception as error:  # whatever it is, predictions go on
            self._note(error, 1)

    def _note(self, error: Exception, num: int) -> None:
        if not self._raised:  # once: a predictor that always fails must not fill a log
            self._raised = True
            log.warning("the predictor failed on %d requests: %s", num, type(error).__name__)

    def _predict(self, requests: Sequence[Request]) -> None:
        begun, none = time.perf_counter(), [None] * len(requests)
        rows: Sequence[LengthDistribution | None]
        try:
            said = list(self._predictor.predict(requests))
            rows = said if len(said) == len(requests) else none
            kinds = [fault(row) for row in rows]
        except Exception as error:  # whatever it is, the requests go on
            rows, kinds = none, ["raised"] * len(requests)
            self._note(error, len(requests))
        self.seconds.add(time.perf_counter() - begun)
        self._ranks.extend(row.score for row, kind in zip(rows, kinds, strict=True) if row and not kind and row.is_rank_only)
        if self._ranks:
            self.stand_in = LengthDistribution.rank_only(median(self._ranks))
        for request, row, kind in zip(requests, rows, kinds, strict=True):
            if row is None or kind:
                self.counts[kind] += self._done(request, self.stand_in)
            else:
                self._done(request, row)


def fault(row: object) -> str:
    """What is wrong with a prediction, one of KINDS; "" for nothing. A rank may be negative, a length may not."""
    if not isinstance(row, LengthDistribution):
        return "invalid"
    try:
        values = [row.score]
        if not row.is_rank_only:
            values.append(row.quantile(0.5) if row.is_point else row.mean())
    except Exception:  # it is made of something else: asking it later, in the step loop, would end all
        return "invalid"
    if any(map(math.isnan, values)):
        return "nan"
    if any(map(math.isinf, values)):
        return "infinite"
    return "negative" if not row.is_rank_only and min(values) < 0.0 else ""
