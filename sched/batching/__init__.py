"""Batching: WITH WHOM a request runs, one rule a file."""

from .adaptive import Adaptive
from .batching import Batching
from .chunked import Chunked
from .mixed import Mixed
from .prefill_first import PrefillFirst
from .static import Static

__all__ = ["Adaptive", "Batching", "Chunked", "Mixed", "PrefillFirst", "Static"]
