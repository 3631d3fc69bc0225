"""Laws of who yields: no inversion of priorities through memory, no livelock, and a victim keeps its place in the queue."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.resources import files

import numpy as np
import pytest
from harness import Ask, Case, play
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.sched import Policy
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import Hostile, Overtaking, hostile, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, LAS, SRPT, Priority
from lengthwise.sched.preemption import Preemption
from lengthwise.sched.victims import LeastComputed, LeastWaste, MostRemaining

NODES = sorted(p.name for p in (files("lengthwise.conf") / "policy").iterdir() if p.name.endswith(".yaml"))


def node(name: str) -> Policy:
    return instantiate(OmegaConf.create((files("lengthwise.conf") / "policy" / name).read_text()))


# --- priority inversion: the least urgent hold memory that the most urgent want --------------------------------------------

LOW = tuple(Ask(0.0, 60, 150, 150, priority=2.0) for _ in range(2))
MIDDLE = tuple(Ask(0.4 + 0.1 * i, 12, 30, 30, priority=1.0) for i in range(5))


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_the_most_urgent_takes_memory_from_the_least_urgent_at_once(keeps_kv):
    """It starts with the next step though the pool is full; those in between neither pass it nor give up anything."""
    asks = (*LOW, *MIDDLE, Ask(0.65, 100, 5, 5, priority=0.0))
    result = play(Case(asks, pool=256, block_size=4, cost="even", keeps_kv=keeps_kv), policy=Priority())
    urgent, step = result.requests[-1], next(s for s in result.log.steps if s[0] >= 0.65)
    before = result.log.steps[result.log.steps.index(step) - 1]
    assert before[5] >= 3 and urgent._first_scheduled == step[0]
    assert result.requests[1]._num_preemptions > 0 and not any(r._num_preemptions for r in result.requests[2:])


def test_nobody_slips_past_the_most_urgent_where_nobody_is_interrupted():
    """Not preemptive, it waits for memory; and with it all behind it, though each of them would fit."""
    asks = (*LOW, *MIDDLE, Ask(0.35, 100, 5, 5, priority=0.0))
    result = play(Case(asks, pool=256, block_size=4, cost="even"), policy=Priority(preemptive=False))
    urgent, middle = result.requests[-1], result.requests[2:-1]
    assert urgent._first_scheduled > 0.6  # it did not fit
    assert all(r._first_scheduled >= urgent._first_scheduled for r in middle)


# --- livelock -------------------------------------------------------------------------------------------------------------


class Progress:
    """Between two preemptions of one request the engine has emitted a token; most: preemptions of one."""

    def __init__(self) -> None:
        self.most = 0
        self._emitted = 0
        self._at: dict[int, tuple[int, int]] = {}  # rid -> preemptions, tokens emitted by then

    def __call__(self, scheduler, plan, outcome) -> None:
        for req in [*scheduler.running, *scheduler.prefilling, *scheduler.waiting]:
            num, emitted = self._at.get(req.rid, (0, -1))
            if req._num_preemptions > num:
                assert req._num_preemptions == num + 1, f"request {req.rid} was preempted twice in a plan"
                assert self._emitted > emitted, f"request {req.rid} was preempted again before anybody got a token"
                self._at[req.rid] = req._num_preemptions, self._emitted
                self.most = max(self.most, req._num_preemptions)
        self._emitted += sum(chunk.last for chunk in plan.chunks) + plan.num_decode * outcome.num_steps


@pytest.mark.parametrize("name", NODES)
def test_no_livelock(name):  # S2
    """Memory for one request and a half, whichever is first, and everybody lets go by recompute, or in place."""
    for seed in range(2):
        case = hostile(np.random.default_rng([11, seed]), 16)
        pool = max(p + min(o, 60) for p, o in zip(case.prompt_len, case.output_len, strict=True)) * 3 // 2 + 8
        watch = Progress()
        tight = replace(case, kv=lambda pool=pool: Paged(pool, 1, 0.0), preemption=Preemption(bool(seed)), max_num_seqs=8)
        log, _ = rehearse(node(name), tight, watch=watch)
        assert len(log.ended_at) == 16


@pytest.mark.parametrize("make", [lambda: LAS(1), lambda: SRPT("reestimate")], ids=["las", "reestimate"])
def test_those_who_take_turns_get_a_token_at_each(make):
    case = replace(
        hostile(np.random.default_rng(3), 30, ample=True), batching=Chunked, max_num_seqs=2, preemption=Preemption(False),
        arrival=[0.01 * i for i in range(30)],
    )  # fmt: skip
    watch = Progress()
    rehearse(make(), case, watch=watch)
    assert watch.most > 3


# --- place in the queue ---------------------------------------------------------------------------------------------------


def crowded(stream: int, seed: int, keeps_kv: bool) -> Hostile:
    """Memory for one and a half of the largest, and more rows than that."""
    case = hostile(np.random.default_rng([stream, seed]), 30)
    arrival = [a / 4 for a in case.arrival]
    delay, abort = [0.0] * 30, [np.inf] * 30
    return replace(
        case, kv=lambda: Paged(150, 4, 0.0), preemption=Preemption(keeps_kv), max_num_seqs=8, arrival=arrival, delay=delay,
        abort=abort, output_len=[2 * n for n in case.output_len],
    )  # fmt: skip


class InOrder(FCFS):
    """First come, first served, that declares as much: nobody who comes later may pass."""

    def overtaking_horizon(self, req, view):
        return req.arrival


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("rule", [None, LeastComputed, MostRemaining, LeastWaste])
def test_whoever_yields_keeps_its_place_before_all_that_came_later(rule, keeps_kv):
    """Whom a rule hits too: it may be before those who run on, but nobody new comes in before it."""
    preempted = 0
    for seed in range(12):
        case = crowded(12, seed, keeps_kv)
        watch = Overtaking()
        made = partial(watch.scheduler, victim=rule() if rule else None)
        preempted += rehearse(InOrder(), case, watch=watch, scheduler=made)[1].num_preemptions
        assert watch.num == 0
    assert preempted > 20


def test_the_last_in_order_yields_and_comes_back_first():
    """Three grow out of the pool: the latest goes, and is back before the fourth starts, which would have fitted."""
    asks = tuple(Ask(arrival, 20, 60, 60) for arrival in (0.0, 0.01, 0.02, 0.9))
    result = play(Case(asks, pool=160, block_size=1, cost="even"))
    num = [r._num_preemptions for r in result.requests]
    assert num[0] == 0 and num[2] >= 1 and num[1] <= num[2]
    assert result.requests[2]._resumes[-1] <= result.requests[3]._first_scheduled


def test_a_scheduler_that_forgets_a_place_is_noticed():
    """The watch has teeth: a victim that comes back as if it had just arrived is passed."""

    class Forgetting(InOrder):
        def key(self, req, view):
            return float(req._num_preemptions)

    passed = 0
    for seed in range(12):
        watch = Overtaking()
        try:
            rehearse(Forgetting(), crowded(12, seed, False), watch=watch, scheduler=watch.scheduler)
        except AssertionError as error:
            passed += "past its bound" in str(error)
    assert passed > 0
