"""Victims: any policy with any rule, each rule's own choice, and no way round the strictly lower key."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.resources import files

import numpy as np
import pytest
from harness import POLICIES, Ask, Case, play
from hydra.utils import instantiate
from omegaconf import OmegaConf

import lengthwise
from lengthwise.sched import LengthDistribution, Request, Scheduler
from lengthwise.sched.admission import FuturePeak
from lengthwise.sched.contract import check_policy, hostile, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import EDF, FCFS, LLF, SRPT, Priority
from lengthwise.sched.request import Phase
from lengthwise.sched.victims import LeastComputed, LeastGenerated, LeastWaste, MostRemaining, VictimRule

point = LengthDistribution.point
RULES = {
    "least_computed": LeastComputed, "least_generated": LeastGenerated, "most_remaining": MostRemaining,
    "least_waste": LeastWaste,
}  # fmt: skip
NODES = sorted(p.name for p in (files("lengthwise.conf") / "victim").iterdir() if p.name.endswith(".yaml"))


def rule(name: str) -> VictimRule | None:
    node = OmegaConf.create((files("lengthwise.conf") / "victim" / name).read_text())
    return instantiate(node) if node._target_ else None


def under(make):
    return lambda *a, **k: Scheduler(*a, victim=make(), **k)


def test_every_rule_has_a_node():
    made = {name.removesuffix(".yaml"): rule(name) for name in NODES}
    assert made.pop("last") is None
    assert {name: type(one) for name, one in made.items()} == RULES


@pytest.mark.parametrize("policy", [FCFS, SRPT], ids=["fcfs", "srpt"])
@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_any_policy_keeps_the_contract_with_it(make, policy):
    check_policy(policy, num_cases=5, scheduler=under(make))


@pytest.mark.parametrize("make", [lambda: EDF(0.2, 1.0), lambda: LLF(0.2, 0.02)], ids=["edf", "llf"])
def test_all_parts_together_keep_the_contract(make):
    """Deadlines or bounds that move, a reservation that looks ahead, a rule that hits whom it likes."""
    check_policy(make, num_cases=4, scheduler=lambda *a, **k: Scheduler(*a, admission=FuturePeak(), victim=LeastWaste(), **k))


class Watched(Scheduler):
    """Notes who yields to whom, and holds it against the two laws."""

    def plan(self, now):
        self.notes.hit.clear()
        self.notes.pairs.clear()
        return super().plan(now)

    def pause(self, req):
        self._note(req)
        super().pause(req)

    def give_up(self, req):
        self._note(req)
        super().give_up(req)

    def schedule(self, req):
        notes = self.notes
        for victim, ran, key in notes.hit:
            notes.num += ran
            assert not ran or self.policy.key(req, self) < key, f"{req} took what {victim} had, whose key is not greater"
            assert (victim, req) not in notes.pairs, f"{req} was preempted by {victim} in this plan, and preempts it"
            notes.pairs.append((req, victim))
        notes.hit.clear()
        super().schedule(req)

    def _note(self, req):
        self.notes.hit.append((req, req.phase in (Phase.PREFILLING, Phase.DECODING), self.policy.key(req, self)))


class Notes:
    def __init__(self):
        self.hit, self.pairs, self.num = [], [], 0


@pytest.mark.parametrize("policy", ["psjf", "srpt", "srpt_reestimate", "priority", "aging_srpt"])
@pytest.mark.parametrize("make", [lambda: None, *RULES.values()], ids=["last", *RULES])
def test_a_slot_is_taken_for_a_lower_key_only_and_never_taken_back_within_a_plan(make, policy):  # S2, S7
    num = 0
    for i in range(12):
        notes = Notes()
        engine = type("Noting", (Watched,), {"notes": notes})
        case = hostile(np.random.default_rng(1000 + i), reuse=i % 4 == 3)
        rehearse(POLICIES[policy](), case, scheduler=lambda *a, e=engine, **k: e(*a, victim=make(), **k))
        num += notes.num
    assert num >= 10


# --- what each rule chooses -----------------------------------------------------------------------------------------------


def full_pool(policy, make, prompts=(400, 10), outputs=(200, 200), pool=700, **how):
    """Two of the same priority fill the pool; returns the run."""
    asks = tuple(Ask(0.01 * i, p, n, 256, point(float(n))) for i, (p, n) in enumerate(zip(prompts, outputs, strict=True)))
    case = Case(asks, policy, pool=pool, block_size=1, cost="even", **how)
    return play(case, scheduler=partial(Scheduler, victim=make() if make else None))


def preempted(result):
    return [r.rid for r in result.requests if r._num_preemptions]


def test_least_computed_spares_who_has_done_most():  # S8
    assert preempted(full_pool("fcfs", None)) == [1]
    assert preempted(full_pool("fcfs", None, prompts=(10, 400))) == [1]  # the last, with 400 tokens to compute again
    assert preempted(full_pool("fcfs", LeastComputed, prompts=(10, 400))) == [0]
    assert preempted(full_pool("fcfs", LeastComputed)) == [1]
    last, least = full_pool("fcfs", None, prompts=(10, 400)), full_pool("fcfs", LeastComputed, prompts=(10, 400))
    assert least.scheduler.recomputed_tokens < last.scheduler.recomputed_tokens


def test_least_generated_looks_at_answers_and_then_for_the_longest_prompt():
    class Ledger:
        generated = staticmethod(lambda req: {0: 5, 1: 4, 2: 4}[req.rid])

    costs = {i: LeastGenerated().cost(Request(i, 0.0, prompt), Ledger()) for i, prompt in enumerate((9000, 10, 20))}
    assert sorted(costs, key=costs.get) == [2, 1, 0]
    asks = tuple(Ask(0.0, prompt, 60, 60) for prompt in (30, 90, 60))  # they decode in step
    result = play(Case(asks, pool=240, block_size=1, cost="even"), scheduler=partial(Scheduler, victim=LeastGenerated()))
    assert preempted(result) == [1]


def test_most_remaining_by_what_is_predicted():
    assert preempted(full_pool("fcfs", MostRemaining, prompts=(100, 100), outputs=(220, 180), pool=420)) == [0]
    assert preempted(full_pool("fcfs", MostRemaining, prompts=(100, 100), outputs=(180, 220), pool=420)) == [1]


def test_least_waste_prefers_who_gives_back_more_for_what_is_lost():
    """In mid-prefill all blocks are held and few tokens are computed: nothing is cheaper to give back."""
    asks = (Ask(0.0, 100, 300, 300, point(300.0)), Ask(0.7, 300, 50, 60, point(50.0)))
    case = Case(asks, "fcfs", pool=480, block_size=1, max_num_seqs=4, token_budget=4, cost="even")
    result = play(case, scheduler=partial(Scheduler, victim=LeastWaste()))
    assert preempted(result) == [1] and 0 < result.requests[1]._recomputed < 300

    class Holding:  # 47 tokens in 3 blocks of 16, 33 in 3: the fuller one loses more for the same room
        kv = Paged(160, 16, 0.0)
        computed = capacity = staticmethod(lambda req: {0: 47, 1: 33, 2: 48}[req.rid])

    costs = [LeastWaste().cost(Request(i, 0.0, 1), Holding()) for i in range(3)]
    assert costs == [47 / 3, 11.0, 16.0]


def test_a_tie_is_the_policys_last():
    for make in (LeastComputed, LeastWaste, MostRemaining):
        asks = tuple(Ask(0.0, 100, 120, 256, point(120.0)) for _ in range(3))
        result = play(Case(asks, pool=500, block_size=1, cost="even"), scheduler=partial(Scheduler, victim=make()))
        assert preempted(result)[-1] == 2 and result.finish[0] <= result.finish[1] <= result.finish[2]


def test_a_rule_gives_nobody_the_right_to_a_slot():
    """Priority 1 may take the slot of priority 2, not of priority 0, whoever has computed least."""
    asks = (Ask(0.0, 100, 100, priority=2), Ask(0.1, 4, 100, priority=0), Ask(0.5, 4, 10, priority=1))
    result = play(
        Case(asks, max_num_seqs=2, cost="even"), policy=Priority(), scheduler=partial(Scheduler, victim=LeastComputed())
    )
    assert preempted(result) == [0]
    calm = play(Case(asks, "priority_calm", max_num_seqs=2, cost="even"), scheduler=partial(Scheduler, victim=LeastComputed()))
    assert preempted(calm) == []


def test_the_pool_that_fits_one_and_a_half():  # S2: every rule ends, and what is computed again is finite and told
    asks = tuple(Ask(0.0, 10, 80, 80, point(80.0)) for _ in range(8))
    case = Case(asks, pool=135, block_size=1, cost="even")
    for make in (lambda: None, *RULES.values()):
        result = play(case, scheduler=partial(Scheduler, victim=make()), max_steps=20_000)
        assert not np.isnan(result.finish).any()
        assert result.scheduler.recomputed_tokens == sum(r._recomputed for r in result.requests) > 0
        more = sum(r._num_preemptions > 3 for r in result.requests)
        assert result.scheduler.num_thrashed == more


def test_thrashing_is_counted_once_a_request():
    """An urgent one every now and then takes the same slot over and over."""
    asks = (Ask(0.0, 4, 200, priority=1), *(Ask(0.5 + 0.5 * i, 4, 5, priority=0) for i in range(6)))
    result = play(Case(asks, max_num_seqs=1, cost="even"), policy=Priority())
    assert result.requests[0]._num_preemptions == 6 and result.scheduler.num_thrashed == 1


def test_a_preemption_is_futile_where_it_undid_a_return_that_brought_no_token():
    """The second urgent one comes while what the first has cost is still computed again, the third when tokens have come."""
    urgent = [Ask(at, 4, 4, priority=0) for at in (0.3, 0.42, 0.9)]
    case = Case((Ask(0.0, 40, 60, priority=1), *urgent), max_num_seqs=1, token_budget=8, cost="even")
    result = play(case, policy=Priority())
    assert result.requests[0]._num_preemptions == 3 and result.scheduler.num_futile == 1
    kept = play(replace(case, keeps_kv=True), policy=Priority())  # nothing to compute again: each return brings tokens
    assert kept.requests[0]._num_preemptions == 3 and kept.scheduler.num_futile == 0


def test_a_rule_is_a_choice_of_a_cell():
    parts = {"policy": "fcfs", "workload": "synthetic", "num_requests": 150, "rate": 40.0, "kv_pool_tokens": 9000}
    with pytest.raises(ValueError, match="needs a prediction"):
        lengthwise.simulate(predictor="none", victim="most_remaining", **parts)
    last = lengthwise.simulate(predictor="none", **parts)
    least = lengthwise.simulate(predictor="none", victim="least_computed", **parts)
    assert least.summary["cell"]["victim"] == "least_computed"
    assert last.metrics["num_finished"] == least.metrics["num_finished"] == 150
    assert last.metrics["num_thrashed"] >= 0 and last.metrics["futile_preemptions"] <= last.metrics["preemptions"]
    assert last.metrics["preemptions"] > 0 and last.metrics["e2e_mean"] != least.metrics["e2e_mean"]
