"""Policies by predicted size: each does what its paper says, and becomes another policy where its parameter says so."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from harness import Ask, Case, play
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.sched import LengthDistribution, Phase, Request
from lengthwise.sched.contract import check_policy, hostile, rehearse
from lengthwise.sched.policies import (
    FCFS,
    HRRN,
    ISRTF,
    LAS,
    LTR,
    PSJF,
    SJF,
    SRPT,
    TIE,
    TRAIL,
    Aging,
    Gittins,
    SoftBoost,
)  # fmt: skip
from lengthwise.sched.policies.kinetic import Kinetic
from lengthwise.sched.policies.size import KEPT, size
from lengthwise.sched.prediction import EDGES

INF = math.inf
point, rank_only = LengthDistribution.point, LengthDistribution.rank_only


def exponential(mean: float) -> LengthDistribution:
    return LengthDistribution.from_survival(np.exp(-EDGES / mean))


class Look:
    """A View of given progress."""

    def __init__(self, generated: int = 0, now: float = 0.0, num_waiting: int = 0, step: int = 0) -> None:
        self._generated, self.now, self.num_waiting, self.step = generated, now, num_waiting, step

    def generated(self, req: Request) -> int:
        return self._generated


def roomy(seed: int, least: float = 1.0):
    """A run in which memory never binds, everybody is predicted on arrival, and nobody below `least` tokens."""
    case = hostile(np.random.default_rng(seed), ample=True)
    guesses = [point(max(p.mean(), least)) for p in case.prediction]
    return replace(case, prediction=guesses, delay=[0.0] * len(guesses))


def same_path(one, two, case) -> None:
    """Two policies take every decision of `case` alike."""
    (a, _), (b, _) = rehearse(one, case), rehearse(two, case)
    for k, (x, y) in enumerate(zip(a.steps, b.steps, strict=False)):
        assert x == y, f"step {k}: {x} != {y}"
    assert a == b


VARIANTS = {
    "sjf by mean": (lambda: SJF("mean"), None),
    "sjf by quantile": (lambda: SJF("quantile", 0.5), None),
    "psjf by quantile": (lambda: PSJF("quantile"), None),
    "srpt by quantile": (lambda: SRPT("clip", "quantile", 0.9), None),
    "srpt by rank, reestimating": (lambda: SRPT("reestimate", "rank"), None),
    "aging over a quantile": (lambda: Aging(SJF("quantile"), 20.0), None),
    "ltr guarded in steps": (lambda: LTR(7, 3), False),
    "ltr guarded at once": (lambda: LTR(1, 1), False),
    "ltr guarded in seconds": (lambda: LTR(0.05, 0.02, "seconds"), False),
    "trail 0": (lambda: TRAIL(0.0), None),
    "trail 0.3": (lambda: TRAIL(0.3), None),
    "trail 1": (lambda: TRAIL(1.0), None),
    "isrtf 4": (lambda: ISRTF(4), None),
    "gittins 1": (lambda: Gittins(1), None),
    "gittins 7": (lambda: Gittins(7), None),
    "tie, small batch": (lambda: TIE(batch=1, interval=0.5), False),
    "tie without decay": (lambda: TIE(decay=1.0), None),
    "soft boost, strong": (lambda: SoftBoost(2.0, 0.01), None),
    "hrrn by quantile": (lambda: HRRN("quantile", 0.5), None),
    "las 1": (lambda: LAS(1), None),
    "las 6": (lambda: LAS(6), None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_the_contract(name):
    make, constant_is_fcfs = VARIANTS[name]
    check_policy(make, num_cases=8, seed=1, constant_is_fcfs=constant_is_fcfs)


# --- by -----------------------------------------------------------------------------------------------------------------


def test_by_is_what_it_says():
    some = LengthDistribution.from_quantiles([0.1, 0.5, 0.9], [10.0, 20.0, 90.0])
    assert size("mean")(some) == some.mean() and size("rank")(some) == some.score
    assert size("quantile", 0.5)(some) == some.quantile(0.5) == pytest.approx(20.0, rel=0.1)
    assert SJF("quantile", 0.9).key(Request(0, 0.0, 1, prediction=some), Look()) == some.quantile(0.9)
    assert SRPT(by="quantile").key(Request(0, 0.0, 1, prediction=some), Look(5)) == some.quantile(0.9) - 5
    assert SJF().key(Request(0, 0.0, 1, prediction=rank_only(-3.0)), Look()) == -3.0


def test_a_quantile_is_asked_once_a_prediction_and_not_kept_for_ever():
    by = size("quantile", 0.5)
    some = [exponential(10.0 + i) for i in range(3)]
    assert [by(p) for p in some] == [by(p) for p in some] == [p.quantile(0.5) for p in some]
    by._known.update(dict.fromkeys(range(KEPT)))  # type: ignore[attr-defined]
    assert by(exponential(7.0)) == exponential(7.0).quantile(0.5) and len(by._known) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [SRPT(by="rank"), HRRN("rank"), SoftBoost(by="rank")], ids=["srpt", "hrrn", "soft_boost"])
def test_an_order_without_lengths_is_not_counted_in(policy):
    req = Request(3, 0.0, 10, prediction=rank_only(5.0))
    with pytest.raises(ValueError, match="order, no lengths"):
        policy.on_arrival(req)
        policy.key(req, Look())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SJF("median"), "by='median'"), (lambda: SRPT(by="quantile", level=1.0), "level=1.0"),
        (lambda: LTR(0), "threshold=0"), (lambda: LTR(5, -1), "quantum=-1"), (lambda: LTR(5, 1, "hours"), "unit='hours'"),
        (lambda: TRAIL(-0.1), "c=-0.1"), (lambda: TRAIL(math.nan), "c=nan"),
        (lambda: ISRTF(0), "window=0"), (lambda: Gittins(0), "quantum=0"), (lambda: LAS(0), "quantum=0"),
        (lambda: TIE(alpha=1.0), "alpha=1.0"), (lambda: TIE(least_weight=0.6), "least_weight=0.6"),
        (lambda: TIE(batch=0), "batch=0"), (lambda: TIE(decay=0.0), "decay=0.0"), (lambda: TIE(interval=0.0), "interval=0.0"),
        (lambda: SoftBoost(0.0), "gamma=0.0"), (lambda: SoftBoost(1.0, -1.0), "token_time=-1.0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_the_value(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("make", [SRPT, LTR, TRAIL, ISRTF, HRRN, Gittins, TIE, SoftBoost])
def test_a_missing_prediction_is_named(make):
    policy, req = make(), Request(7, 0.0, 10)
    with pytest.raises(ValueError, match="request 7 has no prediction"):
        policy.on_arrival(req)
        policy.key(req, Look())


# --- LTR ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_ltr_without_a_guard_is_psjf_and_only_ranks_count(seed):
    case = hostile(np.random.default_rng(seed))
    same_path(LTR(), PSJF(), case)
    ranks = replace(case, prediction=[rank_only(math.log(p.score + 1.0) - 9.0) for p in case.prediction])
    assert rehearse(LTR(), ranks)[0] == rehearse(LTR(), case)[0]


class Released:
    """The counters of the released code, of every request at every step; asserts that the policy promotes the same."""

    def __init__(self, policy: LTR, threshold: int, quantum: int) -> None:
        self.policy, self.threshold, self.quantum = policy, threshold, quantum
        self.idle: dict[Request, int] = {}
        self.runs: dict[Request, int] = {}
        self.promoted: dict[Request, None] = {}
        self.live: dict[Request, None] = {}
        self.num = [0, 0]

    def __call__(self, scheduler, plan, outcome) -> None:
        assert outcome.num_steps == 1
        for req in self.live:  # of the steps before: keys are what this plan has stored
            if req.phase < Phase.FINISHED:
                first, score = self.policy.key(req, scheduler)
                assert (first == 0) == (req in self.promoted), (req.rid, scheduler.step, self.idle[req])
                assert score == req.prediction.score
        ran = dict.fromkeys([*scheduler.running, *scheduler.prefilling, *(f.request for f in outcome.finished)])
        self.live = dict.fromkeys([*scheduler.running, *scheduler.prefilling, *scheduler.waiting])
        for req in ran:
            self.runs[req] = self.runs.get(req, 0) - (req in self.promoted and req not in scheduler.prefilling)
            self.idle[req] = 0
        for req in scheduler.waiting:
            self.idle[req] = self.idle.get(req, 0) + 1
        for req in self.live:
            if self.idle[req] >= self.threshold:
                self.num[0] += req not in self.promoted
                self.promoted[req], self.idle[req], self.runs[req] = None, 0, self.quantum
            elif req in self.promoted and self.runs[req] <= 0:
                del self.promoted[req]
                self.num[1] += 1


@pytest.mark.parametrize(("threshold", "quantum"), [(6, 2), (15, 10), (3, 1), (20, 5)])
def test_ltr_promotes_whom_the_released_counters_promote(threshold, quantum):
    num = np.zeros(2, dtype=int)
    for seed in range(6):
        policy = LTR(threshold, quantum)
        watch = Released(policy, threshold, quantum)
        for case in (hostile(np.random.default_rng(seed)), hostile(np.random.default_rng(seed), reuse=True)):
            rehearse(policy, case, fast_forward=False, watch=watch)
            policy = watch.policy = LTR(threshold, quantum)
            num += watch.num
            watch.__init__(policy, threshold, quantum)  # type: ignore[misc]
    assert num.min() > 10, num


@pytest.mark.parametrize("unit", ["steps", "seconds"])
def test_ltr_guard_ends_starvation(unit):
    """One long request among an unending stream of short ones: it starts one threshold after it came, not at the end (S6)."""
    long = Ask(0.005, 4, 30, prediction=rank_only(100.0))
    short = [Ask(i / 64, 4, 2, prediction=rank_only(1.0)) for i in range(400)]
    case = Case((long, *short), max_num_seqs=1, cost="tick")
    guard = {"steps": LTR(128, 10), "seconds": LTR(1.0, 10 / 64, "seconds")}[unit]  # a prefill is a step, but takes no time
    starved, guarded = play(case, policy=LTR()), play(case, policy=guard)
    assert starved.requests[0]._first_scheduled > 6.0
    assert 1.0 <= guarded.requests[0]._first_scheduled < 1.1
    assert not guard.guard.promoted and not guard.guard._idle and not guard.guard._until  # type: ignore[union-attr]


# --- TRAIL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_trail_lies_between_spjf_and_sprpt(seed):
    case = roomy(seed)
    same_path(TRAIL(0.0), SJF(), case)
    same_path(TRAIL(1.0), SRPT(), case)
    same_path(TRAIL(5.0), SRPT(), case)


@pytest.mark.parametrize(("arrival", "preempted"), [(8.5 / 64, True), (9.5 / 64, False)])
def test_trail_preempts_up_to_c_times_the_first_prediction(arrival, preempted):
    """Generated 10 = 0.5 x 20 when the first arrival is seen, 11 at the second (the prefill's token is free here)."""
    asks = (Ask(0.0, 4, 20, prediction=point(20.0)), Ask(arrival, 4, 5, prediction=point(1.0)))
    result = play(Case(asks, max_num_seqs=1, cost="tick", keeps_kv=True), policy=TRAIL(0.5))
    assert (result.scheduler.num_preemptions == 1) == preempted


def test_trail_takes_the_slot_of_the_young_and_not_of_the_old():
    asks = (
        Ask(0.0, 4, 100, prediction=point(100.0)),  # past its limit, though most is left
        Ask(0.4, 4, 50, prediction=point(50.0)),
        Ask(0.5, 4, 5, prediction=point(5.0)),
    )
    result = play(Case(asks, max_num_seqs=2, cost="tick"), policy=TRAIL(0.1))
    assert [r._num_preemptions for r in result.requests] == [0, 0, 0]  # 1 has had 6 tokens: past its limit too
    result = play(Case(asks, max_num_seqs=2, cost="tick"), policy=TRAIL(0.2))
    assert [r._num_preemptions for r in result.requests] == [0, 1, 0]
    assert play(Case(asks, max_num_seqs=2, cost="tick"), policy=SRPT()).requests[0]._num_preemptions == 1


def in_order(kind):
    """`kind`, asserting at every plan that the stored order of who runs is that of its keys."""

    class Checked(kind):
        num_refined = 0

        def stable(self, view):
            if view.running.members:
                assert view.running.greatest() is max(view.running, key=view.rank)
            return super().stable(view)

        def on_refine(self, req):
            self.num_refined += 1
            super().on_refine(req)

    return Checked


@pytest.mark.parametrize("every", [1, 3, 8])
def test_keys_follow_a_refined_prediction(every):
    for seed in range(4):
        for make in (lambda: in_order(TRAIL)(0.6), lambda: in_order(ISRTF)(5), lambda: in_order(Gittins)(7)):
            logs = []
            for fast_forward in (False, True):
                policy = make()
                logs.append(rehearse(policy, roomy(seed), refine_every=every, fast_forward=fast_forward)[0])
                assert policy.num_refined > 10
            assert logs[0] == logs[1]


def test_the_limit_is_of_the_first_prediction():
    req, trail = Request(0, 0.0, 10, prediction=point(20.0)), TRAIL(0.5)
    trail.on_arrival(req)
    req.prediction = point(200.0)
    assert (
        trail.key(req, Look(4)) == 196.0
        and trail.rekey_at(req, 10) == 11
        and trail.rekey_at(req, 11) == 199
        and trail._limit(req) == 10.0
    )
    trail.on_finish(req)
    assert not trail._limits


def test_aging_refuses_what_it_cannot_bound():
    for policy in (TRAIL(), Gittins(), LAS(), ISRTF(), HRRN()):
        with pytest.raises(ValueError, match="Aging"):
            Aging(policy, 20.0)


# --- ISRTF --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_isrtf_preempts_at_edges_only_and_at_every_step_it_is_srpt(seed):
    same_path(ISRTF(1), SRPT(), hostile(np.random.default_rng(seed)))
    case, steps = roomy(seed), []

    def watch(scheduler, plan, outcome):
        if plan.leaves:
            steps.append(scheduler.step - (outcome.num_steps if plan.num_decode else 0))

    for every in (0, 3):
        rehearse(ISRTF(8), case, watch=watch, refine_every=every)
    assert all(step % 8 == 0 for step in steps), steps
    mid = []
    rehearse(SRPT(), case, watch=lambda s, plan, out: mid.append(s.step - 1) if plan.leaves else None)
    assert bool(steps) <= bool(mid)


def test_isrtf_waits_for_the_edge():
    asks = (Ask(0.0, 4, 100, prediction=point(100.0)), Ask(0.1, 4, 5, prediction=point(5.0)))
    result = play(Case(asks, max_num_seqs=1, cost="tick", keeps_kv=True), policy=ISRTF(50))
    assert result.requests[1]._first_scheduled == 50 / 64


# --- Gittins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantum", [1, 10, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_gittins_of_points_is_srpt(seed, quantum):
    case = hostile(np.random.default_rng(seed))
    case = replace(case, prediction=[point(p.mean()) for p in case.prediction])
    same_path(Gittins(quantum), SRPT(), case)


def ranks(prediction: LengthDistribution, ages, quantum: int = 1) -> np.ndarray:
    policy, req = Gittins(quantum), Request(0, 0.0, 10, prediction=prediction)
    return np.array([policy.key(req, Look(age)) for age in ages])


def test_gittins_is_constant_for_an_exponential_and_rises_for_a_pareto():
    ages = range(0, 1500, 25)
    flat = ranks(exponential(400.0), ages)
    assert flat == pytest.approx(np.full(len(flat), 400.0), rel=0.06)
    rising = ranks(LengthDistribution.from_survival((1.0 + EDGES / 50.0) ** -2.0), ages)
    assert np.all(np.diff(rising) >= 0.0)
    assert rising[1:] == pytest.approx((50.0 + np.array(ages[1:])) / 2.0, rel=0.35)  # 1 / hazard at the edge below, and a step


def test_gittins_ranks_stand_between_quanta():
    some = LengthDistribution.from_survival((1.0 + EDGES / 50.0) ** -2.0)
    stepped, fine = ranks(some, range(200), 64), ranks(some, range(200))
    assert len(set(stepped)) == 4 and list(stepped[::64]) == list(fine[::64])
    policy, req = Gittins(64), Request(0, 0.0, 10, prediction=some)
    assert [policy.rekey_at(req, g) for g in (0, 63, 64)] == [64, 64, 128] and not policy.drifts(req, 0)
    short = Request(1, 0.0, 10, prediction=point(9.5))
    assert [policy.rekey_at(short, g) for g in (0, 9, 64)] == [9, 64, 128]


@given(st.integers(0, 1 << 32))
@settings(max_examples=30)
def test_gittins_ranks_of_all_ages_are_those_of_one(seed):
    rng = np.random.default_rng(seed)
    steps = rng.exponential(1.0, len(EDGES) + 1) * rng.integers(0, 2, len(EDGES) + 1) * rng.choice([1e-13, 1.0, 30.0])
    survival = np.clip(1.0 - np.cumsum(steps[:-1]) / steps.sum(), 0.0, 1.0) if steps.sum() else np.ones(len(EDGES))
    some = LengthDistribution.from_survival(survival)
    assert some.gittins_ranks() == pytest.approx([some.gittins(age) for age in (0, *EDGES)], rel=1e-9)


def test_gittins_forgets_who_ends():
    policy = Gittins(4)
    case = replace(hostile(np.random.default_rng(0)), prediction=[exponential(12.0)] * 24)
    rehearse(policy, case)
    assert not policy._ranks


# --- TIE ----------------------------------------------------------------------------------------------------------------


def test_tie_scores_are_mean_and_tail():
    tie = TIE()
    assert tie.score(Request(0, 0.0, 1, prediction=point(50.0)), 0.3) == pytest.approx(65.0)
    assert tie.score(Request(0, 0.0, 1, 20, prediction=point(50.0)), 0.3) == pytest.approx(26.0)  # cut at 20 tokens
    some = exponential(100.0)
    got = tie.score(Request(0, 0.0, 1, 32_768, prediction=some), 0.5)
    assert got == pytest.approx(100.0 + 0.5 * 100.0 * (1 + math.log(10.0)), rel=0.03)
    u = (np.arange(200_000) + 0.5) / 200_000  # the cut distribution, by its quantiles
    for most in (60, 300):
        x = np.minimum([some.quantile(q) for q in u[::100]], most)
        want = x.mean() + 0.5 * x[int(0.9 * len(x)) :].mean()
        assert tie.score(Request(0, 0.0, 1, most, prediction=some), 0.5) == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize(("num_waiting", "weight"), [(0, 0.1), (31, 0.1), (63, 0.2), (159, 0.5), (9999, 0.5)])
def test_tie_weighs_the_tail_by_the_queue_that_a_request_met(num_waiting, weight):
    tie, req = TIE(), Request(0, 0.0, 1, prediction=point(100.0))
    key = tie.key(req, Look(num_waiting=num_waiting))
    assert key == pytest.approx(math.log(100.0 * (1 + weight)))
    assert tie.key(req, Look(num_waiting=3)) == key  # kept
    tie.on_finish(req)
    assert not tie._keys


@given(st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(2.0, 2000.0)), min_size=2, max_size=6), st.floats(500.0, 2000.0))
@settings(max_examples=30)
def test_tie_keeps_the_order_of_decaying_scores(some, now):
    """score x 0.9^(wait / 30 s), at any time, orders as the key that never moves."""
    tie = TIE()
    requests = [Request(i, a, 1, prediction=point(p)) for i, (a, p) in enumerate(some)]
    decayed = {r.rid: 1.1 * r.prediction.mean() * 0.9 ** ((now - r.arrival) / 30.0) for r in requests}  # type: ignore[union-attr]
    keys = {r.rid: tie.key(r, Look()) for r in requests}
    for i in decayed:
        for j in decayed:
            if decayed[i] < decayed[j] * (1 - 1e-9):
                assert keys[i] < keys[j]


def test_tie_sets_the_uncertain_behind_the_certain():
    certain, uncertain = Request(0, 0.0, 1, 32_768, prediction=point(100.0)), Request(1, 0.0, 1, 32_768)
    uncertain.prediction = LengthDistribution.from_survival((1.0 + EDGES / 120.0) ** -2.2)
    assert uncertain.prediction.mean() == pytest.approx(100.0, rel=0.05)
    tie = TIE()
    assert tie.key(certain, Look()) < tie.key(uncertain, Look())


# --- soft boost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_soft_boost_lies_between_sjf_and_fcfs(seed):
    case = roomy(seed)
    same_path(SoftBoost(1e-9), SJF(), case)
    same_path(SoftBoost(1e9), FCFS(), case)


@pytest.mark.parametrize("gamma", [0.02, 0.3, 3.0])
def test_soft_boost_has_the_least_exponential_moment_of_a_batch(gamma):
    """Of all orders of requests that all wait, its own has the least sum of exp(gamma x response time)."""

    rng = np.random.default_rng(1)
    policy = SoftBoost(gamma, 0.1)
    for _ in range(20):
        arrival, tokens = rng.uniform(-5.0, 0.0, 5), rng.integers(1, 100, 5).astype(float)

        def moment(order, arrival=arrival, tokens=tokens):
            order = list(order)
            return np.exp(gamma * (np.cumsum(0.1 * tokens[order]) - arrival[order])).sum()

        keys = [policy.key(Request(i, arrival[i], 1, prediction=point(tokens[i])), Look()) for i in range(5)]
        least = min(moment(order) for order in permutations(range(5)))
        assert moment(np.argsort(keys)) == pytest.approx(least, rel=1e-12)


# --- HRRN ---------------------------------------------------------------------------------------------------------------


class ByHand(HRRN):
    """Asserts at every question that the first is the one with the greatest ratio of all who wait."""

    num = 0

    def order(self, waiting, view):
        waiting = list(waiting)
        assert sorted(r.rid for r in waiting) == sorted(self._waiting._leaf)
        first = min(
            waiting, key=lambda r: (-(view.now - r.arrival) / max(r.prediction.mean(), 1.0), r.arrival, r._entry), default=None
        )
        for req in super().order(waiting, view):
            assert first is None or req is first, (req, first)
            self.num += len(waiting) > 2
            first = None
            yield req


def test_hrrn_takes_the_greatest_response_ratio():
    num = 0
    for seed in range(8):
        for reuse in (False, True):
            policy = ByHand()
            rehearse(policy, hostile(np.random.default_rng(seed), 60, reuse=reuse))
            num += policy.num
            assert not len(policy._waiting)
    assert num > 500


def test_hrrn_lets_the_long_pass_the_short_in_time():
    """A request of 50 that has waited 1 s goes before one of 5 that has waited 0.05 s, and not before one of 0.2 s."""
    for wait, first in ((0.05, 1), (0.2, 2)):
        asks = (Ask(0.0, 4, 64, prediction=point(64.0)), Ask(0.02, 4, 50, prediction=point(50.0)))
        asks = (*asks, Ask(63 / 64 - wait, 4, 5, prediction=point(5.0)))
        result = play(Case(asks, max_num_seqs=1, cost="tick"), policy=HRRN())
        assert min((1, 2), key=lambda i: result.finish[i]) == first


@given(st.integers(0, 1 << 32))
@settings(max_examples=30)
def test_kinetic_is_a_search_through_all(seed):
    rng = np.random.default_rng(seed)
    kinetic, there, now = Kinetic(), {}, 0.0
    promised: tuple[float, Request | None] = (INF, None)
    for rid in range(120):
        now += float(rng.choice([0.0, 0.25, rng.exponential(2.0)]))
        first = min(there.values(), key=lambda x: (-(now - x[0]) / x[1], x[0], x[2]), default=None)
        assert kinetic.best(now) is (None if first is None else first[3])
        assert now >= promised[0] or kinetic.best(now) is promised[1]
        for _ in range(int(rng.integers(0, 3))):
            if there and rng.random() < 0.5:
                gone = int(rng.choice(list(there))) if rng.random() < 0.5 or first is None else first[3].rid
                kinetic.remove(gone)
                there.pop(gone, None)
        if rng.random() < 0.7:
            req = Request(rid, now, 1)
            there[rid] = (now, float(rng.integers(1, 20)), rid, req)
            kinetic.add(req, *there[rid][:2], rid)
        kinetic.remove(10_000)
        assert len(kinetic) == len(there) and all(r in kinetic for r in there)
        promised = kinetic.until(now), kinetic.best(now)


# --- LAS ----------------------------------------------------------------------------------------------------------------


def test_las_runs_whoever_has_had_least():
    def watch(scheduler, plan, outcome):
        if plan.num_decode and not plan.chunks and outcome.num_steps == 1 and not outcome.finished:
            had = [scheduler.generated(r) - 1 for r in scheduler.running]
            assert all(g // 4 <= scheduler.generated(r) // 4 for g in had for r in scheduler.waiting)
            seen.append(len(scheduler.waiting))

    seen: list[int] = []
    for seed in range(4):
        case = replace(roomy(seed), max_num_seqs=2, token_budget=256)
        rehearse(LAS(4), case, watch=watch, fast_forward=False)
    assert sum(n > 0 for n in seen) > 20
