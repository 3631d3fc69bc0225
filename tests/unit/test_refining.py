"""Refining: predictions of those who decode are asked again every so many steps, and keys follow."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise.experiments.cell import run_cell
from lengthwise.experiments.simulate import compose, simulate
from lengthwise.predictors.noisy_oracle import NoisyOracle
from lengthwise.predictors.refine_oracle import RefineOracle
from lengthwise.sched import LengthDistribution, Request
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import hostile, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.plan import Outcome
from lengthwise.sched.policies import FCFS, SRPT
from lengthwise.sched.preemption import Preemption
from lengthwise.sched.scheduler import Scheduler

point = LengthDistribution.point


def engine(policy, max_num_seqs=2, **more):
    return Scheduler(
        policy, Chunked(), Paged(10_000, 16, 0.0), Preemption(False), max_num_seqs=max_num_seqs, check=True, **more
    )


def step(scheduler, now):
    plan = scheduler.plan(now)
    scheduler.book(plan, Outcome(1, [now + 1.0], 1 if plan.num_decode else 0))
    return plan


def running_pair(policy):
    scheduler = engine(policy)
    first, second = (Request(i, 0.0, 4, prediction=point(10.0)) for i in range(2))
    for request in (first, second):
        scheduler.add(request)
    step(scheduler, 0.0)
    step(scheduler, 1.0)
    return scheduler, first, second


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_those_who_decode_are_probed_every_so_many_steps(every, fast_forward):
    probed = [0, 0]

    def watch(scheduler, plan, outcome):
        due = plan.num_decode > 0 and (scheduler.step - outcome.num_steps) // every < scheduler.step // every
        probed[due] += 1
        assert bool(plan.probe_rows) == due
        if due:
            assert scheduler.step % every == 0 and plan.repeat == 1
            decoded = {*scheduler.running, *(f.request for f in outcome.finished)} - {c.request for c in plan.chunks}
            assert {*plan.probe_rows} == decoded

    case = hostile(np.random.default_rng(4), ample=True)
    rehearse(SRPT(), case, refine_every=every, watch=watch, fast_forward=fast_forward)
    assert probed[1] and (probed[0] or every == 1)


def test_a_refined_prediction_decides_who_yields():
    scheduler, first, second = running_pair(SRPT())
    scheduler.refine(first, point(100.0))
    scheduler.add(Request(2, 2.0, 4, prediction=point(20.0)))
    plan = step(scheduler, 2.0)
    assert plan.leaves == [first] and {chunk.request.rid for chunk in plan.chunks} == {2}
    assert scheduler.running.greatest() is not first and second in scheduler.running.members


def test_without_it_nobody_yields():
    scheduler, _, _ = running_pair(SRPT())
    scheduler.add(Request(2, 2.0, 4, prediction=point(20.0)))
    assert not step(scheduler, 2.0).leaves


def test_who_waits_stands_by_the_new_prediction():
    scheduler = engine(SRPT(), max_num_seqs=1)
    for i, length in enumerate((1.0, 5.0, 9.0)):
        scheduler.add(Request(i, 0.0, 4, prediction=point(length)))
    step(scheduler, 0.0)
    late, later = sorted(scheduler.waiting, key=lambda r: r.rid)
    scheduler.refine(later, point(2.0))
    assert scheduler.waiting.peek() is later and len(scheduler.waiting) == 2
    scheduler.refine(later, point(50.0))
    assert scheduler.waiting.peek() is late


def test_srpt_forgets_its_own_estimate_when_a_new_one_comes():
    policy = SRPT("reestimate")
    scheduler, first, _ = running_pair(policy)
    now = 2.0
    while first.rid not in policy._totals:
        step(scheduler, now)
        now += 1.0
    scheduler.refine(first, point(400.0))
    assert first.rid not in policy._totals and policy.key(first, scheduler) == 400.0 - scheduler.generated(first)


def test_a_number_of_steps_is_wanted():
    with pytest.raises(ValueError, match="refine_every=-1"):
        engine(FCFS(), refine_every=-1)


# --- the oracle ---------------------------------------------------------------------------------------------------------


def means(refiner, requests, generated):
    return [row.mean() for row in refiner.refine(requests, generated)]


def test_the_error_is_of_what_is_to_come_and_of_the_stated_size():
    truth = np.full(4000, 1000)
    requests = [Request(i, 0.0, 4) for i in range(len(truth))]
    refiner = RefineOracle(mae=30.0).refiner(np.arange(len(truth)), truth, 0)
    told = np.array(means(refiner, requests, [200] * len(truth)))
    assert np.mean(np.abs(told - 1000)) == pytest.approx(30.0, rel=0.05)
    exact = RefineOracle().refiner(np.arange(len(truth)), truth, 0)
    assert means(exact, requests[:2], [200, 999]) == [1000.0, 1000.0]
    assert means(exact, requests[:1], [1500]) == [1501.0]  # it goes on all the same


def test_an_error_hangs_on_the_request_and_how_often_it_was_asked_not_on_the_others():
    truth, requests = np.array([90, 40, 70]), [Request(i, 0.0, 4) for i in range(3)]
    one, two = (RefineOracle(mae=9.0).refiner(np.arange(len(truth)), truth, 7) for _ in range(2))
    alone = [means(one, requests[:1], [8])[0], means(one, requests[:1], [16])[0]]
    among = [means(two, requests, [8, 8, 8])[0], means(two, requests[::-1], [16, 16, 16])[2]]
    assert alone == among and alone[0] != alone[1]
    assert means(RefineOracle(mae=9.0).refiner(np.arange(len(truth)), truth, 8), requests[:1], [8])[0] != alone[0]


def test_a_carried_error_is_the_factor_of_the_first_prediction():
    truth = np.array([100, 100])
    requests = [Request(0, 0.0, 4, prediction=point(200.0)), Request(1, 0.0, 4, prediction=point(25.0))]
    refiner = RefineOracle(carried=True).refiner(np.arange(2), truth, 0)
    assert means(refiner, requests, [40, 40]) == [40 + 60 * 2.0, 40 + 60 * 0.25]
    for request in requests:
        request.prediction = point(160.0)  # what was told now is no first prediction
    assert means(refiner, requests, [90, 99]) == [90 + 10 * 2.0, 99 + 1.0]  # never less than a token
    both = RefineOracle(mae=9.0, carried=True).refiner(np.arange(2), truth, 0)
    assert means(both, requests, [40, 40]) != means(refiner, requests, [40, 40])


def test_exact_refinement_mends_a_bad_first_prediction():
    """In simulation: the same seed, the same first errors; what is refined to the truth comes nearer to the oracle."""
    asked = {"workload": "synthetic", "load": 0.95, "num_requests": 400, "max_num_seqs": 16, "seed": 1}
    mean = {}
    for name, options in {
        "first": {"predictor": NoisyOracle(mae=400.0)},
        "refined": {"predictor": NoisyOracle(mae=400.0), "refine": RefineOracle(every=4)},
        "oracle": {"predictor": "oracle"},
    }.items():
        run = simulate("srpt", **options, **asked)
        mean[name] = float((run.requests["finish"] - run.requests["arrival"]).mean())
        refined = any("predicted anew" in mark for mark in run.summary["provenance"]["marks"])
        assert refined == (name == "refined")
    assert mean["oracle"] < mean["refined"] < mean["first"]


def test_a_server_that_is_only_asked_takes_no_refined_predictions():
    with pytest.raises(ValueError, match="refine=oracle: predictions are made anew between steps"):
        run_cell({**compose(refine="oracle"), "executor": Silent()}, None)


class Silent:
    """A server that would be asked."""

    default_hardware, schedules = None, True

    def check(self, cfg): ...
    def rows_key(self): ...
    def rows(self, dataset): ...
    def saturation(self, cfg, dataset): ...
    def run(self, cfg, asked): ...


@pytest.mark.parametrize("bad", [{"mae": -1.0}, {"every": 0}, {"mae": float("nan")}])
def test_a_refining_oracle_says_what_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        RefineOracle(**bad)
