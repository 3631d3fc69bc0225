"""Renewal arrivals: independent gaps of mean one, scaled to the rate, so that every load sees one and the same pattern."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def renewal_times(gaps: Floats, rate: float | None, normalised: bool) -> Floats:
    """Arrival times (n,) in seconds from n + 1 gaps of mean one, at `rate` requests/s.

    Not normalised: sums of the first n gaps; the achieved rate varies as the process does. normalised: the n + 1 gaps fill
    exactly n / rate seconds, so n arrivals fall within that time and the last one before its end; for Poisson that is the
    process given its count.
    """
    per_second = check_rate(rate)
    times: Floats = np.cumsum(gaps)
    if normalised:
        times = times[:-1] / times[-1] * ((len(gaps) - 1) / per_second)
    else:
        times = times[:-1] / per_second
    return times


def check_rate(rate: float | None) -> float:
    if rate is None or not 0 < rate < float("inf"):
        raise ValueError(f"arrival rate {rate} must be a finite number above 0 (requests/s)")
    return rate
