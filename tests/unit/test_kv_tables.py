"""Block tables: ids move where counts move, and the checker finds it when they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Ask, Case, play
from shadow import Shadow, shadow

from lengthwise.sched import LengthDistribution, Request
from lengthwise.sched.kv import BlockTables, Contiguous, Paged, Prefix
from lengthwise.sched.plan import DEVICE

point = LengthDistribution.point


def prefix(num_blocks: int = 10, size: int = 4, piece: int = 8) -> Prefix:
    kv = Prefix(num_blocks * size, size, 0.0)
    kv.use_hashes(piece)
    kv.keep_tables()
    return kv


def test_blocks_are_taken_in_order_and_given_back():
    kv = Paged(10 * 4, 4, 0.0)
    tables = kv.keep_tables()
    one, two = Request(0, 0.0, 10), Request(1, 0.0, 4)
    kv.allocate(one, 10)
    kv.allocate(two, 4)
    assert tables.of(one) == [0, 1, 2] and tables.of(two) == [3]
    kv.join(4)
    assert kv.growth() == 1 and tables.grow(two) == 4
    kv.advance(1)
    kv.check([(one, 10), (two, 5)])
    kv.release(one, 10)
    assert tables.of(two) == [3, 4] and sorted(tables.free) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert kv.groups == (tables,) and kv.lies_in(two, 4) == [3]


def test_contiguous_tables_never_grow():
    result = shadow(Case((Ask(0.0, 10, 20, 30), Ask(0.0, 5, 8, 8)), paged=False, pool=64))
    assert [result.log.ended_at[i][0] for i in range(2)] == [20, 8]


def test_a_shared_piece_is_one_block_and_a_second_computation_gives_its_own_back():
    kv = prefix()
    one, two = (Request(i, 0.0, 17, block_hashes=[1, 2]) for i in range(2))
    kv.allocate(one, 17)
    kv.allocate(two, 17)  # at once: neither finds anything
    assert kv.tables.of(one) == [0, 1, 2, 3, 4] and kv.tables.of(two) == [5, 6, 7, 8, 9]
    kv.enter(one, 17)
    kv.enter(two, 17)
    assert kv.tables.of(two) == [0, 1, 2, 3, 9] and sorted(kv.tables.free) == [5, 6, 7, 8]
    kv.release(one, 17)
    kv.check([(two, 17)])
    kv.release(two, 17)
    assert kv.evictable == 4 and sorted(kv.tables.free) == [4, 5, 6, 7, 8, 9]
    third = Request(2, 0.0, 17, block_hashes=[1, 3])
    assert kv.allocate(third, 17) == 8 and kv.tables.of(third)[:2] == [0, 1]
    kv.check([(third, 17)])


def test_what_is_evicted_can_be_had_by_the_next_step():
    """Rows that grow take ids while the step runs: the plan has evicted before."""
    kv = prefix(6)
    old, row = Request(0, 0.0, 16, block_hashes=[1, 2]), Request(1, 0.0, 8)
    kv.allocate(old, 16)
    kv.enter(old, 16)
    kv.release(old, 16)
    kv.allocate(row, 8)
    kv.join(8)
    assert kv.free == 0 and not kv.tables.free and kv.growth() == 1
    assert kv.ready() and kv.free == len(kv.tables.free) == 2 and kv.evictable == 2
    assert kv.tables.grow(row) in (2, 3)
    kv.advance(1)
    kv.check([(row, 9)])


@pytest.mark.parametrize("size", [16, 4])
def test_s15_a_prompt_that_is_cached_whole_computes_a_token_and_reads_the_same(size):
    """S15: 64 tokens twice in pieces of 16: at most 48 are cached; a tight pool evicts between them, or does not."""
    same = Ask(0.0, 64, 30, 30, block_hashes=[1, 2, 3, 4])
    other = Ask(1.0, 100, 60, 60, block_hashes=[7, 8, 9, 10, 11, 12])
    for asks, found in (
        ((same, replace(same, arrival=2.0)), 48),
        ((same, other, replace(same, arrival=6.0)), 0),
        ((same, replace(same, arrival=0.0)), 0),
    ):
        case = Case(asks, prefix=True, hash_tokens=16, block_size=size, pool=10 * 16 if len(asks) == 3 else 16 * 16)
        kept = shadow(case)  # asserts what every row reads
        assert kept.requests[-1]._cached == found
        computed = sum(length for step in kept.log.steps for rid, _, length, _ in step[2] if rid == len(asks) - 1)
        assert computed == 64 - found >= 1
        assert kept.log == play(case).log
        ends = [kept.log.ended_at[i][:2] for i in range(len(asks))]
        assert ends == [play(replace(case, prefix=False)).log.ended_at[i][:2] for i in range(len(asks))]


@pytest.mark.parametrize("batching", ["chunked", "prefill_first"])
def test_copies_out_are_read_before_copies_in_are_written(batching):
    """One comes back into the blocks of whom it displaces, in one plan: SRPT, whose second request outlives its prediction."""
    long, short = Ask(0.0, 40, 60, 60, prediction=point(40.0)), Ask(0.2, 40, 60, 60, prediction=point(4.0))
    case = Case((long, short), "srpt_reestimate", batching, pool=104, block_size=4, cost="even", cpu=400)
    told: list[bool] = []

    class Noting(Shadow):
        def _copy(self, swaps):
            blocks = [{block for copy in swaps if (copy.target == DEVICE) == into for block in copy.blocks} for into in (0, 1)]
            told.append(bool(blocks[0] & blocks[1]))
            super()._copy(swaps)

    result = shadow(case, executor=Noting)
    assert any(told) and result.scheduler.recomputed_tokens == 0
    assert [result.log.ended_at[i][0] for i in range(2)] == [60, 60]


# --- the checker --------------------------------------------------------------------------------------------------------


def lose(tables: BlockTables, kv: Paged, req: Request) -> None:
    tables.free.pop()


def leak(tables: BlockTables, kv: Paged, req: Request) -> None:
    tables.grow(req)


def twice(tables: BlockTables, kv: Paged, req: Request) -> None:
    tables.of(req)[-1] = tables.free[-1]


def forget(tables: BlockTables, kv: Paged, req: Request) -> None:
    tables.free += tables._of.pop(req)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose, "5 blocks are free, counted 6"),
        (leak, "has 5 blocks in its table, holds 4"),
        (twice, "one is in two places"),
        (forget, "has 0 blocks in its table, holds 4"),
    ],
)
@pytest.mark.parametrize("kind", [Paged, Prefix])
def test_a_wrong_table_is_noticed(kind, harm, message):
    kv, req = kind(40, 4, 0.0), Request(0, 0.0, 16)
    tables = kv.keep_tables()
    kv.allocate(req, 16)
    kv.check([(req, 16)])
    harm(tables, kv, req)
    with pytest.raises(AssertionError, match=message):
        kv.check([(req, 16)])


def test_a_path_that_is_not_the_tables_is_noticed():
    kv, req = prefix(), Request(0, 0.0, 17, block_hashes=[1, 2])
    kv.allocate(req, 17)
    kv.enter(req, 17)
    table = kv.tables.of(req)
    table[0], table[1] = table[1], table[0]
    with pytest.raises(AssertionError, match="the prefix index \\[0, 1, 2, 3\\] for the first"):
        kv.check([(req, 17)])


def test_tables_are_kept_from_the_start():
    for kv in (Paged(40, 4, 0.0), Contiguous(40)):
        kv.allocate(Request(0, 0.0, 5, 10), 5)
        with pytest.raises(ValueError, match="KV blocks are held already"):
            kv.keep_tables()


def test_taking_more_than_there_is_is_an_error():
    tables = BlockTables(3)
    with pytest.raises(AssertionError, match="4 blocks to take, 3 free"):
        tables.admit(Request(0, 0.0, 1), (), 4)
