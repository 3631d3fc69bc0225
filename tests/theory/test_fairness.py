"""Fairness between clients: the bounds on the difference of service, and who does not keep them (VTC, OSDI 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from harness import Ask, Case, play

from lengthwise.sched import LengthDistribution, Policy
from lengthwise.sched.policies import FCFS
from lengthwise.sched.policies.drr import DRR
from lengthwise.sched.policies.lcf import LCF
from lengthwise.sched.policies.vtc import VTC
from lengthwise.sched.policies.vtc_predicted import VTCPredicted
from lengthwise.sched.policies.wrr import WRR

POOL = 512  # KV tokens
PROMPT = 40  # the longest
INPUT, OUTPUT = 1.0, 2.0  # prices
MOST = max(INPUT * PROMPT, OUTPUT * POOL)


@dataclass(frozen=True)
class Clients(Case):
    clients: tuple[str, ...] = ()

    def requests(self):
        out = super().requests()
        for req, client in zip(out[0], self.clients, strict=True):
            req.client = client
        return out


def backlogs(seed: int, late: float = 0.0, pool: int = POOL) -> Clients:
    """Client a asks for twice as much as b from the start, in long prompts; b begins at `late` (s), with long answers."""
    rng = np.random.default_rng(seed)
    asks, clients = [], []
    for rid in range(450):
        of_a = rid % 3 > 0
        prompt, output = (PROMPT, 8) if of_a else (4, 30)
        asks.append(Ask(0.0 if of_a else late, int(rng.integers(1, prompt + 1)), int(rng.integers(1, output + 1)), 64))
        clients.append("a" if of_a else "b")
    order = sorted(range(450), key=lambda i: asks[i].arrival)
    return Clients(
        tuple(asks[i] for i in order), clients=tuple(clients[i] for i in order), pool=pool, block_size=4, max_num_seqs=12,
        token_budget=96,
    )  # fmt: skip


def services(case: Clients, policy: Policy) -> list[dict[str, float]]:
    """Service of each client so far, at each end of a plan at which both wait: prompts once admitted, tokens as generated."""
    out: list[dict[str, float]] = []
    seen: dict[object, None] = {}

    def watch(scheduler, plan, outcome):
        seen.update(dict.fromkeys([*scheduler.running, *scheduler.prefilling, *(f.request for f in outcome.finished)]))
        if len({r.client for r in scheduler.waiting}) == 2:
            now = {"a": 0.0, "b": 0.0}
            for req in seen:
                now[req.client] += INPUT * req.prompt_len + OUTPUT * scheduler.generated(req)
            out.append(now)

    play(case, policy=policy, watch=watch, keep=False)
    assert len(out) > 100
    return out


def difference(points: list[dict[str, float]], a: float = 1.0, b: float = 1.0) -> float:
    """The most by which service over weight differs, in any interval between two of the points."""
    gaps = [p["a"] / a - p["b"] / b for p in points]
    return max(gaps) - min(gaps)


@pytest.mark.parametrize("pool", [POOL, 160], ids=["roomy", "preempting"])
def test_vtc_bounds_the_difference_between_two_backlogged_clients(pool):
    """As published: at most 2 max(w_p L, w_q M) in any interval. First come, first served does not keep to it."""
    most = max(INPUT * PROMPT, OUTPUT * pool)
    for seed in range(2):
        case = backlogs(seed, pool=pool)
        assert difference(services(case, VTC())) <= 2 * most
        assert difference(services(case, FCFS())) > 2 * most


def test_vtc_bounds_it_by_weight():
    vtc = VTC(weights={"b": 3.0})
    points = services(backlogs(3), vtc)
    assert difference(points, b=3.0) <= 2 * MOST
    assert difference(points) > 2 * MOST


def test_right_predictions_at_admission_leave_no_more_than_one_request_between_counters():
    """Then all is charged at admission, to the least counter: the counters of clients that wait differ by at most one request.
    Charged as they come, answers in progress come on top: what predictions are for."""
    case = backlogs(4)
    case = replace(case, asks=tuple(replace(a, prediction=LengthDistribution.point(a.output_len)) for a in case.asks))
    dearest = max(INPUT * a.prompt_len + OUTPUT * a.output_len for a in case.asks)
    spread: dict[str, float] = {}
    for name, policy in (("vtc", VTC()), ("predicted", VTCPredicted(window=None))):
        gaps: list[float] = []

        def watch(scheduler, plan, outcome, policy=policy, gaps=gaps):
            if len(policy.backlogged) == 2:
                a, b = map(policy.counter, policy.clients.values())
                gaps.append(abs(a - b))

        play(case, policy=policy, watch=watch, keep=False)
        assert len(gaps) > 100
        spread[name] = max(gaps)
    assert spread["predicted"] <= dearest < spread["vtc"] <= MOST


def test_lcf_breaks_the_bound_when_the_load_shifts_and_the_lift_keeps_it():
    """b comes when a has been served for long: without the lift it shuts a out until it has caught up."""
    case = backlogs(5, late=0.8)
    assert difference(services(case, VTC())) <= 2 * MOST
    assert difference(services(case, LCF())) > 2 * MOST


@pytest.mark.parametrize("quantum", [50.0, 400.0])
def test_drr_bounds_the_difference_by_a_quantum_and_what_one_turn_may_overdraw(quantum):
    """A credit lies between -(w_p L + w_q M) and a quantum, and turns given differ by one."""
    bound = quantum + 2 * (quantum + INPUT * PROMPT + OUTPUT * POOL)
    case = backlogs(6)
    assert difference(services(case, DRR(quantum))) <= bound
    assert difference(services(case, FCFS())) > bound or quantum > 100


def test_wrr_bounds_admissions_by_one_round():
    weights = {"a": 3.0, "b": 1.0}
    policy, gaps = WRR("client", weights), []

    def watch(scheduler, plan, outcome):
        if len({r.client for r in scheduler.waiting}) == 2:
            gaps.append(policy.clients["a"].admissions / 3.0 - policy.clients["b"].admissions)

    play(backlogs(7, pool=1 << 16), policy=policy, watch=watch, keep=False)
    assert len(gaps) > 50 and max(map(abs, gaps)) <= 1.0


def test_vtc_is_work_conserving():
    """With KV for all, no slot stays free while somebody waits."""

    def watch(scheduler, plan, outcome):
        assert not scheduler.num_waiting or scheduler.num_running + len(outcome.finished) == 12

    for policy in (VTC(), DRR(), WRR("client")):
        play(replace(backlogs(8, pool=1 << 16), token_budget=2048), policy=policy, watch=watch, keep=False)
