"""Whom a preemption hits, from heaps, is whom a search through everybody names: in every plan of hostile runs."""

from __future__ import annotations

from heapq import merge

import numpy as np
import pytest

from lengthwise.sched import Request, Scheduler
from lengthwise.sched.contract import hostile, rehearse
from lengthwise.sched.last import Last
from lengthwise.sched.policies import (
    FCFS,
    LAS,
    LLF,
    LTR,
    MLFQ,
    SRPT,
    TRAIL,
    Aging,
    Andes,
    Colocation,
    DeadlineGuard,
    Gittins,
    IdleGuard,
    JITServe,
    OvertakingGuard,
    Priority,
    WorkGuard,
)
from lengthwise.sched.request import Phase
from lengthwise.sched.yielding import Yielding

POLICIES = {
    "fcfs": FCFS, "srpt": SRPT, "reestimate": lambda: SRPT("reestimate"), "las": lambda: LAS(2), "ltr": lambda: LTR(7, 3),
    "mlfq": lambda: MLFQ(0.006, 1.5, 0.004, 2e-5, promote_after=0.05, promote_every=7), "trail": TRAIL,
    "gittins": lambda: Gittins(4), "llf": lambda: LLF(0.1, 0.02, 1.0), "andes": lambda: Andes(0.1, 0.02, tight=0.2, every=3),
    "jitserve": lambda: JITServe(0.1, 0.02, 1.0, every=3), "priority": Priority, "aging": lambda: Aging(SRPT(), 20.0),
    "idle": lambda: IdleGuard(SRPT(), 0.05, 4), "deadline": lambda: DeadlineGuard(LTR(), wait=0.2),
    "overtaking": lambda: OvertakingGuard(LAS(4), 3), "work": lambda: WorkGuard(SRPT(), 1.0, 20.0),
    "colocation": lambda: Colocation(LAS(4), Priority(), 2.0),
}  # fmt: skip

CALM = ("fcfs", "priority", "overtaking")  # too few of theirs are ever paused at once


class Searched(Yielding):
    """Asserts every choice against all that there are to choose from. seen: the most that a choice was made from, by phase."""

    seen: dict[Phase, int]

    def _in(self, phase: Phase) -> list[Request]:
        ledger = self._ledger
        rows = [r for r in (ledger.prefilling if phase == Phase.PREFILLING else ledger.waiting) if r.phase == phase]
        self.seen[phase] = max(self.seen.get(phase, 0), len(rows))
        return sorted(rows, key=ledger.rank, reverse=True)

    def _runs(self) -> list[Request]:
        ledger = self._ledger
        return [*merge(ledger.running.descending(), self._in(Phase.PREFILLING), key=ledger.rank, reverse=True)]

    def last(self):
        chosen = super().last()
        assert chosen is [*self._in(Phase.PAUSED), *self._runs()][0]
        return chosen

    def last_running(self):
        chosen = super().last_running()
        assert chosen is next(iter(self._runs()), None)
        return chosen

    def _candidates(self, req, slot_victim):
        ledger = self._ledger
        policy, mine = ledger.policy, ledger.rank(req)
        want = [r for r in self._in(Phase.PAUSED) if ledger.rank(r) > mine]
        if slot_victim is not None and self._keeps_kv:
            want = sorted([*want, slot_victim], key=ledger.rank, reverse=True)
        for victim in self._runs() if policy.preemptive else ():
            if victim is not slot_victim:
                if not policy.may_preempt(req, victim, ledger):
                    break
                want.append(victim)
        assert [*super()._candidates(req, slot_victim)] == want
        return iter(want)


@pytest.mark.parametrize("name", POLICIES)
def test_a_victim_is_the_one_that_a_search_finds(name):  # S2, S7, S8
    seen: dict[Phase, int] = {}

    class Searching(Scheduler):
        def __init__(self, policy, batching, kv, preemption, **how):
            super().__init__(policy, batching, kv, preemption, **how)
            self._yielding = Searched(self, preemption)
            self._yielding.seen = seen

    for seed in range(12):
        case = hostile(np.random.default_rng([9, seed]), 40, reuse=seed % 3 == 2)
        rehearse(POLICIES[name](), case, scheduler=Searching, refine_every=3 * (seed % 2))
    several = [phase for phase, most in seen.items() if most > 2]
    assert several == [Phase.PREFILLING, Phase.PAUSED] or name in CALM  # else there was nothing to choose


def test_last_is_a_search_through_all():
    """Pushed, turned and gone in any order; an iterator that is dropped half way leaves the heap whole."""
    rng = np.random.default_rng(1)
    last, live = Last(), {}
    for step in range(600):
        req = Request(step, float(rng.integers(0, 5)), 1)
        req._entry = step
        for who in [req, *rng.permutation([*live])[: rng.integers(0, 3)]]:
            who._ticket += 1
            live[who] = (float(rng.integers(0, 9)), who.arrival, who._entry)
            last.push(who, live[who][0])
        for who in rng.permutation([*live])[: rng.integers(0, 3)]:
            who._ticket += 1
            del live[who]
        want = sorted(live, key=live.__getitem__, reverse=True)
        assert last.top() is (want[0] if want else None)
        half = last.descending()
        for who in want[: len(want) // 2]:
            assert next(half) is who
        half.close()
        assert [*last.descending()] == want
        if step % 100 == 99:
            last.compact()
            assert len(last.heap) == len(live)
