"""The piecewise cost model: published coefficients for prefill, and for decoding few rows and many, as they stand.

Fits made apart need not meet: where many rows would come out cheaper than the most of few, the price stays at that of few, so
that more work never takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lengthwise.sched import INF, Chunk

from .check import fields
from .cost import CostModel, HostOverhead
from .work import Work

Line = tuple[float, float, float]

PREFILL = ("base", "token", "square")
DECODE = ("base", "context", "row")


class Piecewise(CostModel):
    """Seconds of a step: prefill is base + token x chunk tokens + square x sum of (end^2 - start^2) over chunks, for a whole
    prompt square x length^2; decoding is base + context x tokens attended + row x rows, by `few` below `threshold` rows and by
    `many` from there on, there at least what `few` gives threshold - 1 rows.

    A step of both is an assumption, as the fits hold none: the sum, less the smallest of the three bases, for one pass over
    the weights serves both. `host` is added. The form of DistServe (Zhong et al., OSDI 2024).
    """

    def __init__(
        self,
        *,
        prefill: Mapping[str, float],
        few: Mapping[str, float],
        many: Mapping[str, float],
        threshold: int,
        host: HostOverhead | None = None,
        fitted_range: Mapping[str, float] | None = None,
        work: Work | None = None,
    ) -> None:
        fields("prefill", prefill, PREFILL)
        fields("few", few, DECODE)
        fields("many", many, DECODE)
        if threshold < 2:
            raise ValueError(f"threshold={threshold} must be 2 or more")
        self.prefill, self.few, self.many = dict(prefill), dict(few), dict(many)
        self.threshold, self.host, self.work = threshold, host or HostOverhead(), work
        self.shared = min(prefill["base"], few["base"], many["base"])  # s
        self._set_range(fitted_range)
        self._lines: dict[int, list[Line]] = {}  # rows -> decode lines, one or two

    def decode_line(self, num_rows: int, context: float) -> Line:
        lines = self._lines.get(num_rows)
        if lines is None:
            lines = self._lines[num_rows] = self._decode(num_rows)
        return lines[0] if context < lines[0][2] else lines[1]

    def step(self, num_rows: int, context: float, chunks: Sequence[Chunk]) -> float:
        t = self.host.step
        if num_rows:
            a, c, _ = self.decode_line(num_rows, context)
            t = a + c * context
        if not chunks:
            return t
        prefill = self.prefill
        t += prefill["base"] - (self.shared if num_rows else 0.0)
        for _, start, length, _ in chunks:
            t += prefill["token"] * length + prefill["square"] * (2 * start + length) * length + self.host.row
        return t

    def _decode(self, num_rows: int) -> list[Line]:
        """The greater of two lines over context: one line, or two that meet."""
        fixed = self.host.step + self.host.row * num_rows
        few, many = self.few, self.many
        if num_rows < self.threshold:
            return [(fixed + few["base"] + few["row"] * num_rows, few["context"], INF)]
        low = (fixed + few["base"] + few["row"] * (self.threshold - 1), few["context"])
        high = (fixed + many["base"] + many["row"] * num_rows, many["context"])
        first, then = (high, low) if high >= low else (low, high)  # the greater at no context
        if then[1] <= first[1]:
            return [(*first, INF)]
        meet = math.ceil((first[0] - then[0]) / (then[1] - first[1]))  # contexts are whole: the same ones lie below
        return [(*first, meet), (*then, INF)]
