"""workers: the OpenMP workers of a thread: how long they spin for each other, and how it gives them back.

A step has hundreds of parallel regions, and who is through with one spins until the others are. Where a core is shared (with an
event loop, a client, another program), the one that is waited for may have no core at all, and whoever spins keeps it from
getting one: with a single busy program beside it on two cores, the engine all but stood still. So workers spin
for microseconds, as long as even work keeps them apart, and then sleep.
"""

from __future__ import annotations

import ctypes
import os
import sys

TURNS = "500"  # of a loop around a pause instruction: 10 to 25 microseconds
SOFT = 1  # omp_pause_soft: what the program has set stays


def spin_briefly() -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has said how workers wait. Without effect where
    the OpenMP runtime is loaded already, as with torch."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", TURNS)


def give_back() -> bool:
    """End the idle workers of the calling thread; they start anew when it next needs them. False where the runtime has no such
    call (before OpenMP 5.0), or would not.

    Each thread that opens a parallel region keeps workers of its own, and with more of all threads together than there are
    cores the runtime lets them sleep at once. So a thread that has loaded a model gives its own back before another one runs
    it: 32 streams on two cores had 0.63 of the offline engine's throughput.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError):
        return False
    return int(pause(SOFT)) == 0
