"""A clock that cannot be hurried."""

from __future__ import annotations

import threading
import time


class WallClock:
    """Seconds since it was made, or restarted. `wait` sleeps, at most until `wake` is set, and takes that back: whoever looks
    then sees what had come in before it was set. `advance` has nothing to do: time has passed."""

    def __init__(self, wake: threading.Event | None = None) -> None:
        self._start = time.perf_counter()
        self._wake = wake or threading.Event()

    def restart(self) -> None:
        """It is 0 s now."""
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait(self, until: float) -> None:
        """Sleep until `until` (s), or until somebody sets `wake`. Mutates `wake`."""
        if self._wake.wait(max(until - self.now, 0.0)):
            self._wake.clear()

    def advance(self, to: float) -> None:
        """Nothing: `to` is past."""
