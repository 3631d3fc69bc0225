"""KV accounting: the block-phase histogram against a cache that counts every request at every token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.sched import FOREVER, LengthDistribution, Request, Scheduler
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Contiguous, Paged
from lengthwise.sched.policies import FCFS
from lengthwise.sched.preemption import recompute


class Counted:
    """One counter per request: what Paged must be equal to."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.num_blocks, self.size = num_blocks, size
        self.tokens: dict[int, int] = {}  # resident tokens by request
        self.decoding: set[int] = set()

    def blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.size)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(self.blocks(t) for t in self.tokens.values())

    def growth(self) -> int:
        return sum(self.blocks(self.tokens[r] + 1) - self.blocks(self.tokens[r]) for r in self.decoding)

    def room(self) -> int:
        steps = 0
        while sum(self.blocks(self.tokens[r] + steps + 1) - self.blocks(self.tokens[r]) for r in self.decoding) <= self.free:
            steps += 1
        return steps


actions = st.lists(
    st.tuples(st.sampled_from(("admit", "join", "leave", "release", "advance")), st.integers(0, 40)), max_size=60
)


@given(size=st.integers(1, 17), num_blocks=st.integers(4, 60), script=actions)
@settings(max_examples=300)
def test_paged_equals_counting(size, num_blocks, script):
    kv, plain = Paged(num_blocks * size + size // 2, size, 0.0), Counted(num_blocks, size)
    requests = [Request(i, 0.0, 1 + 3 * i % 29) for i in range(10)]
    for action, number in script:
        rid = number % 10
        if action == "admit" and rid not in plain.tokens:
            need = kv.blocks_to_admit(requests[rid], number + 1)
            assert need == plain.blocks(number + 1)
            assert kv.fits(need) == (need + plain.growth() <= plain.free)
            if kv.fits(need):
                kv.allocate(requests[rid], number + 1)
                plain.tokens[rid] = number + 1
        elif action == "join" and rid in plain.tokens and rid not in plain.decoding:
            tokens = plain.tokens[rid]
            if plain.growth() + plain.blocks(tokens + 1) - plain.blocks(tokens) <= plain.free:
                kv.join(tokens)
                plain.decoding.add(rid)
        elif action == "leave" and rid in plain.decoding:
            kv.leave(plain.tokens[rid])
            plain.decoding.discard(rid)
        elif action == "release" and rid in plain.tokens and rid not in plain.decoding:
            assert kv.release(requests[rid], plain.tokens[rid]) == plain.blocks(plain.tokens.pop(rid))
        elif action == "advance" and plain.decoding:
            steps = min(number, kv.room())
            kv.advance(steps)
            for r in plain.decoding:
                plain.tokens[r] += steps
        assert kv.free == plain.free >= 0
        assert kv.growth() == plain.growth()
        assert kv.room() == (plain.room() if plain.decoding else FOREVER)
        kv.check((requests[r], t) for r, t in plain.tokens.items())


def test_a_lost_block_is_noticed():
    kv, req = Paged(160, 16, 0.0), Request(0, 0.0, 20)
    kv.allocate(req, 20)
    kv.free += 1
    with pytest.raises(AssertionError, match="free 9 \\+ held 2 != total 10"):
        kv.check([(req, 20)])


def test_contiguous_reserves_to_the_end_and_never_grows():
    kv, req = Contiguous(1000), Request(0, 0.0, 100, 300)
    assert kv.blocks_at_end(req) == kv.blocks_to_admit(req, 100) == kv.held(req, 250) == 399
    kv.allocate(req, 100)
    kv.join(100)
    kv.advance(200)
    assert kv.free == 601 and kv.growth() == 0 and kv.room() == FOREVER
    kv.leave(300)
    assert kv.release(req, 300) == 399 and kv.free == 1000


def test_the_watermark_is_kept_from_admission_and_not_from_growth():
    kv, req = Paged(1600, 16, 0.1), Request(0, 0.0, 16 * 90)
    assert kv.watermark_blocks == 10
    assert kv.fits(90) and not kv.fits(91)
    kv.allocate(req, 16 * 90)
    kv.join(16 * 90)
    assert kv.room() == 160


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [((15, 16, 0.0), "15 tokens .* 16"), ((64, 0, 0.0), "64 tokens .* 0"), ((64, 16, 1.0), "1.0"), ((64, 16, -0.1), "-0.1")],
)
def test_impossible_pools_are_refused_with_the_numbers(arguments, numbers):
    with pytest.raises(ValueError, match=numbers):
        Paged(*arguments)


def test_future_peak_is_that_of_stepping_on():
    """The greatest KV total at the moments when one ends, stepped token by token."""

    engine = Scheduler(FCFS(), Chunked(), Paged(1 << 16), recompute())
    rows = [(10, 5), (40, 30), (3, 12), (25, 12), (7, 1)]
    for i, (prompt, length) in enumerate(rows):
        assert engine.add(Request(i, 0.0, prompt, 100, prediction=LengthDistribution.point(float(length)))) is None
    assert engine.plan(0.0) is not None
    stepped = max(sum(p + t for p, n in rows if n >= t) for t in range(1, 31))
    assert engine.future_peak() == stepped
