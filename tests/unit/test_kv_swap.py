"""Swap tiers: whose KV goes where, what it costs, and that it comes back whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import TICK, Ask, Case, copy_seconds, play

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.sched import Chunk, EventKind, Failure, LengthDistribution, Phase, Plan, Request, Scheduler, Swap, swap
from lengthwise.sched.batching import Chunked
from lengthwise.sched.check import check
from lengthwise.sched.kv import Paged, Tiers
from lengthwise.sched.plan import DEVICE
from lengthwise.sched.policies import Priority
from lengthwise.sched.swapping import Swapping

point = LengthDistribution.point


def swaps_of(case: Case, **options) -> tuple[list[tuple[float, list[tuple[int, int, str, str]]]], object]:
    """The copies of each plan that has some, with its start (s), and the result."""
    told: list[tuple[float, list[tuple[int, int, str, str]]]] = []

    def watch(scheduler, plan, outcome):
        if plan.swaps:
            assert plan.repeat == 1 and outcome.num_steps == 1
            told.append((outcome.ends[0], [(s.request.rid, *s[1:4]) for s in plan.swaps]))

    return told, play(case, watch=watch, **options)


# Three of low priority, one block each, and one that needs all memory.
LOW = Ask(0.0, 10, 6, 6, priority=5.0)
CROWD = Case((LOW, LOW, LOW, Ask(0.02, 150, 4, 10, priority=1.0)), "priority", pool=160, cost="even", cpu=32)


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_s16_who_cannot_be_swapped_is_computed_again(plain, keeps_kv):
    """S16: swap of 2 blocks, three requests need it: two are swapped, the third is recomputed and counted; all finish."""
    told, result = swaps_of(replace(CROWD, keeps_kv=keeps_kv), plain=plain)
    scheduler, requests = result.scheduler, result.requests
    assert scheduler.num_swap_full == 1 and scheduler.num_swaps == 2
    assert [s for _, copies in told for s in copies] == [
        (2, 1, DEVICE, "cpu"), (1, 1, DEVICE, "cpu"), (1, 1, "cpu", DEVICE), (2, 1, "cpu", DEVICE),
    ]  # fmt: skip
    assert [r._num_preemptions for r in requests] == [1, 1, 1, 0]
    assert [r._recomputed > 0 for r in requests] == [True, False, False, False]
    assert all(result.log.ended_at[i][:2] == (a.output_len, "stop") for i, a in enumerate(CROWD.asks))
    swapping = scheduler.swapping
    assert swapping.blocks_out == swapping.blocks_in == 2 == swapping.num_ins
    assert swapping.tokens_out == swapping.tokens_in == 20  # prompts; the first token of an answer has no KV yet


def test_a_swapped_request_decodes_on_without_prefill():
    _, result = swaps_of(replace(CROWD, cpu=64))
    assert result.scheduler.num_swap_full == result.scheduler.recomputed_tokens == 0 and result.scheduler.num_swaps == 3
    assert sum(len(s[2]) for s in result.log.steps) == 4  # each prompt once
    _, again = swaps_of(replace(CROWD, cpu=None))
    assert sum(len(s[2]) for s in again.log.steps) == 7 and not again.scheduler.num_swaps


def test_the_second_tier_takes_what_the_first_has_no_room_for():
    told, result = swaps_of(replace(CROWD, disk=16))
    assert [s[3] for s in told[0][1]] == ["cpu", "cpu", "disk"] and result.scheduler.num_swap_full == 0
    assert result.scheduler.swapping.tiers.free == {"cpu": 2, "disk": 1}


def test_copies_out_are_told_before_copies_in():
    """Who comes back may be followed, in the same plan, by somebody whose victims make the room that both need."""
    swapping, (back, out) = Swapping({"cpu": 64}, 16), (Request(i, 0.0, 20) for i in range(2))
    assert swapping.take(back, 2, 20)
    assert [copy.request for copy in swapping.tell()] == [back] and not swapping.untold
    swapping.bring(back, 0, 20)
    assert swapping.take(out, 2, 20)
    assert [(copy.request, copy.target) for copy in swapping.tell()] == [(out, "cpu"), (back, DEVICE)]


def test_copies_take_time_before_the_step_they_stand_in():
    told, result = swaps_of(replace(CROWD, cpu=64))
    at = next(k for k, s in enumerate(result.log.steps) if s[1] == told[0][0])
    start, end, chunks, *_ = result.log.steps[at]
    assert [c[0] for c in chunks] == [3]
    assert end - start == pytest.approx(3e-3 + TICK + 150 * TICK / 64)


def test_a_prefill_that_is_swapped_goes_on_where_it_was():
    """A decodes and takes the last block when 78 of the 120 tokens of B's prompt are computed; the rest follows later."""
    a, b = Ask(0.0, 30, 10, 20, priority=1.0), Ask(0.001, 120, 3, 8, priority=5.0)
    case = Case((a, b), "priority", pool=160, cost="even", cpu=160, token_budget=40, max_num_seqs=2)
    told, result = swaps_of(case)
    assert [s for _, copies in told for s in copies] == [(1, 5, DEVICE, "cpu"), (1, 5, "cpu", DEVICE)]
    chunks = [(start, length) for s in result.log.steps for rid, start, length, _ in s[2] if rid == 1]
    assert chunks == [(0, 39), (39, 39), (78, 40), (118, 2)]


def test_a_swapped_prefill_goes_on_behind_what_others_have_computed_since():
    """As above; before B is back, C has computed 96 tokens of the same prompt: B's copy is not needed, and 24 are left."""
    a, b = Ask(0.0, 30, 10, 20, priority=1.0), Ask(0.001, 120, 3, 8, priority=5.0, block_hashes=list(range(7)))
    c = replace(b, arrival=0.1, priority=2.0)
    case = Case((a, b, c), "priority", pool=160, cost="even", cpu=160, token_budget=40, max_num_seqs=2)
    told, result = swaps_of(replace(case, prefix=True, hash_tokens=16))
    assert [s for _, copies in told for s in copies] == [(1, 5, DEVICE, "cpu"), (1, 0, "cpu", DEVICE)]
    chunks = [(start, length) for s in result.log.steps for rid, start, length, _ in s[2] if rid == 1]
    assert chunks == [(0, 39), (39, 39), (96, 24)] and result.requests[2]._cached == 64


def test_only_what_the_device_has_not_kept_is_copied_back():
    """The prompt's blocks stay indexed; the newcomer takes some of them. With a cache the rest comes from the tier."""
    low = Ask(0.0, 64, 30, 30, priority=5.0, block_hashes=list(range(4)))
    for prompt, missing in ((16, 1), (140, 5)):  # 5 blocks of 10: it needs the slot alone, or evicts all 4
        high = Ask(0.2, prompt, 12, 20, priority=1.0, block_hashes=list(range(100, 110)))
        case = Case((low, high), "priority", prefix=True, hash_tokens=16, pool=160, cost="even", cpu=160, max_num_seqs=1)
        told, result = swaps_of(case)
        assert [s[1:] for _, copies in told for s in copies] == [(5, DEVICE, "cpu"), (missing, "cpu", DEVICE)]
        assert result.scheduler.swapping.blocks_in == missing and result.scheduler.recomputed_tokens == 0


@pytest.mark.parametrize("kind", [EventKind.ABORT, EventKind.TIMEOUT])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    ("phase", "rid", "after"),
    [("WAITING", 3, 0.05), ("PREFILLING", 2, 0.03), ("DECODING", 1, 0.25), ("SWAPPED", 0, 0.3), ("PAUSED", 0, 0.3)],
)
def test_d5_an_abort_in_every_state_frees_every_tier(phase, rid, after, prefix, kind):
    """D5: one is aborted, nobody else is affected, and the free blocks of all tiers are back in the end."""
    low, high = Ask(0.0, 40, 40, 60, priority=5.0), Ask(0.1, 40, 30, 60, priority=1.0)
    asks = [low, high, Ask(0.2, 200, 5, 60, priority=1.0), Ask(0.25, 40, 5, 60, priority=9.0)]
    asks[rid] = replace(asks[rid], abort_after=after, abort_kind=kind)
    if phase == "DECODING":
        asks[rid] = replace(asks[rid], abort_after=0.15)
    seen = []

    class Watching(Scheduler):
        def abort(self, req, failed=False):
            seen.append(req.phase.name)
            return super().abort(req, failed)

    asks = [replace(a, block_hashes=range(100 * i, 100 * i + 50)) for i, a in enumerate(asks)]
    case = Case(
        tuple(asks), "priority", max_num_seqs=2 if rid else 1, token_budget=64, cost="even", pool=512, cpu=256,
        prefix=prefix, hash_tokens=16 * prefix, keeps_kv=phase == "PAUSED",
    )  # fmt: skip
    result = play(case, scheduler=Watching)
    assert seen == [phase]
    assert [result.log.ended_at[i][1] for i in range(4)].count("stop") == 3
    scheduler = result.scheduler
    assert scheduler.counts["aborted"] == 1 and result.requests[rid].phase == Phase.ABORTED
    assert not scheduler.kv.in_use and scheduler.swapping.tiers.free == scheduler.swapping.tiers.sizes


def executor(scheduler: Scheduler) -> SimulatedExecutor:
    clock = SimulatedClock()
    clock.advance(scheduler.now)
    return SimulatedExecutor(clock, Affine(1.0, 0.0, 0.0, 0.0), [9, 9], swap_seconds=copy_seconds)


def swapped_out() -> tuple[Scheduler, Request, Request, Plan]:
    """One request swapped out for another, and the plan that says so."""
    scheduler = Scheduler(Priority(), Chunked(), Paged(160), swap(160), max_num_seqs=1)
    low, high = Request(0, 0.0, 20, 50, priority=5.0), Request(1, 0.0, 20, 50, priority=1.0)
    plans = []
    for req in (low, high):
        scheduler.add(req)
        plan = scheduler.plan(scheduler.now)
        assert plan is not None
        plans.append(plan)
        scheduler.book(plan, executor(scheduler).collect(plan, 9e9))
    assert low.phase == Phase.SWAPPED
    return scheduler, low, high, plans[-1]


def test_s5_a_swapped_request_that_fails_leaves_nothing_behind():
    scheduler, low, high, plan = swapped_out()
    assert plan.swaps == [Swap(low, 2, DEVICE, "cpu")] and scheduler.computed(low) == 20 and scheduler.num_waiting == 1
    plan = scheduler.plan(scheduler.now)
    engine = executor(scheduler)
    engine._left[1] = 8
    outcome = engine.collect(plan, 0.0)
    outcome.failures.append(Failure(low, "the tier is gone"))
    scheduler.book(plan, outcome)
    check(scheduler, 1)
    assert low.phase == Phase.FAILED and scheduler.swapping.tiers.free == {"cpu": 10, "disk": 0}
    assert scheduler.num_waiting == 0 and scheduler.abort(high) and not scheduler.abort(low)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s, r: s.swapping.tiers.free.update(cpu=9), "blocks in cpu: free 9 \\+ held 2 != total 10"),
        (lambda s, r: setattr(r, "_phase", Phase.PAUSED), "stands among SWAPPED"),
        (lambda s, r: setattr(r, "_computed", 60), "60 tokens swapped out, in 2 blocks"),
        (lambda s, r: s.waiting.remove(r), "0 entries wait.* 1 swapped"),
        (lambda s, r: setattr(r, "_cached", 20), "found 20 tokens of its prompt cached"),
    ],
)
def test_the_checker_looks_into_every_tier(corrupt, message):
    scheduler, low, _, _ = swapped_out()
    check(scheduler, 1)
    corrupt(scheduler, low)
    with pytest.raises(AssertionError, match=message):
        check(scheduler, 1)


# --- what copies cost ---------------------------------------------------------------------------------------------------


def hardware(**options) -> Hardware:
    return Hardware("toy", "toy", 1e9, 1e8, 0.0, 1e5, Affine(1e-2, 0.0, 0.0, 0.0), {}, **options)


def test_hardware_prices_copies_by_the_link_of_the_tier():
    any_request = Request(0, 0.0, 1)
    copies = [Swap(any_request, 100, DEVICE, "cpu"), Swap(any_request, 30, "disk", DEVICE), Swap(any_request, 0, "cpu", DEVICE)]
    assert hardware().swap_seconds(copies, 16) == pytest.approx(100 * 16 * 1e5 / 25e9 + 30 * 16 * 1e5 / 3e9)
    assert hardware(swap_bandwidth={"cpu": 5e9}).swap_seconds(copies[:1], 16) == pytest.approx(0.032)
    with pytest.raises(ValueError, match="no bandwidth for swap tier disk"):
        hardware(swap_bandwidth={"cpu": 5e9}).swap_seconds(copies, 16)
    with pytest.raises(ValueError, match=r"'cpu': 0\b.* > 0"):
        hardware(swap_bandwidth={"cpu": 0})


def test_an_executor_that_cannot_price_copies_refuses_them():
    request = Request(0, 0.0, 8, 8)
    plan = Plan([Chunk(request, 0, 8, True)], swaps=[Swap(request, 3, DEVICE, "cpu")])
    cost = Affine(1.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"num_blocks=3.* has no price"):
        SimulatedExecutor(SimulatedClock(), cost, [5]).collect(plan, 9.0)
    executor = SimulatedExecutor(SimulatedClock(), cost, [5], swap_seconds=lambda swaps: 0.25 * swaps[0].num_blocks)
    assert executor.collect(plan, 9.0).ends == [1.75]


def test_impossible_tiers_are_refused():
    with pytest.raises(ValueError, match="disk=-1 tokens"):
        swap(16, -1)
    with pytest.raises(ValueError, match="tier cpu has -2 blocks"):
        Tiers({"cpu": -2})
    assert dict(swap().tiers) == {"cpu": 65_536, "disk": 0} and not swap().keeps_kv
