"""The affine cost model: the smallest that prices batching, context and prefill apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lengthwise.sched import INF, Chunk

from .check import not_negative
from .cost import CostModel, HostOverhead
from .work import Work


class Affine(CostModel):
    """step = base + per_row x decoding rows + per_context x context + per_prefill x chunk tokens
    + per_attention x sum over chunks of length x (start + length / 2), in seconds; `host` added.

    The form fitted by DistServe (OSDI 2024) and by splitwise-sim's whole steps.
    """

    def __init__(
        self,
        base: float,
        per_row: float,
        per_context: float,
        per_prefill: float,
        per_attention: float = 0.0,
        host: HostOverhead | None = None,
        decode_base: float = 0.0,
        fitted_range: Mapping[str, float] | None = None,
        work: Work | None = None,
    ) -> None:
        not_negative(
            base=base, per_row=per_row, per_context=per_context, per_prefill=per_prefill, per_attention=per_attention,
            decode_base=decode_base,
        )  # fmt: skip
        self.base, self.per_row, self.per_context = base, per_row, per_context
        self.per_prefill, self.per_attention, self.decode_base = per_prefill, per_attention, decode_base
        self.host, self.work = host or HostOverhead(), work
        self._set_range(fitted_range)

    def decode_line(self, num_rows: int, context: float) -> tuple[float, float, float]:
        a = self.base + self.decode_base + self.host.step + (self.per_row + self.host.row) * num_rows
        return a, self.per_context, INF

    def step(self, num_rows: int, context: float, chunks: Sequence[Chunk]) -> float:
        t = self.base + self.host.step + (self.per_row + self.host.row) * num_rows + self.per_context * context
        if num_rows:
            t += self.decode_base
        for _, start, length, _ in chunks:
            t += self.per_prefill * length + self.per_attention * length * (start + length / 2) + self.host.row
        return t
