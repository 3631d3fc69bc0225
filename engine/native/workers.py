"""workers: the OpenMP workers of a thread, and how it gives them back.

Each thread that opens a parallel region keeps workers of its own, and the runtime counts all of them: with more than there are
cores a worker no longer waits at the next region but sleeps at once, and to wake it for each of a step's hundreds of regions
costs a third of the throughput (benchmarks/server.py). So a thread that has loaded a model gives its workers back before
another one runs it.
"""

from __future__ import annotations

import ctypes

SOFT = 1  # omp_pause_soft: what the program has set stays


def give_back() -> bool:
    """End the idle workers of the calling thread; they start anew when it next needs them. False where the runtime has no such
    call (before OpenMP 5.0), or would not."""
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError):
        return False
    return int(pause(SOFT)) == 0
