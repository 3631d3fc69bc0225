"""Refining in service: what predicts anew those who decode stands in the step loop, so nothing that it does may end it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from lengthwise.sched import LengthDistribution, Request
from lengthwise.sched.ports import Refiner

from .predicting import KINDS, fault
from .tally import MOMENTS, Histogram

log = logging.getLogger(__name__)


class Refines(Protocol):
    """every: decode steps from one time to the next. layer: of the model, whose hidden states it reads; None: it reads none."""

    @property
    def every(self) -> int: ...
    @property
    def layer(self) -> int | None: ...
    def refiner(self, rows: Any, output_len: Any, seed: int) -> Refiner: ...


class Refining:
    """A Refiner that never fails: where `refiner` raises, or says what is no length, predictions stay as they were. `counts` of
    these by kind, and `seconds` of each call, are mutated in the step thread."""

    def __init__(self, refiner: Refiner) -> None:
        self.counts = dict.fromkeys(KINDS, 0)
        self.seconds = Histogram(MOMENTS)
        self._refiner = refiner
        self._raised = False

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution | None]:
        begun, none = time.perf_counter(), [None] * len(requests)
        try:
            said = list(self._refiner.refine(requests, generated, probes))
        except Exception as error:  # whatever it is, the requests go on
            self.counts["raised"] += len(requests)
            if not self._raised:  # once: a probe that always fails must not fill a log
                self._raised = True
                log.warning("refining failed for %d requests: %s", len(requests), type(error).__name__)
            return none  # type: ignore[return-value]
        finally:
            self.seconds.add(time.perf_counter() - begun)
        if len(said) != len(requests):
            self.counts["invalid"] += len(requests)
            return none  # type: ignore[return-value]
        return [self._sound(row) for row in said]

    def _sound(self, row: LengthDistribution | None) -> LengthDistribution | None:
        if row is None or not (kind := fault(row)):
            return row
        self.counts[kind] += 1
        return None
