"""Runs of models with sliding-window layers: a Case whose KV is Grouped, and a strategy that draws such."""

from __future__ import annotations

from dataclasses import dataclass, fields

from harness import Case
from hypothesis import strategies as st
from strategies import cases, crowded, reusing

from lengthwise.sched.kv import Grouped, KVCache

MODELS = (  # (layers, window) of each kind: like Gemma 3, Gemma 2, Mistral, two windows, padded, no window at all
    ((1, None), (5, 12)), ((1, None), (1, 8)), ((3, 16),), ((2, None), (2, 5), (4, 20)), ((2, None), (3, 9)), ((4, None),),
    ((1, 1), (1, None)),
)  # fmt: skip


@dataclass(frozen=True)
class Windowed(Case):
    """groups, layers_per_block: as of Grouped."""

    groups: tuple[tuple[int, int | None], ...] = ((1, None), (5, 12))
    layers_per_block: int | None = None

    def kv(self) -> KVCache:
        return Grouped(self.pool, self.groups, self.block_size, self.watermark, self.layers_per_block)


@st.composite
def windowed(draw: st.DrawFn) -> Windowed:
    """Any run of the other strategies, without prefixes."""
    case = draw(st.one_of(cases(), crowded(), reusing()))
    same = {f.name: getattr(case, f.name) for f in fields(Case)} | {"prefix": False, "paged": True, "hash_tokens": 0}
    groups = draw(st.sampled_from(MODELS))
    return Windowed(**same, groups=groups, layers_per_block=draw(st.sampled_from((None, None, 2))))
