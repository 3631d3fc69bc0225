"""The simulated engine: the same step loop with a cost model for time and an array of true lengths for EOS."""

from .clock import SimulatedClock
from .executor import SimulatedExecutor

__all__ = ["SimulatedClock", "SimulatedExecutor"]
