"""Hypothesis strategies: whole runs, from tight to wide, with arrivals that meet step boundaries and with bad predictions.

Hypothesis draws the limits, the number of requests and a seed; the requests come from the seed, one stream each, so that a
smaller number keeps those before. Drawn one by one they would be few, small and never in each other's way.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from harness import BATCHING, COSTS, DRAWN, PREEMPTIVE, TICK, Ask, Case
from hypothesis import strategies as st

from lengthwise.sched import EventKind, LengthDistribution

NUMBERS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24)
LENGTHS = (48, 48, 48, 48, 40, 20, 3, 1)  # max_new_tokens
ABORTS = (0.0, TICK, 3.3 * TICK, 12 * TICK, 30 * TICK)


def asks(seed: int, num: int, gap: float) -> tuple[Ask, ...]:
    """`num` requests, `gap` ticks apart on the mean. Predictions are right, wrong by any factor, or a distribution; multiples
    of 1/8 token, so that sums and differences are exact and ties are ties in every order of evaluation."""
    arrival, out = 0.0, []
    for i in range(num):
        rng = np.random.default_rng([seed, i])
        arrival += TICK * gap * (0, 0, 1, 1, 2, 0.37, 2.71, 1)[rng.integers(8)]
        n = int(rng.choice((1, rng.integers(1, 12), rng.integers(1, 49), rng.integers(24, 49))))
        guesses = (float(n), rng.integers(0, 400) / 8, rng.integers(1, 60))
        guess = LengthDistribution.point(float(rng.choice(guesses)))
        if rng.random() < 0.2:
            guess = LengthDistribution.from_quantiles([0.1, 0.5, 0.9], np.array([0.5, 1.0, 2.5]) * rng.integers(1, 40))
        out.append(
            Ask(
                arrival=arrival,
                prompt_len=int(rng.integers(1, 41)),
                output_len=n,
                max_new_tokens=LENGTHS[rng.integers(8)],
                prediction=guess,
                priority=int(rng.integers(-1, 3)),
                ready_delay=(0, 0, 0, 0, 0, 1, 4, 2.3)[rng.integers(8)] * TICK,
                abort_after=float(rng.choice(ABORTS)) if rng.random() < 0.15 else None,
                abort_kind=(EventKind.ABORT, EventKind.TIMEOUT)[rng.integers(2)],
                client=f"client {int(rng.integers(3))}",
            )
        )
    return tuple(out)


@st.composite
def cases(draw: st.DrawFn, policies: tuple[str, ...] = DRAWN) -> Case:
    """Any run. Some requests may be rejected at the door."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    max_num_seqs = one_of(1, 2, 3, 4, 8, 16)
    return Case(
        policy=one_of(*policies),
        batching=one_of("chunked", *BATCHING),
        paged=one_of(True, True, True, False),
        pool=one_of(4096, 256, 200, 160, 144, 128, 121, 112, 104, 97),
        block_size=one_of(1, 2, 4, 7, 16),
        watermark=one_of(0.0, 0.0, 0.01, 0.1),
        keeps_kv=one_of(False, True),
        max_num_seqs=max_num_seqs,
        token_budget=max(max_num_seqs, one_of(512, 512, 64, 40, 40, 16, 5, 1)),
        max_model_len=one_of(8192, 8192, 8192, 8192, 70),
        clip=one_of(False, True),
        cost=one_of(*COSTS),
        asks=asks(draw(st.integers(0, 1 << 32)), one_of(*NUMBERS), one_of(0.0, 0.5, 1.0, 2.0, 4.0)),
    )


@st.composite
def crowded(draw: st.DrawFn) -> Case:
    """Runs in which requests yield to each other, mostly paused in place: few slots, a policy that preempts, one arrival a tick
    or less, memory that sometimes runs out too, and prompts that are often the whole token budget."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    budget = one_of(40, 41, 48, 96)
    seed, num = draw(st.integers(0, 1 << 32)), one_of(24, 20, 16, 12, 8)
    some = asks(seed, num, one_of(2.0, 1.0, 3.0, 5.0))
    whole = np.random.default_rng([seed, num]).random(num) < 0.2
    return Case(
        policy=one_of(*("psjf", "srpt", "srpt_reestimate", "priority", "aging_srpt") * 4, *PREEMPTIVE),
        batching=one_of("prefill_first", "chunked", "mixed"),
        pool=one_of(256, 200, 160, 4096),
        block_size=one_of(4, 16, 7),
        keeps_kv=one_of(True, True, True, False),
        max_num_seqs=one_of(2, 3, 1, 4),
        token_budget=budget,
        cost=one_of(*COSTS),
        asks=tuple(replace(a, prompt_len=min(budget, 48)) if w else a for a, w in zip(some, whole, strict=True)),
    )


@st.composite
def reusing(draw: st.DrawFn, policies: tuple[str, ...] = DRAWN) -> Case:
    """Runs with a prefix cache (mostly) and swap tiers (mostly), tight to wide: prompts that share beginnings by written names,
    turns of conversations whose names are a `range`, and some without names."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    size = one_of(1, 2, 4, 4, 7, 16)
    piece = size * one_of(1, 1, 2, 3)
    seed, num = draw(st.integers(0, 1 << 32)), one_of(*NUMBERS)
    max_num_seqs = one_of(1, 2, 3, 4, 8, 16)
    prefix = one_of(True, True, True, False)
    return Case(
        policy=one_of(*policies, *(p for p in policies if p in ("psjf", "srpt", "priority"))),
        batching=one_of("chunked", "chunked", *BATCHING),
        paged=prefix or one_of(True, False),
        prefix=prefix,
        copy_on_write=one_of(True, False),
        hash_tokens=piece,
        cpu=one_of(None, 4096, 160, 64, 24, 0),
        disk=one_of(0, 0, 48),
        pool=one_of(4096, 256, 200, 160, 144, 128, 121, 112, 104, 97),
        block_size=size,
        watermark=one_of(0.0, 0.0, 0.01, 0.1),
        keeps_kv=one_of(False, True),
        max_num_seqs=max_num_seqs,
        token_budget=max(max_num_seqs, one_of(512, 512, 64, 40, 40, 16, 5, 1)),
        cost=one_of(*COSTS),
        asks=named(seed, asks(seed, num, one_of(0.0, 0.5, 1.0, 1.0, 2.0, 4.0)), piece),
    )


def named(seed: int, some: tuple[Ask, ...], piece: int) -> tuple[Ask, ...]:
    """`some` with names for their prompts' pieces: of four conversations (range), of a tree of templates, or none. Half of the
    prompts end with a piece, so that they may be cached whole."""
    out = []
    for i, a in enumerate(some):
        rng = np.random.default_rng([seed, i, 1])
        k, kind = int(rng.integers(4)), rng.random()
        whole = a.prompt_len // piece
        hashes: range | list[int] | None = None
        if kind < 0.45:
            hashes = range(1000 * k, 1000 * k + (1 << 70 if k == 3 else 900))
        elif kind < 0.9:
            parts = [int(rng.integers(0, whole + 1)) for _ in range(2)]
            forks = sorted(parts)
            hashes = [10_000 + p + 100 * k * (p >= forks[0]) + 1000 * (i + 1) * (p >= forks[1]) for p in range(whole)]
            hashes += [90_000 + i] * int(rng.integers(2))  # the end of the prompt: no whole piece
        prompt_len = whole * piece if whole and rng.random() < 0.5 else a.prompt_len
        out.append(replace(a, prompt_len=prompt_len, block_hashes=hashes))
    return tuple(out)
