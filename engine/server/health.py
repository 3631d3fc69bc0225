"""Health: what a service says of itself, and how it says no."""

from __future__ import annotations

from typing import NamedTuple


class Health(NamedTuple):
    """error: why the step loop has failed. last_step_age: s since a step ended, or since there was something to do; 0 while
    there is not."""

    ok: bool
    error: str | None
    draining: bool
    last_step_age: float
    num_waiting: int
    num_running: int


class Full(Exception):
    """As many requests wait as may; in about `retry_after` s there will be room."""

    def __init__(self, num_waiting: int, most: int, retry_after: float) -> None:
        super().__init__(f"{num_waiting} requests wait, the most is {most}; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Down(Exception):
    """Nothing is taken in: the engine has not started, has failed, or is stopping."""
