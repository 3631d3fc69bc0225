"""Windows: which requests and which seconds of a run are counted.

Below load 1 warm-up and cool-down are cut by scheduled time. At load 1 and above nothing is stationary: all N requests are
counted, the run goes on until it is empty, and what comes out depends on the horizon N / rate, which is therefore printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import Event, EventKind, Request, Source

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """Requests scheduled in [begin, end) are counted, and tokens and completions in that time, over end - begin seconds.

    whole: load >= 1 or no known load; everything is counted, over the time from 0 to the end of the run. horizon: N / rate, s.
    """

    begin: float = -math.inf
    end: float = math.inf
    whole: bool = True
    horizon: float | None = None

    def counts(self, arrival: Floats) -> NDArray[np.bool_]:
        """Mask (N,) of the requests that count, by scheduled time (s)."""
        return (arrival >= self.begin) & (arrival < self.end)

    def duration(self, run_end: float) -> float:
        """Seconds that rates are divided by."""
        return run_end if self.whole else self.end - self.begin

    def describe(self, run_end: float) -> str:
        horizon = "" if self.horizon is None else f", horizon N / rate = {self.horizon:.6g} s"
        if self.whole:
            return f"all requests, run until {run_end:.6g} s{horizon}"
        return f"requests scheduled in [{self.begin:.6g}, {self.end:.6g}) s{horizon}"


def window(
    arrival: Floats,
    *,
    load: float | None = None,
    rate: float | None = None,
    warm_up: float = 0.0,
    cool_down: float = 0.0,
    unit: Literal["seconds", "share"] = "seconds",
) -> Window:
    """The window for arrivals (N,) in s, sorted. rate: requests/s; without it N / last arrival.

    unit: warm_up and cool_down in seconds of the horizon, or as shares of the N requests (0.1 of 20 requests: 2 requests).
    At load >= 1, or when all arrive at 0, both are ignored: everything counts. Raises ValueError when nothing would be left.
    """
    n = len(arrival)
    if n == 0:
        raise ValueError("no arrivals, no window")
    last = float(arrival[-1])
    horizon = n / rate if rate else (last if last > 0 else None)
    if (load is not None and load >= 1) or last == 0.0:
        return Window(whole=True, horizon=horizon)
    if unit not in ("seconds", "share"):
        raise ValueError(f"unit {unit!r}: choose seconds or share")
    for name, value in (("warm_up", warm_up), ("cool_down", cool_down)):
        if value < 0 or not math.isfinite(value):
            raise ValueError(f"{name} {value} must be finite and >= 0")
        if unit == "share" and value >= 1:
            raise ValueError(f"{name} share {value} is not within [0, 1); write 0.1 for 10 %")
    if not warm_up and not cool_down and load is None:
        return Window(whole=True, horizon=horizon)
    # the close of the arrival period: with a small N the last arrival may come later than N / rate
    close = max(horizon or 0.0, float(np.nextafter(last, math.inf)))
    if unit == "share":
        skip, drop = math.ceil(warm_up * n - 1e-9), math.ceil(cool_down * n - 1e-9)
        if skip + drop >= n:
            raise ValueError(f"warm_up {warm_up} and cool_down {cool_down} leave none of {n} requests")
        begin = float(arrival[skip]) if skip else 0.0
        end = float(arrival[n - drop]) if drop else close
    else:
        begin, end = warm_up, close - cool_down
    if not ((arrival >= begin) & (arrival < end)).any():
        raise ValueError(
            f"no request of {n} is scheduled in [{begin}, {end}) s: warm_up {warm_up}, cool_down {cool_down} {unit}"
        )
    return Window(begin, end, False, horizon)


class CapReached(Exception):
    """The run's time cap was reached; `now` is the first step boundary at or after it (s)."""

    def __init__(self, now: float) -> None:
        super().__init__(f"stopped at {now} s")
        self.now = now


class Capped:
    """A Source that ends the run at `cap` seconds by raising CapReached out of `serve`; the step in flight ends first.

    Whatever has not ended by then is unfinished: hand the scheduler to `Recorder.cut_off`. A run that is empty before the
    cap ends as it would without.
    """

    def __init__(self, source: Source, cap: float) -> None:
        if not cap > 0:
            raise ValueError(f"cap {cap} s must be > 0")
        self._source, self._cap = source, cap
        self._open = 0  # requests that have arrived and not ended

    def peek(self) -> float:
        time = self._source.peek()
        return min(time, self._cap) if self._open or time < math.inf else math.inf

    def pop(self, now: float) -> Iterator[Event]:
        if now >= self._cap:
            raise CapReached(now)
        for event in self._source.pop(now):
            self._open += event.kind == EventKind.ARRIVAL
            yield event

    def on_finish(self, request: Request, now: float) -> None:
        self._open -= 1
        self._source.on_finish(request, now)
