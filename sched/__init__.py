"""Decisions: who runs next, with whom, and who yields. Pure Python and numpy; no truth, no tensors, no wall clock."""

from .batching import Batching
from .kv import KVCache
from .plan import Chunk, Copy, Failure, Finished, Outcome, Plan, Swap
from .policy import FOREVER, INF, Policy
from .ports import Clock, Event, EventKind, Executor, Observer, Predictor, Source, View
from .prediction import EDGES, LengthDistribution
from .preemption import Preemption, pause, recompute, swap
from .request import SLO, Phase, Request, covers_answers
from .routing import Defer, Migration, Placement, Reject, Router
from .scheduler import Scheduler
from .serve import Stalled, serve

__all__ = [
    "EDGES", "FOREVER", "INF", "SLO", "Batching", "Chunk", "Clock", "Copy", "Defer", "Event", "EventKind", "Executor",
    "Failure", "Finished", "KVCache", "LengthDistribution", "Migration", "Observer", "Outcome", "Phase", "Placement", "Plan",
    "Policy", "Predictor", "Preemption", "Reject", "Request", "Router", "Scheduler", "Source", "Stalled", "Swap", "View",
    "covers_answers", "pause", "recompute", "serve", "swap",
]  # fmt: skip
