"""The table cost model: measured times at knots, straight lines between them.

What depends on the tokens of a step is one curve; what decoding rows read is a grid of rows x context per row. For a given
number of rows the grid is a broken line in the total context, so a decode step is linear up to the next knot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lengthwise.sched import INF, Chunk

from .check import not_negative
from .cost import CostModel, HostOverhead
from .work import Work

Line = tuple[float, float, float]


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """y at x on the broken line through the knots (xs ascending, two or more); the end segments go on for ever."""
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, y0 = xs[i - 1], ys[i - 1]
    return y0 + (ys[i] - y0) / (xs[i] - x0) * (x - x0)


class Table(CostModel):
    """step = linear(tokens of the step) + attention(rows, context per row) + sum over chunks of
    (chunk + chunk_token x length + per_attention x length x (start + length / 2)), in seconds; `host` added.

    tokens, linear (T,): knots and seconds. rows (R,), contexts (C,), attention (R, C): the grid, in seconds; interpolated over
    rows first, then along the context. Beyond the last knot the last segment goes on.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[float],
        linear: Sequence[float],
        rows: Sequence[float],
        contexts: Sequence[float],
        attention: Sequence[Sequence[float]],
        per_attention: float,
        chunk: float = 0.0,
        chunk_token: float = 0.0,
        host: HostOverhead | None = None,
        fitted_range: Mapping[str, float] | None = None,
        work: Work | None = None,
    ) -> None:
        not_negative(per_attention=per_attention, chunk=chunk, chunk_token=chunk_token)
        for name, knots in (("tokens", tokens), ("rows", rows), ("contexts", contexts)):
            if len(knots) < 2 or knots[0] < 0 or any(a >= b for a, b in pairwise(knots)):
                raise ValueError(f"{name}={list(knots)} must be two or more ascending numbers from 0 on")
        if len(linear) != len(tokens):
            raise ValueError(f"linear has {len(linear)} values for {len(tokens)} tokens knots")
        if len(attention) != len(rows) or any(len(line) != len(contexts) for line in attention):
            raise ValueError(f"attention must be {len(rows)} rows of {len(contexts)} contexts")
        self.host, self.work = host or HostOverhead(), work
        self.tokens, self.linear = list(tokens), list(linear)
        self.rows, self.contexts = list(rows), list(contexts)
        self.attention = [list(line) for line in attention]
        self.per_attention, self.chunk, self.chunk_token = per_attention, chunk + self.host.row, chunk_token
        self._set_range(fitted_range)
        self._linear: dict[int, float] = {}  # tokens -> s, host step included
        self._lines: dict[int, tuple[list[float], list[Line]]] = {}  # rows -> (limits, attention lines)
        self._steps: dict[int, tuple[list[float], list[Line]]] = {}  # rows -> (limits, decode lines)

    def decode_line(self, num_rows: int, context: float) -> Line:
        found = self._steps.get(num_rows)
        if found is None:
            limits, lines = self._attention(num_rows)
            fixed = self._tokens(num_rows) + self.host.row * num_rows
            found = self._steps[num_rows] = (limits, [(fixed + a, c, limit) for a, c, limit in lines])
        return found[1][bisect_right(found[0], context)]

    def step(self, num_rows: int, context: float, chunks: Sequence[Chunk]) -> float:
        n, t = num_rows, 0.0
        for _, start, length, _ in chunks:
            n += length
            t += self.chunk + self.chunk_token * length + self.per_attention * length * (start + length / 2)
        t += self._tokens(n)
        if num_rows:
            limits, lines = self._attention(num_rows)
            a, c, _ = lines[bisect_right(limits, context)]
            t += self.host.row * num_rows + a + c * context
        return t

    def _tokens(self, n: int) -> float:
        t = self._linear.get(n)
        if t is None:
            t = self._linear[n] = self.host.step + interpolate(n, self.tokens, self.linear)
        return t

    def _attention(self, num_rows: int) -> tuple[list[float], list[Line]]:
        """(limits, lines) of the decode attention of `num_rows` rows: segment j holds below limits[j]."""
        found = self._lines.get(num_rows)
        if found is None and num_rows:
            knots = [num_rows * context for context in self.contexts]
            times = [interpolate(num_rows, self.rows, column) for column in zip(*self.attention, strict=True)]
            lines = []
            for j in range(len(knots) - 1):
                c = (times[j + 1] - times[j]) / (knots[j + 1] - knots[j])
                lines.append((times[j] - c * knots[j], c, knots[j + 1] if j < len(knots) - 2 else INF))
            found = self._lines[num_rows] = (knots[1:-1], lines)
        return found or ([], [(0.0, 0.0, INF)])
