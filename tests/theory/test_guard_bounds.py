"""What each guard declares, held against an adversary: a stream of short requests that never leaves the engine a free slot.

Long ones are there first. Without a guard they are passed by the whole stream; with one, by exactly whom its bound allows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.sched import LengthDistribution, Policy, Request, Scheduler
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import Hostile, hostile, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import LTR, SJF, SRPT, Aging, DeadlineGuard, IdleGuard, OvertakingGuard, WorkGuard
from lengthwise.sched.preemption import Preemption

LONG, SHORT = 3, 240
OUTPUT = 40, 4  # tokens of a long and of a short one


def stream(keeps_kv: bool, gap: float = 0.0085) -> Hostile:
    """Two slots, three long requests, and a short one every `gap` s: a little more than the engine serves."""
    num = LONG + SHORT
    outputs = [OUTPUT[0]] * LONG + [OUTPUT[1]] * SHORT
    return replace(
        hostile(np.random.default_rng(0), num, ample=True), batching=Chunked, kv=lambda: Paged(1 << 17, 16, 0.0),
        preemption=Preemption(keeps_kv), max_num_seqs=2, token_budget=64, prompt_len=[8] * num, output_len=outputs,
        arrival=[0.001 * i for i in range(LONG)] + [0.004 + gap * i for i in range(SHORT)], delay=[0.0] * num,
        prediction=[LengthDistribution.point(float(o)) for o in outputs], abort=[np.inf] * num,
    )  # fmt: skip


class Passes:
    """rows: (time of the plan, who was passed, since when it was off the batch, by whom), whenever somebody came on the batch
    before one that was there earlier, and was off it."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, Request, float, Request]] = []
        self._on: set[Request] = set()
        self._since: dict[Request, float] = {}
        planned = self._planned = [0.0]

        class Noting(Scheduler):
            def plan(self, now):
                planned[0] = now
                return super().plan(now)

        self.scheduler = Noting

    def __call__(self, scheduler, plan, outcome) -> None:
        now = self._planned[0]
        on = {*scheduler.running, *scheduler.prefilling, *(f.request for f in outcome.finished)}
        off = [r for r in scheduler.waiting if r.arrival <= now]
        for req in off:
            if req in self._on:
                self._since[req] = now
            self._since.setdefault(req, req.arrival)
        for new in on - self._on:
            self.rows += [(now, i, self._since[i], new) for i in off if i._entry < new._entry]
        self._on = on

    def by(self, rid: int) -> set[int]:
        return {new.rid for _, i, _, new in self.rows if i.rid == rid}


def passes(policy: Policy, keeps_kv: bool) -> Passes:
    watch = Passes()
    rehearse(policy, stream(keeps_kv), watch=watch, scheduler=watch.scheduler)
    return watch


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [SRPT, SJF, LTR])
def test_without_a_guard_the_whole_stream_passes(inner, keeps_kv):
    watch = passes(inner(), keeps_kv)
    assert max(len(watch.by(rid)) for rid in range(LONG)) > 0.9 * SHORT


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [SRPT, SJF, LTR])
@pytest.mark.parametrize("most", [0, 7, 60])
def test_as_many_pass_as_may_and_they_are_the_next(most, inner, keeps_kv):
    """OvertakingGuard: at most `most`, and those that came right after; an adversary gets all of them."""
    watch = passes(OvertakingGuard(inner(), most), keeps_kv)
    worst = 0
    for rid in range(LONG):
        worst = max(worst, len(watch.by(rid)))
        assert watch.by(rid) <= set(range(rid + 1, rid + 1 + most))
    assert most // 2 <= worst <= most


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [SRPT, SJF, LTR])
@pytest.mark.parametrize(("wait", "per_token"), [(0.4, 0.0), (0.0, 0.02), (0.1, 0.01)])
def test_nobody_passes_who_comes_after_the_deadline(wait, per_token, inner, keeps_kv):
    watch = passes(DeadlineGuard(inner(), wait=wait, per_token=per_token), keeps_kv)
    leads = [new.arrival - i.arrival for _, i, _, new in watch.rows if i.rid < LONG]
    bound = wait + per_token * OUTPUT[0]
    assert 0.75 * bound < max(leads) < bound


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [SRPT, SJF])
def test_age_outweighs_length_in_the_end(inner, keeps_kv):
    """Aging: who comes (key - 1) / alpha later does not pass; a short one's own key counts too, so that it is sooner here."""
    alpha = 60.0
    watch = passes(Aging(inner(), alpha), keeps_kv)
    leads = [new.arrival - i.arrival for _, i, _, new in watch.rows if i.rid < LONG]
    assert 0.9 * (OUTPUT[0] - OUTPUT[1]) / alpha < max(leads) < (OUTPUT[0] - 1) / alpha


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [SRPT, SJF])
def test_who_has_been_idle_is_passed_only_by_those_promoted_before(inner, keeps_kv):
    """And where nobody is interrupted by nobody: the promoted keep their slots, and the next are promoted as they came."""
    places: dict[Request, float] = {}
    passed: list[Request] = []

    class Noting(IdleGuard):
        def due(self, view):
            for place, req in super().due(view):
                places[req] = place
                yield place, req

        def demote(self, req):
            super().demote(req)
            del places[req]

    policy = Noting(inner(), 0.25, 6)

    class Asserting(Passes):
        def __call__(self, scheduler, plan, outcome):
            seen = len(self.rows)
            super().__call__(scheduler, plan, outcome)
            for now, i, since, new in self.rows[seen:]:
                if now >= since + policy.idle:
                    passed.append(i)
                    assert places[new] <= places[i]

    watch = Asserting()
    rehearse(policy, stream(keeps_kv, 0.004), watch=watch, scheduler=watch.scheduler)
    assert bool(passed) == policy.preemptive and len(watch.rows) > 30


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("inner", [SRPT, SJF])
def test_the_work_of_those_who_pass_is_what_the_mark_allows(inner, keeps_kv):
    """WorkGuard: from the arrival of a long one to the last time that it is passed, no more slot-steps than its mark."""
    marks: dict[int, float] = {}

    class Watched(WorkGuard):
        def on_arrival(self, req):
            super().on_arrival(req)
            marks[req.rid] = next(mark for mark, _, r in self._marks if r is req)

    policy, clock = Watched(inner(), 1.0, 60.0), [0.0]

    class Asserting(Passes):
        def __call__(self, scheduler, plan, outcome):
            seen = len(self.rows)
            super().__call__(scheduler, plan, outcome)
            assert all(clock[0] < marks[i.rid] for _, i, _, _ in self.rows[seen:])
            clock[0] = policy._clock

    watch = Asserting()
    rehearse(policy, stream(keeps_kv), watch=watch, scheduler=watch.scheduler)
    assert len(watch.by(0) | watch.by(1) | watch.by(2)) > 5
