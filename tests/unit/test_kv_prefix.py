"""The prefix cache in the scheduler: what is found, what is computed again, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from harness import POLICIES, TICK, Ask, Case, play
from hypothesis import given, settings
from strategies import cases

from lengthwise.sched import INF, Event, EventKind, LengthDistribution, Request, Scheduler, Stalled, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import check_policy
from lengthwise.sched.kv import Paged, Prefix
from lengthwise.sched.plan import DEVICE
from lengthwise.sched.policies import FCFS
from lengthwise.sched.preemption import recompute, swap
from lengthwise.sched.rehearsal import JumpingClock, Log, PlainExecutor, Script

point = LengthDistribution.point


def shared(case: Case, piece: int = 16, **changes) -> Case:
    return replace(case, prefix=True, hash_tokens=piece, **changes)


def starts(result, rid: int) -> list[int]:
    return [start for s in result.log.steps for r, start, _, _ in s[2] if r == rid]


# --- what is found ------------------------------------------------------------------------------------------------------


def test_t5_a_group_finds_its_common_prefix():
    """T5: 8 requests share 1,024 tokens (block 16) and have 64 of their own, one after the other."""
    asks = tuple(Ask(5.0 * i, 1088, 20, block_hashes=[*range(64), *range(1000 * i, 1000 * i + 4)]) for i in range(1, 9))
    result = play(shared(Case(asks)))
    assert [r._cached for r in result.requests] == [0] + 7 * [1024]
    assert result.scheduler.cached_tokens == 7 * 1024
    assert [starts(result, i)[0] for i in range(8)] == [0] + 7 * [1024]
    without = play(Case(asks))
    assert result.log.num_steps == without.log.num_steps
    assert all(a <= b for a, b in zip(result.finish, without.finish, strict=True))


@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
def test_s15_a_full_hit_leaves_a_token_to_compute_and_outputs_are_the_same(policy):
    """S15: the same 64 tokens twice, with a third request evicting between them, or at once."""
    same = Ask(0.0, 64, 30, 30, prediction=point(30.0), block_hashes=[1, 2, 3, 4])
    other = Ask(1.0, 100, 60, 60, prediction=point(60.0), block_hashes=[7, 8, 9, 10, 11, 12])
    for asks, found in (
        ((same, replace(same, arrival=2.0)), 48),
        ((same, other, replace(same, arrival=6.0)), 0),  # evicted: 100 + 60 tokens are 10 blocks
        ((same, replace(same, arrival=0.0)), 0),  # at once: the second books last, and gives its own blocks back
    ):
        case = Case(asks, policy, pool=10 * 16 if len(asks) == 3 else 16 * 16)
        with_cache, without = play(shared(case), plain=True), play(case, plain=True)
        assert with_cache.requests[-1]._cached == found
        tokens = [{rid: len(t) for rid, t in r.executor.token_times.items()} for r in (with_cache, without)]
        assert tokens[0] == tokens[1]
        assert sum(length for s in with_cache.log.steps for rid, _, length, _ in s[2] if rid == len(asks) - 1) == 64 - found


def test_two_who_computed_the_same_piece_keep_one_of_it():
    kv = Prefix(160, 16, 0.0)
    kv.use_hashes(16)
    one, two = (Request(i, 0.0, 64, block_hashes=[1, 2, 3, 4]) for i in range(2))
    for req in (one, two):
        assert kv.allocate(req, 64) == 0
    assert kv.free == 2
    assert kv.enter(one, 32) == 0
    assert (kv.free, kv.lookup(two)) == (2, 32)
    assert kv.enter(two, 48) == 2  # the first two pieces were there, the third is new
    assert kv.free == 4
    assert kv.enter(one, 64) == 1  # the third was there
    assert kv.free == 5
    kv.check([(one, 64), (two, 64)])
    assert kv.release(one, 64) == 1 and kv.evictable == 1  # the fourth piece is left by its only user
    assert kv.release(two, 64) == 4 and (kv.free, kv.evictable) == (6, 4)


def test_answers_are_found_by_the_next_turn_where_names_cover_them():
    """A conversation: 40 + 30 tokens, then 90 with those in front. The last token of an answer has no KV."""
    for hashes, found in ((range(1000, 1 << 70), 64), (list(range(1000, 1006)), 32)):
        first, second = Ask(0.0, 40, 30, block_hashes=hashes), Ask(9.0, 90, 5, block_hashes=hashes)
        result = play(shared(Case((first, second))))
        assert [r._cached for r in result.requests] == [0, found]


def test_m14_cached_and_recomputed_are_counted_apart():
    """M14: preempted by recompute, the victim finds its own prompt; prompt tokens are cached at most once, TTFT stands."""
    victim = Ask(0.0, 1000, 40, 100, priority=5.0, block_hashes=range(100))
    case = Case((victim, Ask(0.4, 100, 5, 100, priority=1.0)), "priority", max_num_seqs=1, cost="even")
    paged, found = play(case), play(shared(case))
    lost = paged.requests[0]._lost
    for result, recomputed in ((paged, lost), (found, lost % 16)):
        req = result.requests[0]
        assert req._num_preemptions == 1 and req._cached == 0 and req._lost == lost > 1000
        assert req._recomputed == result.scheduler.recomputed_tokens == recomputed > 0
        assert req._first_token == paged.requests[0]._first_token < 0.3
    again = replace(case, asks=(*case.asks, Ask(3.0, 1000, 5, 100, block_hashes=range(100))))
    assert [r._cached for r in play(shared(again)).requests] == [0, 0, 992]


def test_evicted_blocks_are_computed_again_and_counted():
    """As above, but the newcomer needs the victim's blocks: nothing is found."""
    victim = Ask(0.0, 160, 40, 90, priority=5.0, block_hashes=range(100))
    newcomer = Ask(0.2, 200, 55, 55, priority=1.0, block_hashes=range(1000, 1100))
    case = shared(Case((victim, newcomer), "priority", max_num_seqs=1, pool=260, cost="even"))
    result = play(case)
    assert result.requests[0]._recomputed == result.requests[0]._lost > 160


def test_what_was_lost_twice_and_found_once_is_computed_again_once():
    """A loses 96 tokens and finds none, loses 64 of them again, then finds all 96: C, of the same prompt, has computed them."""
    a = Ask(0.0, 96, 8, 8, priority=5.0, block_hashes=range(6))
    b, c = Ask(3 * TICK, 150, 1, 1, priority=1.0), replace(a, arrival=10 * TICK, output_len=1, max_new_tokens=1, priority=1.0)
    result = play(shared(Case((a, b, c), "priority", max_num_seqs=1, token_budget=64, pool=160, cost="even")))
    chunks = [(start, length) for s in result.log.steps for rid, start, length, _ in s[2] if rid == 0]
    assert chunks == [(0, 64), (64, 32), (0, 64), (96, 1)]
    assert result.requests[0]._recomputed == result.scheduler.recomputed_tokens == 64


def test_a_hit_makes_a_prompt_fit_the_rest_of_the_budget():
    """Whole prompts: 40 tokens of which 32 are found run beside 30 decoding rows within a budget of 40, and are not split."""
    asks = tuple(Ask(0.5, 1, 400) for _ in range(30))
    named = Ask(0.0, 40, 2, block_hashes=[1, 2, 3, 4, 5])
    case = Case((named, *asks, replace(named, arrival=5.0)), batching="mixed", max_num_seqs=40, token_budget=40, cost="even")
    result = play(shared(case, 8, block_size=8))
    assert starts(result, 31) == [32]
    step = next(s for s in result.log.steps if any(c[0] == 31 for c in s[2]))
    assert step[5] == 30 and step[0] >= 5.0


@pytest.mark.parametrize(("failed", "cached"), [(True, 32), (False, 48)])
def test_what_a_failed_request_generated_is_not_kept(failed, cached):
    """Its prompt was booked; what became of its answer nobody knows. An aborted one leaves its answer, as a finished one."""
    kv = Prefix(160, 16, 0.0)
    kv.use_hashes(16)
    engine = Scheduler(FCFS(), Chunked(), kv, recompute(), check=True)
    req, clock = Request(0, 0.0, 40, 60, block_hashes=range(100)), JumpingClock()
    executor = PlainExecutor(clock, lambda *_: 1.0, [60])
    engine.add(req)
    for _ in range(12):
        plan = engine.plan(clock.now)
        outcome = executor.collect(plan, 0.0)
        engine.book(plan, outcome)
        clock.advance(outcome.ends[-1])
    assert engine.computed(req) == 51 and engine.abort(req, failed)
    assert kv.lookup(Request(1, 0.0, 90, block_hashes=range(100))) == cached and not kv.in_use


# --- who makes room ---------------------------------------------------------------------------------------------------


def test_blocks_that_the_newcomer_is_about_to_lock_are_not_counted_as_room():
    """10 blocks: 6 evictable, of which 4 are its own prefix, and 4 held. It asks for 4 + 3 blocks: 1 too many."""
    kv = Prefix(160, 16, 0.0)
    kv.use_hashes(16)
    old, running = Request(0, 0.0, 96, block_hashes=range(6)), Request(1, 0.0, 64)
    kv.allocate(old, 96)
    kv.enter(old, 96)
    kv.release(old, 96)
    kv.allocate(running, 64)
    assert (kv.free, kv.evictable) == (0, 6)
    new = Request(2, 0.0, 112, block_hashes=[0, 1, 2, 3, 100, 101, 102])
    assert kv.lookup(new) == 64 and kv.blocks_to_admit(new, 112) == 7 and not kv.fits(7)
    smaller = Request(3, 0.0, 96, block_hashes=[0, 1, 2, 3, 100, 101])
    assert kv.fits(kv.blocks_to_admit(smaller, 96))
    assert kv.allocate(smaller, 96) == 64
    assert (kv.free, kv.evictable) == (0, 0) and kv.lookup(old) == 64


@pytest.mark.parametrize("max_num_seqs", [256, 2])  # 2: one of them yields its slot anyway
def test_victims_who_share_bring_their_blocks_only_together(max_num_seqs):
    """A and B (priority 5) share 8 of their 9 blocks each, of 12; X (1) needs 10: one of them alone would bring 1."""
    a = Ask(0.0, 130, 14, 14, priority=5.0, block_hashes=list(range(8)))
    x = Ask(0.1, 150, 4, 8, priority=1.0, block_hashes=list(range(100, 109)))
    asks = (a, replace(a, arrival=0.06), x)
    case = shared(Case(asks, "priority", pool=12 * 16, max_num_seqs=max_num_seqs, cost="even"))
    result = play(case)
    assert result.requests[1]._cached == 128
    assert [r._num_preemptions for r in result.requests] == [1, 1, 0]
    assert result.finish[2] < min(result.finish[:2])


def test_a_victim_whose_blocks_the_newcomer_uses_too_brings_only_the_rest():
    """X shares 8 blocks with V, who runs on 10 of 12: V's two own blocks are what it brings, and what X needs."""
    v = Ask(0.0, 150, 6, 8, priority=5.0, block_hashes=list(range(8)))
    x = Ask(0.1, 190, 2, 2, priority=1.0, block_hashes=list(range(8)))
    result = play(shared(Case((v, x), "priority", pool=12 * 16, cost="even")))
    assert result.requests[0]._num_preemptions == 1 and result.requests[1]._cached == 128


# --- a policy that looks at the cache -----------------------------------------------------------------------------------


class LongestPrefixFirst(FCFS):
    """Key: cached tokens, most first; its keys move whenever the cache does."""

    needs = frozenset({"cached_len"})

    def key(self, req, view):
        return -float(view.cached_len(req))

    def key_epoch(self, view):
        return view.cache_epoch


@pytest.mark.parametrize("pool", [4096, 640, 400])
def test_a_policy_by_cached_length_sees_every_eviction(pool):
    """Decoders evict while others wait for a slot; fast-forward stops before a block goes that an order may hang on."""
    rng = np.random.default_rng(pool)
    ends, orders = [], []
    for _ in range(25):
        asks = []
        for i in range(20):
            first = 1000 * int(rng.integers(4)) if rng.random() < 0.7 else 9000 + 100 * i
            prompt, output = int(rng.integers(20, 120)), int(rng.integers(1, 60))
            asks.append(Ask(float(rng.exponential(0.05) * i), prompt, output, 60, block_hashes=range(first, first + 100)))
        asks.sort(key=lambda a: a.arrival)
        case = shared(Case(tuple(asks), pool=pool, block_size=8, max_num_seqs=3), 8)
        fast, single = (play(case, policy=LongestPrefixFirst(), fast_forward=f) for f in (True, False))
        assert fast.log == single.log
        ends.append(fast.scheduler.kv.epoch)
        orders.append(fast.log == play(case).log)
    assert max(ends) > 0 and not all(orders)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_an_eviction_in_a_run_of_decodes_changes_the_order_in_time(fast_forward):
    """15 blocks: D decodes in 2, P (4) and Q (3) are cached. A, with 64 tokens of P, is first and does not fit; B, with 48 of
    Q, would. When D has taken the 6 free blocks it evicts the end of P: now B, who came first, is first, and starts at once."""
    kv = Prefix(240, 16, 0.0)
    kv.use_hashes(16)
    for rid, hashes in ((7, range(4)), (8, range(100, 103))):
        old = Request(rid, 0.0, 16 * len(hashes), block_hashes=hashes)
        kv.allocate(old, old.prompt_len)
        kv.enter(old, old.prompt_len)
        kv.release(old, old.prompt_len)
    d, b = Request(0, 0.0, 32, 200), Request(1, 0.5, 64, 8, block_hashes=range(100, 104))
    a = Request(2, 0.5, 220, 8, block_hashes=range(20))
    clock, log = JumpingClock(), Log()
    engine = Scheduler(LongestPrefixFirst(), Chunked(), kv, recompute(), check=True)
    executor = PlainExecutor(clock, lambda *_: 1 / 64, [200, 8, 8], fast_forward=fast_forward)
    executor._pieces = {(i, name): None for hashes in (range(4), range(100, 103)) for i, name in enumerate(hashes)}
    executor._hash_tokens = 16
    serve(Script(Event(r.arrival, EventKind.ARRIVAL, r) for r in (d, b, a)), engine, executor, clock, log)
    assert (b._first_scheduled, b._cached) == (98 / 64, 48)  # a prefill, 96 steps to the last free block, one to the next
    assert a._first_scheduled == log.ended_at[0][2]


def test_a_policy_by_cached_length_keeps_the_contract():
    check_policy(LongestPrefixFirst, num_cases=4)


class FewestMissing(FCFS):
    """Key: prompt tokens that are not cached; takes slots."""

    needs = frozenset({"cached_len", "preempt"})
    preemptive = True

    def key(self, req, view):
        return req.prompt_len - view.cached_len(req)

    def key_epoch(self, view):
        return view.cache_epoch


def test_who_took_a_slot_by_its_cached_length_keeps_it():
    """A loses the only slot to B at 36 tokens, finds 32 of them and takes it back: its key must not be as before, or B takes
    the slot again, and so on for ever."""
    a, b = Ask(0.0, 40, 3, 8, block_hashes=range(10)), Ask(5.5 * TICK, 13, 3, 8)
    case = Case((a, b), max_num_seqs=1, token_budget=6, cost="even")
    result = play(shared(case, 8, block_size=8), policy=FewestMissing(), max_steps=60)
    assert [r._num_preemptions for r in result.requests] == [1, 1]
    assert result.log.ended_at[0][2] < result.log.ended_at[1][2]


def test_cached_length_holds_in_every_phase():
    seen: dict[str, set[tuple[int, int]]] = {}

    def watch(scheduler, *_):
        for req in requests:
            seen.setdefault(req.phase.name, set()).add((req.rid, scheduler.cached_len(req)))

    first = Ask(0.0, 100, 2, block_hashes=range(50))
    low = Ask(1.0, 100, 60, priority=5.0, block_hashes=range(50), prediction=None)
    asks = (first, low, replace(low, arrival=1.1), Ask(1.3, 20, 9))
    case = shared(Case(asks, "priority", max_num_seqs=1, keeps_kv=True, cost="even"))

    class Collecting(Scheduler):
        def add(self, req):
            requests.append(req)
            return super().add(req)

    requests: list[Request] = []
    play(case, watch=watch, scheduler=Collecting)
    assert seen["WAITING"] == {(2, 96)} and seen["PAUSED"] == {(1, 96)}
    assert seen["DECODING"] == {(0, 0), (1, 96), (2, 96), (3, 0)} == seen["FINISHED"]  # 0's own prompt was not found


# --- leases (D2, D3) ------------------------------------------------------------------------------------------------------


def leased(until: float, release_at: float | None = None):
    """A prefix of 6 blocks of 10 is pinned at 0; a request of 8 blocks arrives at 1 s. Returns when it started, the lease, and
    how many tokens of the pinned prefix are cached then."""
    kv = Prefix(160, 16, 0.0)
    kv.use_hashes(16)
    old, new = Request(7, 0.0, 96, block_hashes=range(6)), Request(0, 1.0, 120, 8, block_hashes=range(100, 200))
    kv.allocate(old, 96)
    kv.enter(old, 96)
    kv.release(old, 96)
    lease = kv.pin(old, until)
    assert (kv.free, kv.evictable, kv.pinned, lease.num_tokens) == (4, 0, 6, 96)
    events = [Event(1.0, EventKind.ARRIVAL, new)]

    class Source(Script):
        def pop(self, now):
            if release_at is not None and now >= release_at:
                kv.unpin(lease)
            return super().pop(now)

    if release_at is not None:
        events.append(Event(release_at, EventKind.ARRIVAL, Request(1, release_at, 1, 1)))
    clock, log = JumpingClock(), Log()
    engine = Scheduler(FCFS(), Chunked(), kv, recompute(), check=True)
    executor = PlainExecutor(clock, lambda rows, context, chunks: 0.01, [8, 1], hash_tokens=16)
    serve(Source(events), engine, executor, clock, log)
    return new._first_scheduled, lease, kv.lookup(old)


def test_d3_what_is_pinned_is_not_evicted_until_the_lease_ends():
    """D3: the newcomer waits, though nothing else runs, and is woken by the end of the lease. D2: then the lease says so."""
    start, lease, left = leased(until=3.0)
    assert start == 3.0 and not lease.live and left < 96


def test_d3_what_is_pinned_is_free_to_go_once_released():
    start, lease, _ = leased(until=9.0, release_at=2.0)
    assert start == 2.0 and not lease.live


def test_a_lease_that_never_ends_is_named_by_the_stall():
    with pytest.raises(Stalled, match="6 of 10 KV blocks in use"):
        leased(until=INF)


def test_one_plan_copies_out_and_in_when_the_plan_before_came_to_nothing():
    """A lease leaves a decoder no block to grow into: it is swapped out, and nothing runs until the lease ends at 1 s."""
    kv = Prefix(160, 16, 0.0)
    kv.use_hashes(16)
    old, req = Request(7, 0.0, 80, block_hashes=range(5)), Request(0, 0.0, 80, 8)
    kv.allocate(old, 80)
    kv.enter(old, 80)
    kv.release(old, 80)
    kv.pin(old, 1.0)
    clock, told = JumpingClock(), []
    log = Log(watch=lambda scheduler, plan, outcome: told.append((plan.joins, plan.leaves, [c[1:4] for c in plan.swaps])))
    engine = Scheduler(FCFS(), Chunked(), kv, swap(160), check=True)
    executor = PlainExecutor(clock, lambda *_: 1 / 64, [8])
    serve(Script([Event(0.0, EventKind.ARRIVAL, req)]), engine, executor, clock, log)
    assert told[1] == ([req], [], [(5, DEVICE, "cpu"), (5, "cpu", DEVICE)])
    assert req._resumes == [1 / 64, 1.0] and engine.recomputed_tokens == 0 and log.ended_at[0][0] == 8


def test_a_lease_ends_at_the_first_step_boundary_in_a_run_of_decodes():
    """Somebody decodes all the while: fast-forward stops for the end of the lease, or who waits for it would start late."""
    starts_at = []
    for fast_forward in (True, False):
        kv = Prefix(160, 16, 0.0)
        kv.use_hashes(16)
        old = Request(7, 0.0, 64, block_hashes=range(4))
        kv.allocate(old, 64)
        kv.enter(old, 64)
        kv.release(old, 64)
        kv.pin(range(1 << 90), 0.305)
        requests = [Request(0, 0.0, 30, 60), Request(1, 0.1, 60, 4)]
        clock, log = JumpingClock(), Log()
        engine = Scheduler(FCFS(), Chunked(), kv, recompute(), check=True)
        executor = PlainExecutor(clock, lambda rows, context, chunks: 0.01, [60, 4], fast_forward=fast_forward)
        serve(Script(Event(r.arrival, EventKind.ARRIVAL, r) for r in requests), engine, executor, clock, log)
        starts_at.append(requests[1]._first_scheduled)
    assert starts_at[0] == starts_at[1] == pytest.approx(0.31)


# --- the same as Paged where nothing is shared ---------------------------------------------------------------------------


@given(case=cases())
@settings(max_examples=200)
def test_without_shared_prefixes_and_with_room_it_is_paged(case):
    """Names that nobody shares: the plans are those of Paged to the bit; without names, in a tight pool too."""
    case = replace(case, paged=True)
    unnamed = play(replace(case, prefix=True))
    assert unnamed.log == play(case).log
    asks = tuple(
        replace(a, block_hashes=range(1000 * i, 1000 * i + 900) if i % 2 else list(range(1000 * i, 1000 * i + 50)))
        for i, a in enumerate(case.asks)
    )
    roomy = replace(case, asks=asks, pool=1 << 15, keeps_kv=True)  # else a victim would find what it had computed
    assert play(shared(roomy, case.block_size)).log == play(roomy).log


# --- the door -------------------------------------------------------------------------------------------------------------


def test_pieces_must_be_whole_blocks_and_stay_what_they_are():
    kv = Prefix(160, 16)
    for tokens in (0, 8, 24):
        with pytest.raises(ValueError, match=f"{tokens} tokens .* 16"):
            kv.use_hashes(tokens)
    named = Request(0, 0.0, 64, block_hashes=[1, 2])
    with pytest.raises(ValueError, match="request 0 has block_hashes"):
        kv.lookup(named)
    kv.use_hashes(16)
    kv.use_hashes(32)
    kv.allocate(named, 64)
    with pytest.raises(ValueError, match="pieces of 32 tokens are in use; 16"):
        kv.use_hashes(16)


def test_other_caches_do_not_mind_names():
    kv, named = Paged(160, 16), Request(0, 0.0, 64, block_hashes=[1, 2])
    kv.use_hashes(7)
    assert kv.lookup(named) == kv.cached(named, 64) == kv.evictable == kv.pinned == kv.epoch == 0 and not kv.indexes
    assert kv.allocate(named, 64) == 0 and kv.in_use == 4


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda kv: setattr(kv, "free", kv.free + 1), "free 7 \\+ evictable 0 \\+ held 4"),
        (lambda kv: setattr(next(iter(kv.index.root.children.values())), "refs", 2), "counts 2 users"),
        (lambda kv: setattr(kv.index, "evictable", 1), "counts .*'evictable': 1"),
        (lambda kv: kv._paths.clear(), "counts 1 users"),
        (lambda kv: next(iter(kv.index.root.children.values())).keys.append(9), "another length"),
    ],
)
def test_the_checker_notices(corrupt, message):
    kv, req = Prefix(160, 16, 0.0), Request(0, 0.0, 64, block_hashes=[1, 2, 3])
    kv.use_hashes(16)
    kv.allocate(req, 64)
    kv.enter(req, 64)
    kv.check([(req, 64)])
    corrupt(kv)
    with pytest.raises(AssertionError, match=message):
        kv.check([(req, 64)])


def test_every_policy_runs_on_it():
    rng = np.random.default_rng(3)
    lens = rng.integers(1, 100, 40), rng.integers(1, 50, 40)
    asks = tuple(
        Ask(0.05 * i, int(prompt), int(output), 60, point(20.0), block_hashes=range(100 * (i % 3), 100 * (i % 3) + 90))
        for i, (prompt, output) in enumerate(zip(*lens, strict=True))
    )
    for name in POLICIES:
        result = play(shared(Case(asks, name, pool=300, block_size=8, max_num_seqs=4), 8))
        assert result.scheduler.counts["finished"] == 40 and result.scheduler.cached_tokens > 0


def test_names_are_sequences_of_ints_of_any_kind():
    kinds: tuple[Sequence[int], ...] = ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), range(5, 8))  # type: ignore[assignment]
    kv = Prefix(1600, 16)
    kv.use_hashes(16)
    for i, hashes in enumerate(kinds):
        req = Request(i, 0.0, 50, block_hashes=hashes)
        assert kv.allocate(req, 50) == (48 if i else 0)
        kv.enter(req, 50)
    assert kv.index.num_nodes == 1
