"""Copy-on-write: a prompt that is cached whole computes one token, in a copy of its last piece, and touches nobody's blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness import POLICIES, Ask, Case, play
from shadow import Shadow, shadow

from lengthwise.sched import Copy, Plan, Request, Swap
from lengthwise.sched.kv import Prefix
from lengthwise.sched.ledger import Ledger
from lengthwise.sched.plan import DEVICE
from lengthwise.sched.policies import Priority

SAME = Ask(0.0, 64, 8, 8, block_hashes=[1, 2, 3, 4])


def copying(asks, piece: int = 16, **options) -> Case:
    return Case(tuple(asks), prefix=True, copy_on_write=True, hash_tokens=piece, **options)


def prefix(num_blocks: int, size: int = 16, piece: int = 16) -> Prefix:
    kv = Prefix(num_blocks * size, size, 0.0, copy_on_write=True)
    kv.use_hashes(piece)
    kv.keep_tables()
    return kv


def chunks(result, rid: int) -> list[tuple[int, int]]:
    return [(start, length) for s in result.log.steps for r, start, length, _ in s[2] if r == rid]


def test_the_second_of_two_copies_one_block_and_gives_it_back():
    """4 blocks, twice. The first's stay what they are."""
    kv, (one, two) = prefix(10), [Request(i, 0.0, 64, block_hashes=[1, 2, 3, 4]) for i in range(2)]
    assert kv.allocate(one, 64) == 0 and not kv.copies
    kv.enter(one, 64)
    assert kv.lookup(two) == kv.cached(two, 64) == 63 and kv.blocks_to_admit(two, 64) == 1
    assert kv.allocate(two, 64) == 63 and kv.free == 5
    assert kv.copies == {two: Copy(two, 1, [3], [4])}
    kv.check([(one, 64), (two, 64)])
    assert kv.tables.of(two) == [0, 1, 2, 4]
    assert kv.enter(two, 63) == 0 and kv.tables.of(two) == [0, 1, 2, 4]  # its last piece is not whole yet
    assert kv.enter(two, 64) == 1 and kv.free == 6
    assert kv.tables.of(one) == kv.tables.of(two) == [0, 1, 2, 3]
    kv.check([(one, 64), (two, 64)])


def test_who_gives_up_its_kv_takes_no_copy_with_it():
    kv, (one, two) = prefix(10), [Request(i, 0.0, 64, block_hashes=[1, 2, 3, 4]) for i in range(2)]
    kv.allocate(one, 64)
    kv.enter(one, 64)
    kv.allocate(two, 64)
    kv.release(two, 64)
    assert not kv.copies and kv.free == 6
    kv.check([(one, 64)])


@pytest.mark.parametrize(
    ("size", "piece", "num"),
    [(16, 16, 1), (16, 32, 2), (8, 32, 4), (1, 32, 31), (1, 2, 1), (1, 1, 0)],
)
def test_a_piece_is_copied_whole_but_for_a_block_that_is_written_whole(size, piece, num):
    hashes = list(range(64 // piece))
    kv, (one, two) = prefix(200, size, piece), [Request(i, 0.0, 64, block_hashes=hashes) for i in range(2)]
    kv.allocate(one, 64)
    kv.enter(one, 64)
    assert kv.allocate(two, 64) == 63
    assert [copy.num_blocks for copy in kv.copies.values()] == [num] * (num > 0)
    asks = [replace(SAME, arrival=t, block_hashes=hashes) for t in (0.0, 1.0)]
    result = shadow(copying(asks, piece, block_size=size, pool=2048))
    assert chunks(result, 1) == [(63, 1)] and [copy.num_blocks for copy, _ in result.executor.copies] == [num] * (num > 0)


@pytest.mark.parametrize("batching", ["chunked", "mixed", "prefill_first", "static"])
def test_s15_a_prompt_that_is_cached_whole_computes_one_token(batching):
    """As with the cache off but for what is computed; found while the first decodes, after it, and when it is all but gone."""
    asks = [replace(SAME, arrival=t) for t in (0.0, 0.1, 3.0, 3.0)] + [Ask(5.0, 90, 2, 2), replace(SAME, arrival=7.0)]
    result = shadow(copying(asks, batching=batching, pool=12 * 16))
    assert [r._cached for r in result.requests] == [0, 63, 63, 63, 0, 63]
    assert [chunks(result, i) for i in (0, 1, 2, 3, 5)] == [[(0, 64)]] + 4 * [[(63, 1)]]
    assert [copy.num_blocks for copy, _ in result.executor.copies] == 4 * [1]
    off = play(replace(result.case, prefix=False))
    assert [result.log.ended_at[i][:2] for i in range(6)] == [off.log.ended_at[i][:2] for i in range(6)]
    fast = play(result.case)
    assert fast.log == result.log and fast.scheduler.cached_tokens == 4 * 63


def test_a_full_hit_needs_no_more_room_than_a_miss():
    """A pool of just this prompt: the copy lies where the piece lies that it is made from, in another order, and is indexed."""
    asks = [replace(SAME, arrival=t, output_len=1, max_new_tokens=1, block_hashes=[1, 2]) for t in (0.0, 1.0, 2.0)]
    result = shadow(copying(asks, 32, pool=64))
    assert [r._cached for r in result.requests] == [0, 63, 63]
    copies = result.executor.copies
    assert all(evicted and set(copy.sources) == set(copy.targets) for copy, evicted in copies) and len(copies) == 2
    assert any(list(copy.sources) != list(copy.targets) for copy, _ in copies)


def test_what_is_copied_may_be_evicted_for_somebody_else_in_the_same_plan():
    """8 blocks, 4 cached. The second prompt is copied into a free one; the third, in the same plan, takes the others and the
    block that the copy is made from."""
    asks = [SAME, replace(SAME, arrival=1.0, output_len=1, max_new_tokens=1), Ask(1.0, 60, 1, 1)]
    result = shadow(copying(asks, pool=8 * 16))
    ((copy, evicted),) = result.executor.copies
    assert evicted and not set(copy.sources) & set(copy.targets)
    assert chunks(result, 2) == [(0, 60)] and result.requests[2]._first_scheduled == result.requests[1]._first_scheduled


def test_an_answer_that_names_cover_is_found_whole_by_who_was_evicted():
    """Preempted with 48 + 16 tokens, it finds them in the conversation that another has gone on with, and computes one."""
    first, low = (Ask(t, 48, 40, 40, priority=5.0, block_hashes=range(100)) for t in (0.0, 3.0))
    alone = play(copying([first, low]))
    then = [s[0] for s in alone.log.steps if s[0] >= 3.0][16]
    result = shadow(copying([first, low, Ask(then, 16, 1, 1)], policy="priority", max_num_seqs=1))
    assert chunks(result, 1) == [(47, 1), (63, 1)] and result.requests[1]._recomputed == 0


def test_who_is_swapped_in_copies_what_the_device_has_instead():
    """Its whole KV is in the index still when it comes back: nothing comes from the tier, and nothing is computed."""
    low = Ask(0.0, 64, 40, 40, priority=5.0, block_hashes=range(100))
    result = shadow(copying([low, Ask(0.001, 100, 1, 1)], policy="priority", pool=12 * 16, cpu=160, max_num_seqs=1))
    swapping = result.scheduler.swapping
    assert (swapping.blocks_out, swapping.tokens_out, swapping.blocks_in, swapping.tokens_in) == (4, 64, 0, 0)
    assert chunks(result, 0) == [(0, 64)] and [copy.num_blocks for copy, _ in result.executor.copies] == [1]


class Backwards(Priority):
    """Tries the least urgent first, so that in one plan somebody is let in and displaced again."""

    def order(self, waiting, view):
        return iter(sorted(waiting, key=lambda r: -r.priority))


def test_who_is_let_in_and_displaced_by_one_plan_is_not_swapped_out(monkeypatch):
    """Its copy has not been made: there is nothing to swap out, and nothing to copy any more."""
    monkeypatch.setitem(POLICIES, "backwards", Backwards)
    asks = [SAME, replace(SAME, arrival=1.0, priority=5.0), Ask(1.0, 120, 4, 4, priority=1.0)]
    result = shadow(copying(asks, policy="backwards", pool=8 * 16, cpu=640))
    assert result.requests[1]._num_preemptions == 1 and result.scheduler.num_swaps == 0
    assert result.requests[1]._first_scheduled == result.requests[2]._first_scheduled
    assert all(reason == "stop" for _, reason, _ in result.log.ended_at.values())


def test_a_copy_that_nobody_has_told_is_not_indexed():
    """Swapped in whole, its second piece to be copied from where it was evicted, and displaced by the same plan: the blocks
    hold nothing yet that others might find."""
    req, kv = Request(0, 0.0, 64, block_hashes=[1, 2]), Prefix(5 * 16, 16, 0.0, copy_on_write=True)
    kv.use_hashes(32)
    kv.keep_tables()
    kv.allocate(req, 64)
    kv.enter(req, 64)
    kv.release(req, 64)
    kv.allocate(other := Request(1, 0.0, 16), 16)
    assert kv.allocate(req, 64) == 63 and req in kv.copies
    ledger = SimpleNamespace(kv=kv, capacity=lambda _: 64)
    req._computed = 64
    Ledger._release(ledger, req)
    assert kv.lookup(req) == 32 and not kv.copies  # the first piece alone: the second was evicted for its copy
    kv.check([(other, 16)])


def test_moves_are_made_in_an_order_that_is_right_for_all():
    req = Request(0, 0.0, 1)
    out, into, copy = Swap(req, 1, DEVICE, "cpu"), Swap(req, 1, "cpu", DEVICE), Copy(req, 1)
    assert Plan(swaps=[out, into], copies=[copy]).moves == [out, copy, into]
    assert Plan().moves == []


def test_the_shadow_notices_a_copy_that_is_not_made():
    class Forgetting(Shadow):
        def _copy_own(self, copy):
            pass

    with pytest.raises(AssertionError, match="holds"):
        shadow(copying([SAME, replace(SAME, arrival=1.0)]), executor=Forgetting)
