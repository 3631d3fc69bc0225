"""Named cases from people who do this job (S, P7, M8: what went wrong elsewhere), and cases that broke this core once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from harness import INF, POLICIES, TICK, Ask, Case, play

from lengthwise.engine.simulated import SimulatedClock
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.dataset import Dataset
from lengthwise.sched import Event, EventKind, Failure, LengthDistribution, Outcome, Phase, Request, Scheduler, Stalled, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.check import check
from lengthwise.sched.contract import Overtaking
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, PSJF, SJF, SRPT, Aging, Priority
from lengthwise.sched.policy import FOREVER
from lengthwise.sched.preemption import recompute
from lengthwise.sched.rehearsal import Log, PlainExecutor, Script

point = LengthDistribution.point
ALL = ("fcfs", "sjf", "psjf", "srpt", "srpt_reestimate", "priority", "aging_srpt", "aging_sjf")


def started(result, rid: int) -> int:
    """Index of the single step with the first chunk of request `rid`."""
    return next(k for k, s in enumerate(result.log.steps) if any(c[0] == rid for c in s[2]))


# --- S2, S20: memory too small for all --------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("blocks", [10, 15])
@pytest.mark.parametrize("policy", ALL)
def test_s2_requests_that_each_fill_the_pool_all_complete(policy, blocks, keeps_kv, caplog):
    rng = np.random.default_rng(2)
    asks = tuple(Ask(0.0, 16, 144, 145, point(float(rng.integers(1, 300))), priority=float(i % 3)) for i in range(8))
    case = Case(asks, policy, pool=blocks * 16, keeps_kv=keeps_kv)
    result = play(case, max_steps=8 * 144 * 8)
    assert all(reason == "stop" and n == 144 for n, reason, _ in result.log.ended_at.values())
    total = sum(r._recomputed for r in result.requests)
    assert result.scheduler.recomputed_tokens == total > 0
    assert total < 144 * 160 * 8
    assert len(caplog.records) < 100


def test_s2_work_that_nothing_will_start_is_named():
    class Never(FCFS):
        def admit(self, req, view):
            return req.rid != 1

    asks = tuple(Ask(0.1 * i, 8, 5) for i in range(3))
    with pytest.raises(Stalled, match=r"rid=1\b"):
        play(Case(asks), policy=Never())


def test_s2_a_prediction_that_never_comes_is_named():
    asks = (Ask(0.0, 8, 5, prediction=point(5.0)), Ask(0.1, 8, 5))
    with pytest.raises(Stalled, match=r"rid=1\b"):
        play(Case(asks, policy="sjf"))


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("policy", ALL)
def test_s20_a_full_cache_keeps_the_tokens_of_whoever_must_wait(policy, keeps_kv):
    asks = tuple(Ask(0.0, 20, 40 + i, 100, point(40.0 + i)) for i in range(20))
    case = Case(asks, policy, pool=16 * 16, keeps_kv=keeps_kv)
    result = play(case, plain=True)  # it asserts that every recompute ends at prompt + all tokens emitted so far
    assert [len(result.executor.token_times[i]) for i in range(20)] == [40 + i for i in range(20)]
    assert result.scheduler.num_preemptions > 0
    for k, (_, _, chunks, _, leaves, _, _, _) in enumerate(result.log.steps):
        if leaves and policy in ("fcfs", "sjf", "aging_sjf"):  # evicted for memory: nobody is let in by the same plan
            assert not any(start == 0 for _, start, _, _ in chunks), k


# --- S4: the loop wakes ------------------------------------------------------------------------------------------------


def test_s4_the_second_starts_when_the_first_ends():
    result = play(Case((Ask(0.0, 1, 65), Ask(0.0, 1, 65)), max_num_seqs=1, cost="tick"))
    assert result.requests[1]._first_scheduled == 1.0
    assert result.finish == [1.0, 2.0]


def test_s4_mean_wait_of_mm1_at_load_03():
    rng, num, step = np.random.default_rng(4), 30_000, 1 / 512
    arrival = np.cumsum(rng.exponential(1 / 0.3, num))
    size = np.maximum(1, np.rint(rng.exponential(512, num))).astype(int)
    asks = tuple(Ask(a, 1, int(s) + 1, 1 << 16) for a, s in zip(arrival.tolist(), size, strict=True))
    case = Case(asks, pool=1 << 18, max_num_seqs=1, max_model_len=1 << 17, cost=Affine(0.0, 0.0, 0.0, 0.0, decode_base=step))
    wait = np.array(play(case, check=False, keep=False).finish) - arrival - size * step
    assert wait.mean() == pytest.approx(0.3 / 0.7, rel=0.05)


# --- S5: failures ------------------------------------------------------------------------------------------------------


def test_s5_a_failure_at_completion_loses_nobody():
    class Failing(PlainExecutor):
        def collect(self, ticket, until):
            outcome = super().collect(ticket, until)
            for end in list(outcome.finished):
                if end.request.rid == 3:
                    outcome.finished.remove(end)
                    outcome.failures.append(Failure(end.request, "no block for its last token"))
                    self._decoding[end.request] = self._ready[3] = None  # until the scheduler takes it off
            return outcome

    requests = [Request(i, 0.01 * i, 10, 100) for i in range(10)]
    clock, log = SimulatedClock(), Log()
    engine = Scheduler(FCFS(), Chunked(), Paged(640, 16, 0.0), recompute(), check=True)
    executor = Failing(clock, lambda rows, context, chunks: 0.01, [5 + i for i in range(10)])
    serve(Script(Event(r.arrival, EventKind.ARRIVAL, r) for r in requests), engine, executor, clock, log)
    assert engine.counts == {"injected": 10, "finished": 9, "rejected": 0, "aborted": 0, "failed": 1}
    assert log.ended_at[3][1] == "failed: no block for its last token"
    assert engine.kv.free == engine.kv.num_blocks
    assert requests[3].phase == Phase.FAILED


@pytest.mark.parametrize("batching", ["static", "mixed", "prefill_first", "chunked"])
def test_s5_everybody_leaves_and_the_next_is_served(batching):
    asks = (*(Ask(0.0, 10, 50, abort_after=0.2) for _ in range(4)), Ask(0.2, 10, 5), Ask(3.0, 10, 5))
    result = play(Case(asks, batching=batching, cost="even"))
    assert [reason for _, reason, _ in (result.log.ended_at[i] for i in range(6))] == ["aborted"] * 4 + ["stop"] * 2


# --- S6, S7: order and slots --------------------------------------------------------------------------------------------


def test_s6_a_long_request_starts_within_the_declared_bound():
    """Shorts of 9.9 ms every 10 ms, behind a backlog of 20; one long request at 0. Shortest first lets it wait for 19 s."""
    cost = Affine(0.0, 0.0, 0.0, 0.0, decode_base=9.9e-5)
    short = [Ask(0.0, 1, 101, prediction=point(101.0)) for _ in range(20)]
    short += [Ask(0.01 * i, 1, 101, prediction=point(101.0)) for i in range(1, 6000)]
    case = Case((Ask(0.0, 1, 5001, 6000, point(5001.0)), *short), max_num_seqs=1, cost=cost)
    starved = play(replace(case, policy="sjf"), check=False, keep=False).requests[0]._first_scheduled
    assert starved > 18.0
    policy = Aging(SJF(), 1000.0)
    horizon = 0.0 + (5001.0 - 1.0) / 1000.0
    result = play(case, policy=policy, check=False, keep=False)
    start = result.requests[0]._first_scheduled
    before = [r for r in result.requests[1:] if 0.0 <= r._first_scheduled < start]
    assert all(r.arrival < horizon for r in before)
    assert start <= horizon + 20 * 9.9e-3 + 1e-9  # what had come by then, and not been served


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_s7_a_high_priority_arrival_takes_a_slot_in_the_next_step(keeps_kv):
    asks = (Ask(0.0, 10, 200, priority=5.0), Ask(0.0, 10, 200, priority=5.0), Ask(0.5, 10, 20, priority=0.0))
    result = play(Case(asks, "priority", max_num_seqs=2, keeps_kv=keeps_kv, cost="even"))
    high = result.requests[2]
    step = next(s for s in result.log.steps if s[0] >= 0.5)
    assert high._first_scheduled == step[0] and [c[0] for c in step[2]] == [2]
    assert [r._num_preemptions for r in result.requests] == [0, 1, 0]  # the later one of two equals
    victim = result.requests[1]
    computed_then = 10 + sum(s[5] > 0 for s in result.log.steps if s[0] < 0.5)
    assert victim._recomputed == (0 if keeps_kv else computed_then)
    assert result.finish[1] > result.finish[0] > result.finish[2]


def test_s7_a_policy_that_does_not_preempt_says_so_and_waits():
    asks = (Ask(0.0, 10, 200, priority=5.0), Ask(0.0, 10, 200, priority=5.0), Ask(0.5, 10, 20, priority=0.0))
    result = play(Case(asks, "priority_calm", max_num_seqs=2, cost="even"))
    assert not Priority(preemptive=False).preemptive
    assert result.scheduler.num_preemptions == 0
    assert result.requests[2]._first_scheduled == result.finish[0] == result.finish[1]


# --- S8, S9: memory -----------------------------------------------------------------------------------------------------


class LeastComputed(FCFS):
    """The victim is who loses least."""

    needs = frozenset({"victim"})

    def victim(self, running, view):
        return min(running, key=lambda r: (view.computed(r), r.arrival), default=None)


def test_s8_the_recompute_tax_is_reported_and_the_victim_is_the_policys():
    """B (100 tokens) came first, A (4,000) second, and the pool is full after 12 tokens each."""
    asks = (Ask(0.0, 100, 60, 100), Ask(0.0, 4000, 60, 100), Ask(0.01, 100, 10, 100))
    case = Case(asks, pool=4128, token_budget=8192)
    late = play(case)  # FCFS: who came last
    assert [r._num_preemptions for r in late.requests[:2]] == [0, 1]
    assert 4000 <= late.requests[1]._recomputed < 4020
    assert late.scheduler.recomputed_tokens == sum(r._recomputed for r in late.requests)
    assert late.requests[1]._resumes[1] <= late.requests[2]._first_scheduled  # A is back before later arrivals
    least = play(case, policy=LeastComputed())
    assert least.requests[0]._num_preemptions >= 1 and least.requests[1]._num_preemptions == 0
    assert 100 <= least.requests[0]._recomputed < 300
    assert least.scheduler.recomputed_tokens == sum(r._recomputed for r in least.requests)


class Backfill(FCFS):
    """Passes over what does not fit, for those that came within a second of it."""

    backfill = FOREVER

    def may_pass(self, req, blocked, view):
        return req.arrival < self.overtaking_horizon(blocked, view)

    def overtaking_horizon(self, req, view):
        return req.arrival + 1.0


def test_s9_strict_order_admits_nobody_past_a_request_that_does_not_fit():
    asks = (Ask(0.0, 145, 60, 60), Ask(0.1, 160, 2, 2), Ask(0.1, 32, 2, 2), Ask(0.1, 32, 2, 2))
    case = Case(asks, pool=14 * 16, cost="even")  # 10 blocks taken, 4 free: big 10, small 2, small 2
    strict = play(case)
    assert [r._first_scheduled for r in strict.requests[1:]] == [strict.finish[0]] * 3
    skip = play(case, policy=Backfill())
    first = next(s[0] for s in skip.log.steps if s[0] >= 0.1)
    assert [r._first_scheduled for r in skip.requests[2:]] == [first, first]
    assert skip.requests[1]._first_scheduled == skip.finish[0]


def test_s9_a_request_passed_over_is_admitted_within_its_guard():
    stream = tuple(Ask(0.1 + 0.03 * i, 30, 12, 12) for i in range(100))
    case = Case((Ask(0.0, 30, 40, 40), Ask(0.1, 160, 2, 2), *stream), pool=12 * 16, cost="even")
    watch = Overtaking()
    result = play(case, policy=Backfill(), watch=watch, scheduler=watch.scheduler)
    assert watch.num > 10  # it was passed, by those that may
    big = result.requests[1]._first_scheduled
    assert 0.1 < big < 3.0
    endless = type("Endless", (Backfill,), {"may_pass": lambda self, req, blocked, view: True})
    assert play(case, policy=endless()).requests[1]._first_scheduled > 3.1  # without the guard it waits for the stream to end


# --- S10, S11, S12: chunks ----------------------------------------------------------------------------------------------


def test_s10_a_short_prompt_comes_in_right_after_the_final_chunk():
    result = play(Case((Ask(0.0, 64, 10), Ask(0.0, 4, 10)), token_budget=16, max_num_seqs=2))
    assert [s[2] for s in result.log.steps[:5]] == [
        ((0, 0, 16, False),),
        ((0, 16, 16, False),),
        ((0, 32, 16, False),),
        ((0, 48, 16, True),),
        ((1, 0, 4, True),),
    ]
    assert result.log.steps[4][5] == 1  # beside the first decode of the long one


def test_s10_a_slot_that_comes_free_is_taken_within_one_step():
    result = play(Case(tuple(Ask(0.0, 4, 5 + i) for i in range(6)), max_num_seqs=2, cost="even"))
    ends = sorted(result.finish)
    begins = sorted(r._first_scheduled for r in result.requests)
    assert begins[2:] == ends[:4]


def test_s11_the_token_budget_holds_on_every_step():
    decoding = tuple(Ask(0.0, 1, 400) for _ in range(100))
    prompts = (2049, 4096, 1, 2048)
    case = Case((*decoding, *(Ask(0.5, p, 3) for p in prompts)), token_budget=2048, pool=1 << 16)
    result = play(case, plain=True)
    chunks: dict[int, list[int]] = {}
    for _, _, planned, _, _, num_decode, _, _ in result.log.steps:
        assert num_decode + sum(c[2] for c in planned) <= 2048
        for rid, _, length, _ in planned:
            chunks.setdefault(rid, []).append(length)
    assert [sum(chunks[100 + i]) for i in range(4)] == list(prompts)
    mixed = [s for s in result.log.steps if s[2] and s[0] >= 0.5]
    assert [s[5] + sum(c[2] for c in s[2]) for s in mixed[:4]] == [2048] * 4  # and no token of it is wasted


def test_s11_a_prompt_of_exactly_the_budget_is_one_chunk():
    result = play(Case((Ask(0.0, 2048, 3), Ask(0.0, 2049, 3)), token_budget=2048))
    assert result.log.steps[0][2] == ((0, 0, 2048, True),)
    for batching in ("mixed", "prefill_first", "static"):
        result = play(Case((Ask(0.0, 2048, 3), Ask(0.0, 2049, 3)), batching=batching, token_budget=2048))
        assert result.log.ended_at[0][1] == "stop"
        assert "2049" in result.log.ended_at[1][1] and "2048" in result.log.ended_at[1][1]


def test_s12_a_long_prompt_does_not_freeze_the_decodes():
    cost = Affine(8e-3, 2.3e-5, 1.7e-8, 6.1e-5, 3e-10)
    asks = (*(Ask(0.0, 20, 400) for _ in range(4)), Ask(0.5, 32_768, 4))
    case = Case(asks, token_budget=512, max_model_len=40_960, pool=1 << 16, cost=cost)
    gaps = {}
    for batching, budget in (("chunked", 512), ("mixed", 32_772)):
        result = play(replace(case, batching=batching, token_budget=budget), plain=True)
        times = [result.executor.token_times[i] for i in range(5)]
        assert [len(t) for t in times] == [400] * 4 + [4]  # the same tokens with and without chunks
        gaps[batching] = max(np.diff(t).max() for t in times[:4])
    one_mixed_step = cost.base + 4 * cost.per_row + 4 * 420 * cost.per_context + 508 * (cost.per_prefill + 32_768 * 3e-10)
    assert gaps["chunked"] <= one_mixed_step
    assert gaps["mixed"] > 1.0


# --- S17, S18: the door -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_len", "most"), [(0, 5), (5, 0), (5, -3)])
def test_s18_nothing_to_read_or_to_say_is_refused_with_the_numbers_and_the_other_finishes(prompt_len, most):
    result = play(Case((Ask(0.0, 10, 20, 20), Ask(0.1, prompt_len, 5, most))))
    assert result.log.ended_at[0][:2] == (20, "stop")
    num, reason, _ = result.log.ended_at[1]
    assert num == 0 and reason.startswith("rejected") and str(prompt_len) in reason and str(most) in reason


def test_s18_a_trace_with_an_answer_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="output_len"):
        Dataset("trace", np.array([5, 5]), np.array([3, 0]), "tokens", "made up", "none")


def test_s17_the_same_request_twice_is_refused_and_the_first_goes_on():
    scheduler = Scheduler(FCFS(), Chunked(), Paged(1 << 12), recompute(), check=True)
    request = Request(0, 0.0, 8, 3)
    assert scheduler.add(request) is None
    with pytest.raises(ValueError, match="request 0 was added before"):
        scheduler.add(request)
    assert scheduler.counts["injected"] == 1 and len(scheduler.waiting) == 1
    scheduler.book(scheduler.plan(0.0), Outcome(1, [1.0], 0))
    again = Request(0, 1.0, 8, 3)  # another of that number, as the first has not ended: it is another request
    assert scheduler.add(again) is None and scheduler.abort(request) and scheduler.abort(again)
    assert scheduler.counts["aborted"] == 2 and scheduler.kv.free == scheduler.kv.num_blocks


# --- P7, M8: predictions and limits -------------------------------------------------------------------------------------


def test_p7_a_request_that_outlives_its_prediction_loses_its_rank_only_when_reestimated():
    asks = (Ask(0.0, 1, 5000, 6000, point(10.0)), *(Ask(0.1, 1, 50, 6000, point(50.0)) for _ in range(20)))
    case = Case(asks, max_num_seqs=1, cost="tick", keeps_kv=True, pool=1 << 16)
    clip = play(replace(case, policy="srpt"))
    assert clip.finish[0] < min(clip.finish[1:])  # one token to come, for ever
    again = play(replace(case, policy="srpt_reestimate"))
    assert max(again.finish[1:]) < again.finish[0]
    # 80 = 10 x 2^3 is the first estimate beyond the shorts' 50: by then at the latest it is preempted
    assert again.requests[1]._first_scheduled <= 80 * TICK
    assert again.requests[0]._num_preemptions == 1


def test_p7_ties_go_by_arrival_and_never_by_the_id_as_a_string():
    for policy in (SJF(), PSJF(), SRPT()):
        clock, log = SimulatedClock(), Log()
        requests = [Request(rid, 0.0, 4, 64, prediction=point(7.0)) for rid in (9, 10, 11, 2)]
        engine = Scheduler(policy, Chunked(), Paged(4096), recompute(), max_num_seqs=1, check=True)
        executor = PlainExecutor(clock, lambda *_: 0.01, [7] * 12)
        serve(Script(Event(0.0, EventKind.ARRIVAL, r) for r in requests), engine, executor, clock, log)
        assert list(log.ended_at) == [9, 10, 11, 2]


@pytest.mark.parametrize("bad", [-1.0, math.inf, -math.inf, math.nan])
def test_p7_a_score_that_is_no_length_is_refused(bad):
    with pytest.raises(ValueError, match="predicted length"):
        point(bad)


def test_m8_a_request_beyond_the_context_is_cut_by_option_or_refused_with_both_numbers():
    case = Case((Ask(0.0, 90, 50, 50),), max_model_len=100)
    refused = play(case).log.ended_at[0]
    assert refused[0] == 0 and refused[1].startswith("rejected") and "140" in refused[1] and "100" in refused[1]
    assert play(replace(case, clip=True)).log.ended_at[0][:2] == (10, "length")
    whole = Case((Ask(0.0, 100, 50, 50),), max_model_len=100, clip=True)
    assert play(whole).log.ended_at[0][1].startswith("rejected")


# --- found by these tests -----------------------------------------------------------------------------------------------


def test_a_victim_about_to_grow_is_not_counted_twice():
    """X fits once V has gone: 4 free + V's 2 blocks = X's 6. V's own next block must not be asked for on top, or X is let in
    only one step later, when nothing happens (and fast-forward has run past it)."""
    low, victim = Ask(0.0, 13, 20, 20, priority=0.0), Ask(0.0, 8, 20, 20, priority=2.0)
    case = Case((low, victim, Ask(0.001, 24, 5, 16, priority=1.0)), "priority", pool=40, block_size=4, cost="even")
    fast, single = play(case), play(case, fast_forward=False)
    assert fast.log == single.log
    assert started(fast, 2) == 1


def test_a_slot_victim_whose_memory_is_enough_is_the_only_victim():
    """Two run (10 blocks each of 20), an urgent one takes the slot of the last; its blocks are enough."""
    a, b = Ask(0.0, 150, 10, 10, priority=2.0), Ask(0.0, 150, 10, 10, priority=3.0)
    case = Case((a, b, Ask(0.001, 100, 5, 10, priority=1.0)), "priority", pool=320, max_num_seqs=2, cost="even")
    result = play(case)
    assert [r._num_preemptions for r in result.requests] == [0, 1, 0]


def test_paused_requests_give_their_memory_before_the_one_whose_slot_is_taken():
    """P (priority 5) is paused for R (3); then X (1) takes R's slot and needs memory: P, last in order, gives it."""
    p, r = Ask(0.0, 100, 50, 50, priority=5.0), Ask(0.05, 100, 50, 50, priority=3.0)
    case = Case((p, r, Ask(0.3, 140, 5, 10, priority=1.0)), "priority", pool=320, max_num_seqs=1, keeps_kv=True, cost="even")
    result = play(case)
    assert result.requests[0]._recomputed > 0 and result.requests[1]._recomputed == 0


def test_an_order_written_out_is_scheduled_as_the_heap_would():
    """Who is evicted stands in order again at once: nobody behind it in order may take its place in the same plan."""

    class Written(PSJF):
        def order(self, waiting, view):
            return super().order(waiting, view)

    # 0 runs; 1 (shorter) evicts it; 2 (longer than 0) would fit into what 0 left.
    asks = (Ask(0.0, 160, 30, 30, point(30.0)), Ask(0.1, 80, 30, 30, point(5.0)), Ask(0.1, 16, 30, 30, point(90.0)))
    case = Case(asks, "psjf", pool=15 * 16, cost="even")
    assert play(case, policy=Written()).log == play(case).log


@pytest.mark.parametrize("fast_forward", [True, False])
def test_the_step_time_a_policy_sees_is_that_of_the_last_step(fast_forward):
    """However many steps the executor took at once: an estimate of the next step, and fast-forward == single step."""
    seen = []

    class Watching(FCFS):
        def key(self, req, view):
            if req.rid == 1:
                seen.append(view.step_time)
            return req.arrival

    cost = Affine(8e-3, 2.3e-4, 1e-4, 6.1e-5)
    result = play(Case((Ask(0.0, 10, 40), Ask(0.2, 10, 4)), cost=cost), policy=Watching(), fast_forward=fast_forward)
    last = [s for s in result.log.steps if s[1] <= result.requests[1]._first_scheduled][-1]
    assert seen[0] == pytest.approx(last[1] - last[0], rel=1e-12)


def test_now_is_never_before_a_request_arrived():
    class Watching(FCFS):
        def key(self, req, view):
            assert view.now >= req.arrival, f"at {view.now} s asked for the key of a request that arrives at {req.arrival}"
            return req.arrival

    play(Case((Ask(0.5, 10, 4), Ask(5.0, 10, 4))), policy=Watching())


def test_a_time_the_policy_declared_wakes_an_idle_engine():
    """`stable` says until when nothing changes; an engine with nothing to run must wait for that time, not stall."""

    class OpensAtTwo(FCFS):
        def admit(self, req, view):
            return view.now >= 2.0

        def stable(self, view):
            return FOREVER, (2.0 if view.now < 2.0 else INF)

    result = play(Case((Ask(0.5, 10, 4),)), policy=OpensAtTwo())
    assert result.requests[0]._first_scheduled == 2.0


def test_a_policy_hears_of_the_end_of_exactly_those_whose_arrival_it_heard_of():
    heard: dict[int, int] = {}

    class Listening(SJF):
        def on_arrival(self, req):
            heard[req.rid] = heard.get(req.rid, 0) + 1

        def on_finish(self, req):
            heard[req.rid] -= 1

    asks = (
        Ask(0.0, 10, 4, prediction=point(4.0)),
        Ask(0.0, 10, 40, prediction=point(4.0), ready_delay=0.5, abort_after=0.1),  # aborted before its prediction came
        Ask(0.0, 10, 40, prediction=point(4.0), abort_after=0.1),
        Ask(0.0, 10, 9000, 9000, prediction=point(4.0)),  # rejected
    )
    play(Case(asks), policy=Listening())
    assert heard == {0: 0, 2: 0}


def test_a_static_batch_is_limited_by_its_slots_and_not_by_one_prefill_step():
    """Ten prompts of 300 tokens, budget 2,048: one batch of ten, prefilled in two steps, not a batch of six and one of four."""
    result = play(Case(tuple(Ask(0.0, 300, 50) for _ in range(10)), batching="static"))
    assert max(s[5] + s[6] for s in result.log.steps) == 10


def test_a_victim_is_not_let_in_again_by_the_plan_that_evicted_it():
    """Evicting throws KV away; who can stay after all must not be evicted and prefilled anew in the same plan."""
    rng = np.random.default_rng(8)
    for _ in range(150):
        asks = tuple(
            Ask(
                float(rng.integers(0, 30)) * TICK, int(rng.integers(1, 40)), int(rng.integers(1, 48)), 48,
                point(float(rng.integers(1, 50))),
            )
            for _ in range(16)
        )  # fmt: skip
        for name in ("psjf", "srpt"):
            asks = tuple(sorted(asks, key=lambda a: a.arrival))
            result = play(Case(asks, "psjf", pool=120, max_num_seqs=4, block_size=4), policy=POLICIES[name]())
            for _, _, chunks, _, leaves, _, _, _ in result.log.steps:
                again = {rid for rid, start, _, _ in chunks if start == 0} & set(leaves)
                assert not again, f"{name}: {again} evicted and admitted in one plan"


def test_a_paused_request_comes_back_only_when_its_next_token_has_room():
    """X leaves one block free, which A's next token takes; P, paused at the end of a block, would need another."""
    a, p = Ask(0.0, 6, 10, 12, priority=0.0), Ask(0.0, 8, 8, 12, priority=5.0)
    x = Ask(0.001, 1, 2, 2, priority=1.0)
    case = Case((a, p, x), "priority", pool=20, block_size=4, max_num_seqs=2, keeps_kv=True, cost="even")
    result = play(case)  # with all counts checked: free blocks never below zero
    assert started(result, 2) == 1 and result.requests[1]._num_preemptions >= 1
    assert result.requests[1]._resumes[1] > result.finish[2]
    assert all(end == (n, "stop", end[2]) for n, end in zip((10, 8, 2), map(result.log.ended_at.get, range(3)), strict=True))


def test_a_resumed_decode_takes_no_budget_from_a_step_without_decodes():
    """Prefill first: 0 is paused; when 1 and 2 end it resumes, and a prompt of the whole budget comes in at once."""
    urgent = Ask(0.1, 10, 5, 60, priority=0.0)
    asks = (Ask(0.0, 10, 400, 400, priority=5.0), urgent, urgent, Ask(0.12, 64, 5, 60, priority=6.0))
    case = Case(asks, "priority", batching="prefill_first", keeps_kv=True, max_num_seqs=2, token_budget=64, cost="even")
    fast, single = play(case), play(case, fast_forward=False)
    assert fast.log == single.log and fast.requests[3]._first_scheduled == fast.finish[1]


def test_a_key_that_is_no_number_is_refused_by_name():
    scheduler = Scheduler(SJF(), Chunked(), Paged(1 << 12), recompute())
    with pytest.raises(ValueError, match="SJF gives request 7 the key nan"):
        scheduler.add(Request(7, 0.0, 8, 8, prediction=LengthDistribution(float("nan"), float("nan"))))


def test_what_a_scheduler_cannot_give_is_refused():
    class Probing(FCFS):
        needs = frozenset({"probe"})

    with pytest.raises(ValueError, match=r"Probing needs .*probe"):
        Scheduler(Probing(), Chunked(), Paged(1 << 12), recompute())


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s, r: s.counts.update(injected=9), "injected 9"),
        (lambda s, r: setattr(s.kv, "free", s.kv.free - 1), "KV blocks"),
        (lambda s, r: setattr(s.running, "context_tokens", 3), "context 3 booked"),
        (lambda s, r: setattr(r, "_phase", Phase.PAUSED), "stands among DECODING"),
        (lambda s, r: setattr(r, "_first_token", 0.5 * r._first_scheduled - 1.0), "its first token came"),
        (lambda s, r: setattr(s.waiting, "_num", 4), "counted 4"),
    ],
    ids=["requests", "blocks", "context", "phase", "times", "waiting"],
)
def test_the_checker_notices_what_does_not_add_up(corrupt, message):
    scheduler = Scheduler(FCFS(), Chunked(), Paged(1 << 12), recompute(), max_num_seqs=4)
    request = Request(0, 0.0, 8, 8)
    scheduler.add(request)
    plan = scheduler.plan(1.0)
    scheduler.book(plan, Outcome(1, [2.0], 0))
    check(scheduler, 4)
    with pytest.raises(AssertionError, match="rows run, max_num_seqs is 0"):
        check(scheduler, 0)
    corrupt(scheduler, request)
    with pytest.raises(AssertionError, match=message):
        check(scheduler, 4)


@pytest.mark.parametrize(("prompt_len", "at_once"), [(64, True), (65, False)])
def test_admission_keeps_the_watermark_free(prompt_len, at_once):
    """10 blocks, 2 of them the watermark; 4 are taken: a prompt of 4 more blocks comes in, one of 5 waits."""
    case = Case((Ask(0.0, 50, 10, 12), Ask(0.001, prompt_len, 4, 4)), pool=160, watermark=0.2, cost="even")
    result = play(case)
    assert (started(result, 1) == 1) == at_once
    assert at_once or result.requests[1]._first_scheduled == result.finish[0]


def test_nobody_is_evicted_whose_memory_turns_out_not_to_be_needed():
    """W (last in order, 1 block) is not enough for X; V (8 blocks) is, and then W may stay."""
    w, v = Ask(0.0, 9, 6, 6, priority=9.0), Ask(0.0, 120, 6, 6, priority=8.0)
    result = play(Case((w, v, Ask(0.001, 120, 4, 6, priority=1.0)), "priority", pool=160, cost="even"))
    assert [r._num_preemptions for r in result.requests] == [0, 1, 0]


def test_a_resumed_decode_takes_its_token_of_a_mixed_budget():
    """P, paused for X, comes back in the step in which Y's long prompt starts: 7 tokens are left for Y, not 8."""
    p, x = Ask(0.0, 4, 60, 60, priority=5.0), Ask(0.03, 3, 8, 8, priority=1.0)
    case = Case((p, x, x, Ask(0.05, 40, 4, 4, priority=7.0)), "priority", max_num_seqs=2, token_budget=8, keeps_kv=True)
    result = play(replace(case, cost="tick"))
    assert result.requests[0]._num_preemptions == 1
    step = result.log.steps[started(result, 3)]
    assert step[3] == (0,) and step[5] + sum(c[2] for c in step[2]) == 8


def test_a_preempted_decode_gives_no_budget_to_a_step_without_decodes():
    """Prefill first: X's prompt is the whole budget. The slot it takes brings no token for Z beside it."""
    d, x = Ask(0.0, 4, 60, 60, priority=9.0), Ask(0.2, 40, 4, 4, priority=1.0)
    asks = (d, d, x, Ask(0.2, 1, 4, 4, priority=2.0))
    result = play(Case(asks, "priority", batching="prefill_first", max_num_seqs=2, token_budget=40, keeps_kv=True, cost="even"))
    assert started(result, 3) == started(result, 2) + 1
    assert all(sum(c[2] for c in s[2]) <= 40 for s in result.log.steps)


def test_a_policy_that_always_names_a_later_time_and_never_admits_is_named():
    class Tomorrow(FCFS):
        def admit(self, req, view):
            return False

        def stable(self, view):
            return FOREVER, view.now + 1.0

    with pytest.raises(Stalled, match=r"rid=0\b"):
        play(Case((Ask(0.0, 8, 5),)), policy=Tomorrow())
