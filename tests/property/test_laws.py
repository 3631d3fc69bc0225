"""Laws of the scheduling core, over random runs: every policy, batching rule, KV cache and preemption mode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from harness import CORE, POLICIES, Case, Result, play
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, crowded, reusing

from lengthwise.sched import LengthDistribution, Outcome, Phase, Plan, Policy, Request, Scheduler
from lengthwise.sched.contract import Overtaking
from lengthwise.sched.policy import overrides

PUBLIC = [name for name in Request.__slots__ if not name.startswith("_")]
CUTS = ("chunked", "prefill_chunks", "adaptive")  # batching that cuts a prompt
MIXES = ("chunked", "mixed", "adaptive")


def same(one: Result, two: Result) -> None:
    """The same plans in single steps, times, ends and preemptions, to the bit."""
    for k, (a, b) in enumerate(zip(one.log.steps, two.log.steps, strict=False)):
        assert a == b, f"step {k}"
    assert one.log == two.log
    for a, b in zip(one.requests, two.requests, strict=True):
        assert (a._num_preemptions, a._recomputed, a._resumes) == (b._num_preemptions, b._recomputed, b._resumes), a


def most_steps(case: Case) -> int:
    """More single steps than this are a livelock: each token of each request computed once for every request there is."""
    tokens = sum(a.prompt_len + a.output_len for a in case.asks)
    return 20 + 2 * tokens * len(case.asks)


# --- conservation and causality ---------------------------------------------------------------------------------------


def conservation(case: Case) -> None:
    """Every request is in exactly one phase, every block free or held, at each step; in the end nothing is left."""
    added: list[Request] = []

    class Counting(Scheduler):
        def add(self, req: Request) -> str | None:
            added.append(req)
            return super().add(req)

    def watch(scheduler: Scheduler, *_: object) -> None:
        phases = [r.phase for r in added]
        counts = scheduler.counts
        assert counts["injected"] == len(added)
        for phase in (Phase.FINISHED, Phase.REJECTED, Phase.ABORTED, Phase.FAILED):
            assert counts[phase.name.lower()] == phases.count(phase)
        assert len(scheduler.pending) == phases.count(Phase.PENDING)
        assert scheduler.num_waiting == sum(phases.count(p) for p in (Phase.WAITING, Phase.PAUSED, Phase.SWAPPED))
        assert scheduler.num_running == phases.count(Phase.PREFILLING) + phases.count(Phase.DECODING)
        holders = [r for r in added if r.phase in (Phase.PREFILLING, Phase.DECODING, Phase.PAUSED)]
        used = scheduler.kv.in_use
        assert 0 <= used <= scheduler.kv.num_blocks
        swapped = scheduler.swapping.there
        assert list(swapped) == [r for r in swapped if r.phase == Phase.SWAPPED] and len(swapped) == phases.count(Phase.SWAPPED)
        if case.prefix:
            most = sum(math.ceil((r.prompt_len + scheduler.generated(r)) / case.block_size) for r in holders)
            assert used <= most  # shared blocks count once
            assert all(0 <= r._cached < r.prompt_len for r in added)  # M14
            copied = [r for r in added if r._cached % case.hash_tokens]
            assert all(case.copy_on_write and r._cached == r.prompt_len - 1 for r in copied)
        elif case.paged:
            least = sum(math.ceil(scheduler.computed(r) / case.block_size) for r in holders)
            most = sum(math.ceil((r.prompt_len + scheduler.generated(r)) / case.block_size) for r in holders)
            assert least <= used <= most
        else:
            assert used == sum(r.prompt_len + r.max_new_tokens - 1 for r in holders)

    result = play(case, watch=watch, scheduler=Counting)
    assert result.scheduler.kv.in_use == result.scheduler.kv.pinned == 0
    assert result.scheduler.swapping.tiers.free == result.scheduler.swapping.tiers.sizes
    assert not result.scheduler.busy and not result.scheduler.pending
    assert sorted(result.log.ended_at) == list(range(len(case.asks)))
    for req, ask in zip(result.requests, case.asks, strict=True):
        num, reason, _ = result.log.ended_at[req.rid]
        if req.phase == Phase.FINISHED:
            assert num == min(ask.output_len, req.max_new_tokens)
            assert reason == ("stop" if ask.output_len <= req.max_new_tokens else "length")
        else:
            assert req.phase == Phase.REJECTED or ask.abort_after is not None


def causality(case: Case) -> None:
    """The clock never goes back; arrival <= admitted <= first token <= finish; nothing ends before its first step."""
    result = play(case)
    now = 0.0
    for start, end, *_ in result.log.steps:
        assert now <= start <= end
        now = end
    for req in result.requests:
        _, _, end = result.log.ended_at[req.rid]
        times = [req.arrival]
        times += [t for t in (req._first_scheduled, req._first_token) if t >= 0.0]
        times.append(end)
        assert times == sorted(times), times
        if req.phase == Phase.FINISHED:
            assert len(times) == 4
        if req._resumes:
            assert req._resumes == sorted(req._resumes) and req.arrival <= req._resumes[0] and req._resumes[-1] <= end


def limits(case: Case) -> None:
    """Tokens per step within the budget, rows within max_num_seqs, a prompt's chunks without gap or overlap."""
    batching = case.batching

    def watch(scheduler: Scheduler, *_: object) -> None:
        assert scheduler.num_running <= case.max_num_seqs

    result = play(case, watch=watch)
    chunks: dict[int, list[tuple[int, int]]] = {}
    for _, _, planned, _, _, num_decode, num_padding, _ in result.log.steps:
        tokens = sum(length for _, _, length, _ in planned)
        assert num_decode + tokens <= case.token_budget
        assert num_decode + num_padding + len(planned) <= case.max_num_seqs
        assert not planned or not num_decode or batching in MIXES
        assert not num_padding or batching == "static"
        for rid, start, length, _ in planned:
            chunks.setdefault(rid, []).append((start, length))
    for req in result.requests:
        if req.phase == Phase.FINISHED and not req._num_preemptions:
            starts, lengths = zip(*chunks[req.rid], strict=True)
            cached = req._cached
            assert sum(lengths) == req.prompt_len - cached
            assert list(starts) == [cached + sum(lengths[:k]) for k in range(len(lengths))]
            assert batching in CUTS or len(lengths) == 1


def given_back(case: Case) -> None:
    """What is in use after a step and what it gave back is what was in use while it ran (of single steps)."""

    class Weighing(Scheduler):
        def book(self, plan: Plan, outcome: Outcome) -> None:
            held = self.kv.in_use + (self.kv.growth() if plan.num_decode else 0)
            super().book(plan, outcome)
            assert self.kv.in_use + self.given_back == held

    play(case, fast_forward=False, scheduler=Weighing)


def recomputation(case: Case) -> None:
    """Recomputed is, of each request that finishes, what is computed of tokens whose KV it has had before."""
    had: dict[int, int] = {}
    again: dict[int, int] = {}

    def watch(scheduler: Scheduler, plan: Plan, _: object) -> None:
        for req, start, length, last in plan.chunks:
            generated = scheduler.generated(req) - last  # before this step
            most = max(had.get(req.rid, 0), req.prompt_len + generated - 1 if generated else 0, start)
            again[req.rid] = again.get(req.rid, 0) + min(most, start + length) - start
            had[req.rid] = max(most, start + length)

    result = play(case, watch=watch)
    for req in result.requests:
        if req.phase == Phase.FINISHED:
            assert req._recomputed == again[req.rid], req
    assert result.scheduler.recomputed_tokens == sum(r._recomputed for r in result.requests)


def refusals(case: Case) -> None:
    """Rejected at the door if and only if a limit says so, with both numbers; everybody else is let in."""
    result = play(case)
    kv = result.scheduler.kv
    for req, ask in zip(result.requests, case.asks, strict=True):
        new = ask.max_new_tokens
        total = ask.prompt_len + new
        numbers: list[int] = []
        if total > case.max_model_len and case.clip:
            total, new = case.max_model_len, case.max_model_len - ask.prompt_len
        size = case.block_size if case.paged else 1
        if total > case.max_model_len:
            numbers = [total, case.max_model_len]
        elif case.batching not in CUTS and ask.prompt_len > case.token_budget:
            numbers = [ask.prompt_len, case.token_budget]
        elif math.ceil((ask.prompt_len + new - 1) / size) > kv.num_blocks - kv.watermark_blocks:
            numbers = [math.ceil((ask.prompt_len + new - 1) / size), kv.num_blocks - kv.watermark_blocks]
        _, reason, when = result.log.ended_at[req.rid]
        assert reason.startswith("rejected") == bool(numbers), (req, reason)
        assert all(str(n) in reason for n in numbers), reason
        assert numbers or req.max_new_tokens == new
        if not numbers and reason in ("aborted", "timeout"):
            assert when >= ask.arrival + ask.abort_after
    assert result.scheduler.counts["rejected"] == sum(r.phase == Phase.REJECTED for r in result.requests)


# --- the same run, seen otherwise -------------------------------------------------------------------------------------


def fast_forward_is_single_step(case: Case) -> None:
    same(play(case), play(case, fast_forward=False))


def determinism(case: Case) -> None:
    same(play(case), play(case))


def parity(case: Case) -> None:
    """A second executor, with one counter per request and told the same step times, is given the same plans."""
    simulated = play(case)
    times = iter([end for _, end, *_ in simulated.log.steps])

    class Told(float):  # now + Told(end) = end, so that the times are the same bits
        def __radd__(self, now: float) -> float:
            return float(self)

    plain = play(case, plain=True, fast_forward=False, seconds=lambda *_: Told(next(times)))
    same(simulated, plain)
    same(simulated, play(case, plain=True))


def heaps_are_sorting(case: Case) -> None:
    """The heaps over running requests give the victim that sorting all of them anew would give. Arrivals are rounded, so that
    alpha x arrival is exact: a heap may take keys for unequal that differ by rounding only, and then not go by arrival."""
    case = replace(case, asks=tuple(replace(a, arrival=round(a.arrival * 1024) / 1024) for a in case.asks))
    policy = POLICIES[case.policy]()
    if overrides(policy, "victim") or policy.drift % 1:
        return  # it chooses for itself, or its keys drift by what no sum of theirs is exact in
    sorting = {"victim": lambda self, running, view: Policy.victim(self, running, view)}
    policy.__class__ = type("Sorting", (type(policy),), sorting)
    same(play(case), play(case, policy=policy))


def order_is_the_heap(case: Case) -> None:
    """A policy that overrides `order` with what it does by default is scheduled as before."""
    policy = POLICIES[case.policy]()
    if overrides(policy, "order"):
        return
    policy.__class__ = type("Ordering", (type(policy),), {"order": lambda self, w, view: Policy.order(self, w, view)})
    same(play(case), play(case, policy=policy))


def progress(case: Case) -> None:
    """No livelock: a run ends within a bounded number of steps, and of plans."""
    result = play(case, max_steps=most_steps(case))
    assert result.log.num_plans <= len(result.log.steps)


PLAIN_LAWS = [
    conservation, causality, limits, refusals, fast_forward_is_single_step, determinism, parity, heaps_are_sorting,
    order_is_the_heap, progress,
]  # fmt: skip
REUSE_LAWS = [*PLAIN_LAWS, given_back, recomputation]


@pytest.mark.parametrize("law", PLAIN_LAWS, ids=lambda law: law.__name__)
@given(case=cases())
@settings(max_examples=600)
def test_law(law, case):
    law(case)


@pytest.mark.parametrize("law", PLAIN_LAWS, ids=lambda law: law.__name__)
@given(case=crowded())
@settings(max_examples=350)
def test_law_where_requests_yield(law, case):
    law(case)


@pytest.mark.parametrize("law", REUSE_LAWS, ids=lambda law: law.__name__)
@given(case=reusing())
@settings(max_examples=300)
def test_law_with_reuse_and_swapping(law, case):
    law(case)


@pytest.mark.slow
@pytest.mark.parametrize("law", REUSE_LAWS, ids=lambda law: law.__name__)
def test_law_with_reuse_and_swapping_at_length(law):
    settings(max_examples=2000)(given(case=reusing())(law))()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("law", PLAIN_LAWS, ids=lambda law: law.__name__)
def test_law_at_length(law, policy):
    settings(max_examples=300 if policy in CORE else 60)(given(case=cases((policy,)))(law))()


@given(case=cases(tuple(CORE)), scale=st.sampled_from((50, 130)))
@settings(max_examples=150)
def test_fast_forward_is_single_step_over_thousands_of_tokens(case, scale):
    """Where the simulated executor adds arrays of step times: the same bits as adding one by one."""
    asks = tuple(
        replace(a, output_len=a.output_len * scale, max_new_tokens=a.max_new_tokens * scale, arrival=a.arrival * scale)
        for a in case.asks
    )
    case = replace(case, asks=asks, pool=case.pool * scale, max_model_len=1 << 20, batching="chunked")
    fast, single = play(case), play(case, fast_forward=False, check=False)
    same(fast, single)
    same(fast, play(case, plain=True, check=False))


@given(case=cases(("srpt", "srpt_reestimate", "psjf", "aging_srpt")), factor=st.sampled_from((0.1, 1 / 3, 1.7)))
@settings(max_examples=400)
def test_fast_forward_is_single_step_with_predictions_that_round(case, factor):
    asks = tuple(replace(a, prediction=LengthDistribution.point(a.prediction.mean() * factor)) for a in case.asks)
    case = replace(case, asks=asks)
    same(play(case), play(case, fast_forward=False))


# --- truth stays in the executor --------------------------------------------------------------------------------------


def non_anticipation(case: Case, rid: int, more: int) -> None:
    """Lengthen one true length: every single step that starts before the shorter finish is planned as before."""
    rid %= len(case.asks)
    lens = [a.output_len for a in case.asks]
    lens[rid] += more
    short, long = play(case), play(case.with_lengths(lens))
    _, reason, finish = short.log.ended_at[rid]
    until = finish if reason == "stop" else math.inf
    before = [s for s in short.log.steps if s[0] < until]
    assert before == long.log.steps[: len(before)]
    if until == math.inf:  # aborted, rejected, or cut at max_new_tokens: its true length never mattered
        assert short.log.steps == long.log.steps


@given(case=cases(), rid=st.integers(0, 100), more=st.integers(1, 40))
@settings(max_examples=1000)
def test_non_anticipation(case, rid, more):
    non_anticipation(case, rid, more)


@given(case=reusing(), rid=st.integers(0, 100), more=st.integers(1, 40))
@settings(max_examples=500)
def test_non_anticipation_with_reuse_and_swapping(case, rid, more):
    """What others left in the cache is known only once they have booked or ended."""
    non_anticipation(case, rid, more)


@given(case=cases(), rng=st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_permuting_true_lengths_leaves_every_request_field_unchanged(case, rng):
    lens = [a.output_len for a in case.asks]
    rng.shuffle(lens)
    fields = [[[getattr(r, name) for name in PUBLIC] for r in play(c).requests] for c in (case, case.with_lengths(lens))]
    assert fields[0] == fields[1]


# --- where policies must agree, and what they promise -----------------------------------------------------------------


def constant_is_fcfs(case: Case, length: float) -> None:
    """One prediction for all: only arrival is left to order by.

    It must hold for keys that do not move (SJF, PSJF, with and without aging) whatever the memory. For SRPT with clip it holds
    while nobody is evicted for memory: the victim is then who has least done, not who came last. With `reestimate` it need
    not hold: who outlives the prediction loses its rank.
    """
    even = tuple(replace(a, prediction=LengthDistribution.point(length), ready_delay=0.0) for a in case.asks)
    wide = case.pool if case.policy in ("sjf", "psjf", "aging_sjf") else 4096
    case = replace(case, asks=even, pool=wide)
    same(play(replace(case, policy="fcfs")), play(case))


@given(case=cases(("sjf", "psjf", "aging_sjf", "srpt", "aging_srpt")), length=st.sampled_from((0.0, 1.0, 7.5, 30.0, 400.0)))
@settings(max_examples=1000)
def test_constant_prediction_is_fcfs(case, length):
    constant_is_fcfs(case, length)


@given(case=cases(("priority", "priority_calm")))
@settings(max_examples=150)
def test_equal_priorities_are_fcfs(case):
    case = replace(case, asks=tuple(replace(a, priority=1.0, ready_delay=0.0) for a in case.asks))
    same(play(replace(case, policy="fcfs")), play(case))


def overtaking_bound(case: Case) -> None:
    watch = Overtaking()
    play(case, watch=watch, scheduler=watch.scheduler)


GUARDED = [name for name, make in POLICIES.items() if hasattr(make(), "overtaking_horizon")]


@pytest.mark.parametrize("policy", GUARDED)
def test_overtaking_bound_holds(policy):
    settings(max_examples=400)(given(case=cases((policy,)))(overtaking_bound))()


@pytest.mark.slow
@pytest.mark.parametrize("policy", GUARDED)
def test_overtaking_bound_holds_at_length(policy):
    settings(max_examples=2000)(given(case=cases((policy,)))(overtaking_bound))()


@pytest.mark.slow
@given(case=cases(), rid=st.integers(0, 100), more=st.integers(1, 40))
@settings(max_examples=4000)
def test_non_anticipation_at_length(case, rid, more):
    non_anticipation(case, rid, more)
