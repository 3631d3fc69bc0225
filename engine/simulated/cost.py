"""CostModel: seconds of one engine step. Everything a simulation claims about time is said here.

A decode step must be linear in the context its rows attend, in pieces: then fast-forwarding k steps adds the same numbers in
the same order as k single steps, and the two agree bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lengthwise.sched import INF, Chunk

from .check import not_negative
from .work import Work


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """CPU time of the engine around each step: `step` seconds, and `row` seconds per row in the batch."""

    step: float = 0.0
    row: float = 0.0

    def __post_init__(self) -> None:
        not_negative(step=self.step, row=self.row)


class CostModel(ABC):
    """Step time in seconds as a function of what the step computes.

    num_rows: decoding rows, padding included. context: tokens those rows attend, summed. chunks: prefill work.
    fitted_range: what the coefficients were fitted on, as upper bounds: `rows`, `context` (summed), `prefill_tokens`
    (of one step). Outside it a model extrapolates; `in_range` is how results come to be marked. Empty: valid everywhere.
    work: what the steps compute and move, for utilisation; None where the model does not state it.
    """

    RANGE_KEYS: ClassVar[tuple[str, ...]] = ("rows", "context", "prefill_tokens")
    fitted_range: Mapping[str, float] = {}
    work: Work | None = None

    def in_range(self, num_rows: Any, context: Any, prefill_tokens: Any) -> Any:
        """Whether steps lie inside the fitted range: a bool for numbers, a mask (N,) for columns (N,)."""
        rows, tokens, prefill = (self.fitted_range.get(key, INF) for key in self.RANGE_KEYS)
        return (num_rows <= rows) & (context <= tokens) & (prefill_tokens <= prefill)

    def _set_range(self, fitted_range: Mapping[str, float] | None) -> None:
        unknown = sorted(set(fitted_range or {}) - set(self.RANGE_KEYS))
        if unknown:
            raise ValueError(f"fitted_range has {unknown}; known are {list(self.RANGE_KEYS)}")
        self.fitted_range = dict(fitted_range or {})

    @abstractmethod
    def decode_line(self, num_rows: int, context: float) -> tuple[float, float, float]:
        """(a, c, limit): a pure decode step takes a + c * s seconds for every total context s with context <= s < limit."""

    @abstractmethod
    def step(self, num_rows: int, context: float, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step with at least one chunk (and `num_rows` decodes beside them)."""
