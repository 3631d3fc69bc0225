"""Pace: the seconds of a step, as a number that keys may stand on.

Step times move with every step and keys must not. So they are looked at when a request ends, averaged, and the number in use
changes only when the average has left it by a given ratio; then all keys are computed anew.
"""

from __future__ import annotations

from ..ports import View


class Pace:
    """seconds: in use now. weight: of a new look in the average. ratio: how far the average may be from it. Raises ValueError
    unless seconds > 0, 0 < weight <= 1 and ratio > 1."""

    def __init__(self, seconds: float, weight: float = 1 / 16, ratio: float = 1.25) -> None:
        if not (0 < seconds < float("inf") and 0 < weight <= 1 and ratio > 1):
            raise ValueError(f"pace of {seconds} s, weight {weight}, ratio {ratio}: wanted finite and > 0, (0, 1] and > 1")
        self.seconds = self._mean = seconds
        self._weight, self._ratio = weight, ratio
        self._due = False
        self._epoch = 0

    def look(self) -> None:
        """Something has ended: look at the next plan."""
        self._due = True

    def epoch(self, view: View) -> int:
        """What a policy returns as its `key_epoch`. May change `seconds`, and then is another than before."""
        if self._due and view.step_time > 0:
            self._due = False
            self._mean += self._weight * (view.step_time - self._mean)
            if not 1 / self._ratio < self._mean / self.seconds < self._ratio:
                self.seconds = self._mean
                self._epoch += 1
        return self._epoch
