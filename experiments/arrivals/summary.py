"""What an arrival process came to: its rate, how uneven its gaps are, its longest silence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def describe_arrivals(times: NDArray[np.float64]) -> dict[str, Any]:
    """Summary of sorted arrival times (n,) in seconds.

    rate: gaps per second of span (requests/s); gap_cv: standard deviation of the gaps over their mean; longest_gap and span
    in seconds; num_ties: arrivals at the time of the one before. What is not defined (one arrival, no span) is None.
    """
    gaps = np.diff(np.asarray(times, dtype=np.float64))
    span = float(gaps.sum()) if gaps.size else 0.0
    return {
        "n": len(times),
        "span": span,
        "rate": gaps.size / span if span > 0 else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if span > 0 else None,
        "longest_gap": float(gaps.max()) if gaps.size else None,
        "num_ties": int((gaps == 0).sum()),
    }
