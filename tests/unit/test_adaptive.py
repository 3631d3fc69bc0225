"""Adaptive chunks: a step with decodes is predicted to stay within its target, and no more of it is left than a token costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import BATCHING, Ask, Case, play
from omegaconf import OmegaConf

import lengthwise
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.simulate import compose
from lengthwise.sched import LengthDistribution, Scheduler
from lengthwise.sched.batching import Adaptive, PrefillFirst
from lengthwise.sched.contract import check_policy
from lengthwise.sched.policies import FCFS, SRPT

BASE, ROW, CONTEXT, PREFILL = 8e-3, 2e-4, 1e-6, 1e-4
COST = Affine(BASE, ROW, CONTEXT, PREFILL)
CROWD = Case(
    tuple(Ask(0.05 * i, 30 + 97 * i % 400, 20 + 31 * i % 50, 100) for i in range(30)),
    pool=1 << 16, max_num_seqs=64, token_budget=512, cost=COST,
)  # fmt: skip


def adaptive(target: float = 0.02, least: int = 4) -> Adaptive:
    return Adaptive(target, BASE, ROW, CONTEXT, PREFILL, least)


def played(monkeypatch, batching, case=CROWD, **how):
    monkeypatch.setitem(BATCHING, "this", lambda: batching)
    return play(replace(case, batching="this"), **how)


def mixed(result):
    """(seconds, tokens of prompts, whether one was cut) of the steps with decodes and chunks."""
    return [
        (end - start, sum(c[2] for c in chunks), not all(c[3] for c in chunks))
        for start, end, chunks, _, _, num_decode, _, _ in result.log.steps
        if chunks and num_decode
    ]


def test_a_step_with_decodes_stays_within_the_target_and_uses_it(monkeypatch):
    steps = mixed(played(monkeypatch, adaptive()))
    assert max(seconds for seconds, *_ in steps) <= 0.02 + 1e-12
    cut = [seconds for seconds, _, was_cut in steps if was_cut]
    assert len(cut) > 10 and min(cut) > 0.02 - PREFILL  # a token more would have been too much
    assert len({tokens for _, tokens, was_cut in steps if was_cut}) > 5  # chunks of many sizes
    assert max(seconds for seconds, *_ in mixed(play(CROWD))) > 0.04  # which a fixed budget does not keep


def test_where_nobody_decodes_prompts_have_the_whole_budget(monkeypatch):
    result = played(monkeypatch, adaptive(), Case((Ask(0.0, 1200, 5),), token_budget=512, cost=COST))
    assert [c[2] for step in result.log.steps for c in step[2]] == [512, 512, 176]


def test_prompts_get_the_least_however_slow_the_decodes_are(monkeypatch):
    asks = (*(Ask(0.0, 8, 90, 90) for _ in range(10)), Ask(0.3, 40, 5, 5))
    result = played(monkeypatch, adaptive(0.009), Case(asks, cost=COST))
    late = [step for step in result.log.steps if step[2] and step[0] >= 0.3]
    assert [c[2] for step in late for c in step[2]] == [4] * 10 and all(step[5] == 10 for step in late)


@pytest.mark.parametrize("limit", [10, 64, 2048])
def test_the_budget_is_within_its_bounds(limit):
    batching = adaptive()
    for rows in range(limit + 1):
        budgets = [batching.budget(rows, context, limit) for context in (0, 500, 5000, 10**6)]
        assert budgets == sorted(budgets, reverse=True)
        assert all(budget == limit or rows + 4 <= budget < limit for budget in budgets)


def test_wrong_arguments_are_refused_with_the_value():
    for given, words in (
        ({"target": 0.0}, "target=0"), ({"per_prefill": 0.0}, "per_prefill=0"), ({"base": -1.0}, "base=-1"),
        ({"per_row": float("nan")}, "per_row=nan"), ({"least": 0}, "least=0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            Adaptive(**{"target": 0.02, "base": 0.0, "per_row": 0.0, "per_context": 0.0, "per_prefill": 1e-4, **given})


@pytest.mark.parametrize("policy", [FCFS, SRPT], ids=["fcfs", "srpt"])
@pytest.mark.parametrize(
    "make", [lambda: Adaptive(6e-3, 4e-3, 1e-4, 1e-6, 2e-4, 1), lambda: PrefillFirst(chunks=True)], ids=["adaptive", "chunks"]
)
def test_any_policy_keeps_the_contract_with_it(make, policy):
    check_policy(policy, num_cases=4, scheduler=lambda policy, _, *a, **k: Scheduler(policy, make(), *a, **k))


def test_prefill_first_may_cut_prompts(monkeypatch):
    asks = (Ask(0.0, 8, 60, 60), Ask(0.2, 100, 5, 5))
    case = Case(asks, batching="prefill_first", token_budget=32, max_num_seqs=8, cost=COST)
    result = played(monkeypatch, PrefillFirst(chunks=True), case)
    assert [c[2] for step in result.log.steps for c in step[2] if c[0] == 1] == [32, 32, 32, 4]
    assert not any(step[2] and step[5] for step in result.log.steps)
    assert play(case).log.ended_at[1][1].startswith("rejected")


def test_its_node_keeps_the_target_on_the_hardware_it_is_of():
    """A roofline is below the sum of its parts, which the node's coefficients are."""
    node = OmegaConf.to_container(OmegaConf.create(compose(batching="adaptive")["batching"]))
    parts = {"workload": "synthetic", "num_requests": 150, "rate": 30.0, "seed": 1}
    slow, fixed = lengthwise.simulate(batching={**node, "target": 0.012}, **parts), lengthwise.simulate(**parts)
    assert slow.metrics["num_finished"] == fixed.metrics["num_finished"] == 150
    assert slow.metrics["itl_p99"] <= 0.012 and slow.metrics["itl_p99"] < fixed.metrics["itl_p99"]
    assert slow.metrics["ttft_mean"] > fixed.metrics["ttft_mean"]


def test_predictions_are_no_part_of_it(monkeypatch):
    """It cuts SRPT's chunks too, and a request that is paused for a slot costs nobody its token."""
    asks = tuple(replace(a, prediction=LengthDistribution.point(float(a.output_len))) for a in CROWD.asks)
    case = replace(CROWD, asks=asks, policy="srpt", keeps_kv=True, max_num_seqs=4)
    fast = played(monkeypatch, adaptive(), case)
    assert max(seconds for seconds, *_ in mixed(fast)) <= 0.02 + 1e-12 and fast.scheduler.num_preemptions > 0
    assert played(monkeypatch, adaptive(), case, fast_forward=False).log == fast.log
