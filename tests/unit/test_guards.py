"""Guards around policies: the contract, the bounds that they declare, and what they leave alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.sched import LengthDistribution, Request
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import Overtaking, check_policy, hostile, overtaking, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import (
    DRR,
    EDF,
    FCFS,
    HRRN,
    LAS,
    LLF,
    LPM,
    LTR,
    MLFQ,
    SRPT,
    TRAIL,
    VTC,
    Aging,
    DeadlineGuard,
    Gittins,
    IdleGuard,
    OvertakingGuard,
    Priority,
    WorkGuard,
)  # fmt: skip
from lengthwise.sched.policy import overrides
from lengthwise.sched.preemption import Preemption
from lengthwise.sched.request import Phase

INNER = {"fcfs": FCFS, "srpt": SRPT, "reestimate": lambda: SRPT("reestimate"), "priority": Priority}
GUARDS = {
    "deadline": lambda policy: DeadlineGuard(policy, wait=0.2),
    "relative": lambda policy: DeadlineGuard(policy, per_token=0.02),
    "overtaking": lambda policy: OvertakingGuard(policy, 3),
    "idle": lambda policy: IdleGuard(policy, 0.15, 4),
    "work": lambda policy: WorkGuard(policy, 1.0, 20.0),
    "turns": lambda policy: WorkGuard(policy, 1.0, 20.0, 2, 2.0),
}


WRAPPED = {
    "ltr": LTR,
    "ltr_guarded": lambda: LTR(7, 3),
    "trail": TRAIL,
    "gittins": lambda: Gittins(4),
    "vtc": VTC,
    "drr": lambda: DRR(30.0),
    "mlfq": lambda: MLFQ(0.006, 1.5, 0.004, 2e-5, promote_after=0.05, promote_every=7),
    "edf": lambda: EDF(0.1, 0.6),
    "llf": lambda: LLF(0.1, 0.02, 1.0),
    "lpm": lambda: LPM(shared=4, piece=4),
    "hrrn": HRRN,
}


class Ordered(FCFS):
    """Orders, preempts and chooses victims otherwise than by key: longest prompt first."""

    needs = frozenset({"victim"})

    def order(self, waiting, view):
        return iter(sorted(waiting, key=lambda r: (-r.prompt_len, r.arrival, r._entry)))

    def victim(self, running, view):
        return min(running, key=lambda r: (r.prompt_len, r.rid), default=None)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_around_every_policy_keeps_the_contract(guard, inner):
    check_policy(lambda: GUARDS[guard](INNER[inner]()), num_cases=3, constant_is_fcfs=inner == "fcfs")


def in_order(kind):
    """`kind`, asserting at every plan that the stored order of who runs is that of its keys, and the promoted come first."""

    class Checked(kind):
        def stable(self, view):
            here = [*view.running, *view.prefilling, *view.waiting]
            first, others = ([self.key(r, view) for r in here if self.is_promoted(r) is it] for it in (True, False))
            assert not first or not others or max(first) < min(others)
            if view.running.members:
                assert view.running.greatest() is max(view.running, key=view.rank)
            return super().stable(view)

    return Checked


@pytest.mark.parametrize("inner", WRAPPED)
@pytest.mark.parametrize("guard", ["deadline", "idle"])
def test_a_guard_goes_around_every_kind_of_policy(guard, inner):
    check_policy(lambda: GUARDS[guard](WRAPPED[inner]()), num_cases=2, constant_is_fcfs=False)
    for seed in range(4):
        policy = GUARDS[guard](WRAPPED[inner]())
        policy.__class__ = in_order(type(policy))
        rehearse(policy, hostile(np.random.default_rng([8, seed]), 40))


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_does_not_go_around_another(guard):
    with pytest.raises(ValueError, match="around OvertakingGuard: both put some before all others"):
        GUARDS[guard](OvertakingGuard(SRPT(), 1))


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_around_an_order_that_no_key_expresses(guard):
    for seed in range(6):
        case = hostile(np.random.default_rng([7, seed]))
        log, scheduler = rehearse(GUARDS[guard](Ordered()), case)
        assert len(log.ended_at) == len(case.arrival) and not scheduler.kv.in_use


@pytest.mark.parametrize("guard", [lambda p: DeadlineGuard(p, wait=0.1), lambda p: DeadlineGuard(p, per_token=0.004)])
def test_nobody_is_passed_by_who_comes_after_its_deadline(guard):
    for seed in range(25):
        overtaking(guard(SRPT()), hostile(np.random.default_rng([1, seed])))


def test_the_bound_is_one_that_srpt_alone_breaks():
    class Unguarded(SRPT):
        def overtaking_horizon(self, req, view):
            return req.arrival + 0.1

    with pytest.raises(AssertionError, match="past its bound"):
        for seed in range(25):
            overtaking(Unguarded(), hostile(np.random.default_rng([1, seed])))


class Passers:
    """Counts, for each request, the distinct ones of later eligibility that came onto the batch while it was off it."""

    def __init__(self):
        self.by = defaultdict(set)
        self._on = set()

    def __call__(self, scheduler, plan, outcome):
        now = {*scheduler.running, *scheduler.prefilling, *(f.request for f in outcome.finished)}
        for new in now - self._on:
            for other in scheduler.waiting:
                if other._order_of_eligibility < new._order_of_eligibility:
                    self.by[other.rid].add(new.rid)
        self._on = now


class Numbered(Request):
    """A request that remembers when it became eligible."""

    __slots__ = ("_order_of_eligibility",)


def passed(policy, case, monkeypatch):
    number = iter(range(10**6))
    before = type(policy).on_arrival

    def on_arrival(self, req):
        req._order_of_eligibility = next(number)
        before(self, req)

    monkeypatch.setattr("lengthwise.sched.contract.Request", Numbered)
    monkeypatch.setattr(type(policy), "on_arrival", on_arrival)
    watch = Passers()
    rehearse(policy, case, watch=watch)
    monkeypatch.undo()
    return max((len(rids) for rids in watch.by.values()), default=0)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_nobody_is_passed_by_more_than_so_many(most, monkeypatch):
    worst = [passed(OvertakingGuard(SRPT(), most), hostile(np.random.default_rng([2, k])), monkeypatch) for k in range(20)]
    alone = [passed(OvertakingGuard(SRPT(), 10**6), hostile(np.random.default_rng([2, k])), monkeypatch) for k in range(20)]
    assert max(worst) <= most < max(alone)


def test_an_adversarial_stream_of_short_ones_starves_nobody():
    """One long request and, at twice the engine's rate, short ones: SRPT alone serves it last of all."""
    n = 200
    base = hostile(np.random.default_rng(0), n + 1, ample=True)
    case = replace(
        base, batching=Chunked, kv=lambda: Paged(100_000, 16, 0.0), preemption=Preemption(False), max_num_seqs=1,
        token_budget=64,
        arrival=[0.0, *(0.001 + 0.01 * np.arange(n)).tolist()], prompt_len=[8] * (n + 1), output_len=[40, *[4] * n],
        prediction=[LengthDistribution.point(x) for x in (40.0, *[4.0] * n)], delay=[0.0] * (n + 1), abort=[np.inf] * (n + 1),
    )  # fmt: skip
    ends = {}
    for name, policy in {
        "alone": SRPT(), "deadline": DeadlineGuard(SRPT(), wait=0.5), "overtaking": OvertakingGuard(SRPT(), 20),
        "idle": IdleGuard(SRPT(), 0.25, 20), "work": WorkGuard(SRPT(), 1.0, 100.0),
    }.items():  # fmt: skip
        log, _ = rehearse(policy, case)
        ends[name] = log.ended_at[0][2]
        last = max(end for _, _, end in log.ended_at.values())
        assert (ends[name] == last) == (name == "alone")
    assert ends["deadline"] < 1.0 and ends["overtaking"] < 1.0 and ends["idle"] < 2.0 and ends["work"] < 1.0


@pytest.mark.parametrize("quantum", [None, 3])
def test_past_its_mark_nobody_is_passed_and_before_it_work_is_what_the_mark_allows(quantum):
    class Watched(WorkGuard):
        def __init__(self, *args):
            super().__init__(*args)
            self.mark, self.number, self.overtakings = {}, {}, 0

        def set_mark(self, req, now, span):
            super().set_mark(req, now, span)
            self.mark[req], self.number[req] = now + span, self._num

    total = 0
    for seed in range(20):
        case, policy, on = hostile(np.random.default_rng([4, seed])), Watched(SRPT(), 1.0, 10.0, quantum), set()

        def watch(scheduler, plan, outcome, policy=policy, on=on):
            now = {*scheduler.running, *scheduler.prefilling, *(f.request for f in outcome.finished)}
            clock = policy._clock - outcome.num_steps * len(now)  # before this plan, or earlier still
            for new in now - on:
                for other in scheduler.waiting:
                    if policy.number[other] < policy.number[new]:
                        policy.overtakings += 1
                        assert clock <= policy.mark[other]
            on.clear()
            on.update(now)

        rehearse(policy, case, watch=watch)
        marks = [policy.mark[req] for req in sorted(policy.mark, key=policy.number.__getitem__)]
        assert marks == sorted(marks) and not policy._work and abs(policy._waits) < 1e-6
        total += policy.overtakings
    assert total > 100  # else nothing was held against the marks


def test_idle_promotion_lasts_a_quantum():
    class Seen(IdleGuard):
        runs: list[int]

        def demote(self, req):
            super().demote(req)
            self.runs.append(req.rid)

    case = hostile(np.random.default_rng(5), 40)
    policy = Seen(SRPT(), 0.05, 3)
    policy.runs = []
    promoted = defaultdict(int)

    def watch(scheduler, plan, outcome):
        for req in [*scheduler.running, *scheduler.waiting]:
            if policy.is_promoted(req):
                promoted[req.rid] = max(promoted[req.rid], 1)
                if req.phase == Phase.DECODING:
                    assert scheduler.generated(req) <= policy._until[req]

    rehearse(policy, case, watch=watch)
    assert promoted and policy.runs  # somebody was promoted, and somebody's quantum ended before it did
    assert (
        not policy._since and not policy._until and not policy._scale and not policy._place
    )  # nothing is kept of who has ended


def test_with_backoff_each_wait_may_be_longer_and_earns_more():
    class Look:
        num_running, tokens = 1, 0

        def generated(self, req):
            return self.tokens

    policy, view = WorkGuard(FCFS(), 1.0, 100.0, 2, 4.0), Look()
    req = Request(0, 0.0, 10, prediction=LengthDistribution.point(50.0))
    policy.on_arrival(req)
    for wait, quantum in ((100, 2), (400, 8), (1600, 32)):
        mark = policy.next_mark()
        assert mark == policy._clock + wait
        policy.on_steps(wait - 1, view)
        assert not list(policy.turned(view)) and not policy.is_promoted(req)
        policy.on_steps(1, view)
        assert list(policy.turned(view)) == [req] and policy.is_promoted(req)
        policy.on_schedule(req, view)
        assert policy.rekey_at(req, view.tokens) == view.tokens + quantum
        view.tokens += quantum
        policy.rekey_at(req, view.tokens)
        assert not policy.is_promoted(req)
        policy.on_preempt(req, view)
    with pytest.raises(ValueError, match=r"backoff=0.5"):
        WorkGuard(FCFS(), backoff=0.5)


def test_a_guard_says_what_is_wrong():
    for bad in ({}, {"wait": -1.0}, {"per_token": float("inf")}):
        with pytest.raises(ValueError, match="wait"):
            DeadlineGuard(SRPT(), **bad) if "per_token" not in bad else DeadlineGuard(SRPT(), wait=-1.0, **bad)
    with pytest.raises(ValueError, match="most=-1"):
        OvertakingGuard(SRPT(), -1)
    with pytest.raises(ValueError, match="idle=0"):
        IdleGuard(SRPT(), 0, 1)
    with pytest.raises(ValueError, match="quantum=0"):
        IdleGuard(SRPT(), 1.0, 0)
    for bad in ({"factor": 0.9}, {"slack": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            WorkGuard(SRPT(), **bad)
    with pytest.raises(ValueError, match="Aging works on keys; OvertakingGuard overrides"):
        Aging(OvertakingGuard(SRPT(), 1), 1.0)


def test_around_costs_only_what_is_said():
    plain = Aging(SRPT(), 1.0)
    assert not any(overrides(plain, name) for name in ("order", "victim", "admit", "key_epoch", "turned", "on_steps"))
    guarded = DeadlineGuard(Ordered(), wait=1.0)
    assert overrides(guarded, "order") and overrides(guarded, "victim") and not overrides(guarded, "admit")


BOUNDED = {
    "aging": lambda: Aging(SRPT(), 20.0),
    "deadline": lambda: DeadlineGuard(SRPT(), wait=0.1),
    "relative": lambda: DeadlineGuard(SRPT(), per_token=0.004),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_hold_of_refined_predictions_too(name):
    for seed in range(30):
        watch = Overtaking()
        case = hostile(np.random.default_rng([1, seed]))
        rehearse(BOUNDED[name](), case, watch=watch, scheduler=watch.scheduler, refine_every=1)


def test_entries_of_keys_that_were_stored_anew_do_not_pile_up():
    most = []

    def watch(scheduler, plan, outcome):
        running = scheduler.running
        most.append(len(running._moving) + len(running._still) + len(running.turns) - 4 * len(running.members))

    for policy in (SRPT(), LAS(1)):
        rehearse(policy, hostile(np.random.default_rng(3), 60, ample=True), watch=watch, refine_every=1)
    assert max(most) <= 64 + 3
