"""A clock that jumps."""

from __future__ import annotations


class SimulatedClock:
    """Virtual seconds, starting at 0. Monotone: going back raises ValueError."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def wait(self, until: float) -> None:
        self.advance(until)

    def advance(self, to: float) -> None:
        if to < self.now:
            raise ValueError(f"the clock stands at {self.now} s and cannot go back to {to} s")
        self.now = to
