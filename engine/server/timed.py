"""Timed: a Scheduler whose own time is counted."""

from __future__ import annotations

import time
from typing import Any

from lengthwise.sched import Outcome, Plan, Scheduler

from .tally import Histogram


class Timed(Scheduler):
    """seconds: takes the time of planning and booking each step."""

    def __init__(self, *args: Any, seconds: Histogram, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = seconds
        self._planning = 0.0

    def plan(self, now: float) -> Plan | None:
        begun = time.perf_counter()
        plan = super().plan(now)
        self._planning = time.perf_counter() - begun
        return plan

    def book(self, plan: Plan, outcome: Outcome) -> None:
        begun = time.perf_counter()
        super().book(plan, outcome)
        self._seconds.add(self._planning + time.perf_counter() - begun)
