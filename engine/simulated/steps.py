"""The steps a fit rests on: drawn at random, priced by a cost model, and as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lengthwise.sched import Chunk, Request

from .cost import CostModel
from .kernels import Batch

KINDS = ("decode", "prefill", "hybrid")


@dataclass(frozen=True)
class Draw:
    """The random steps a fit rests on: a third decode, a third prefill, a third both. Sizes are log-uniform, so that small
    steps are as many as large ones; `context` bounds the summed context, about the KV pool."""

    num_steps: int = 6000
    seed: int = 0
    rows: int = 256
    context: int = 450_000
    context_per_row: int = 8192
    prefill_tokens: int = 8192
    chunks: int = 4

    @property
    def fitted_range(self) -> dict[str, int]:
        return {"rows": self.rows, "context": self.context, "prefill_tokens": self.prefill_tokens}

    def batches(self) -> list[Batch]:
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, 1]))

        def size(low: int, high: int) -> int:
            return int(np.rint(np.exp(rng.uniform(np.log(low), np.log(high)))))

        out = []
        for i in range(self.num_steps):
            kind = KINDS[i % 3]
            rows = context = 0
            chunks: list[tuple[int, int]] = []
            if kind != "prefill":
                rows = size(1, self.rows)
                context = min(rows * size(16, self.context_per_row), self.context)
            if kind != "decode":
                tokens, num_chunks = size(16, self.prefill_tokens), int(rng.integers(1, self.chunks + 1))
                cuts = sorted({0, tokens, *rng.integers(1, tokens, size=num_chunks - 1).tolist()})
                for low, high in pairwise(cuts):
                    room = self.context_per_row - (high - low)
                    start = size(1, room) if room > 1 and rng.random() < 0.5 else 0
                    chunks.append((start, high - low))
            out.append(Batch(rows, context, tuple(chunks)))
        return out

    def held_out(self) -> np.ndarray:
        """(N,) bool: the fifth of the steps that nothing is fitted on."""
        order = np.random.default_rng(np.random.SeedSequence([self.seed, 2])).permutation(self.num_steps)
        mask = np.zeros(self.num_steps, dtype=bool)
        mask[order[: self.num_steps // 5]] = True
        return mask


def kind_of(batch: Batch) -> str:
    return "decode" if not batch.chunks else "hybrid" if batch.num_rows else "prefill"


_ANY = Request(0, 0.0, 1)


def price(cost: CostModel, batch: Batch) -> float:
    """Seconds that `cost` gives a step, by the calls that the simulation makes."""
    if not batch.chunks:
        a, c, _ = cost.decode_line(batch.num_rows, batch.context)
        return a + c * batch.context
    return cost.step(batch.num_rows, batch.context, [Chunk(_ANY, start, length, False) for start, length in batch.chunks])


def relative_errors(cost: CostModel, batches: Sequence[Batch], times: np.ndarray) -> dict[str, dict[str, float]]:
    """{kind: {mean, p95}} of |priced / composed - 1| over the steps of that kind."""
    kinds = np.array([kind_of(b) for b in batches])
    error = np.abs(np.array([price(cost, b) for b in batches]) / times - 1)
    parts = {kind: error[kinds == kind] for kind in KINDS} | {"all": error}
    return {
        kind: {"mean": round(float(e.mean()), 4), "p95": round(float(np.quantile(e, 0.95)), 4)} for kind, e in parts.items()
    }


@dataclass(frozen=True)
class Steps:
    """Columns (N,) of steps: what every form is linear in, but for its knee or its knots."""

    rows: np.ndarray
    context: np.ndarray
    prefill: np.ndarray  # chunk tokens
    work: np.ndarray  # sum over chunks of length x (start + length / 2)
    chunks: np.ndarray
    times: np.ndarray  # s

    @classmethod
    def of(cls, batches: Sequence[Batch], times: np.ndarray) -> Steps:
        table = [
            (b.num_rows, b.context, sum(n for _, n in b.chunks), sum(n * (s + n / 2) for s, n in b.chunks), len(b.chunks))
            for b in batches
        ]
        rows, context, prefill, work, chunks = np.array(table, dtype=np.float64).T
        return cls(rows, context, prefill, work, chunks, times)

    @property
    def tokens(self) -> np.ndarray:
        n: np.ndarray = self.rows + self.prefill
        return n
