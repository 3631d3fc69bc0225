"""Admission: any policy with any rule, nobody blocked for ever, and each rule's own inequality at every plan."""

from __future__ import annotations

from functools import partial
from importlib.resources import files

import numpy as np
import pytest
from harness import Ask, Case, play
from hydra.utils import instantiate
from omegaconf import OmegaConf

import lengthwise
from lengthwise.experiments.nodes import load_stage
from lengthwise.experiments.simulate import compose
from lengthwise.sched import LengthDistribution, Request, Scheduler
from lengthwise.sched.admission import Admission, FuturePeak, History, MaxTokens, Predicted, Quantile
from lengthwise.sched.contract import check_policy, hostile, rehearse
from lengthwise.sched.outlook import Outlook
from lengthwise.sched.policies import FCFS, SJF, SRPT

point = LengthDistribution.point
NODES = sorted(p.name for p in (files("lengthwise.conf") / "admission").iterdir() if p.name.endswith(".yaml"))


def rule(name: str) -> Admission | None:
    node = OmegaConf.create((files("lengthwise.conf") / "admission" / name).read_text())
    return instantiate(node) if node._target_ else None


def under(make, **parts):
    """A Scheduler with the rule that `make()` builds, a new one each time."""
    return lambda *a, **k: Scheduler(*a, admission=make(), **parts, **k)


def test_there_are_nodes():
    assert [name.removesuffix(".yaml") for name in NODES] == [
        "future_peak", "future_peak_asked", "max_tokens", "none", "past_future", "quantile",
    ]  # fmt: skip
    assert rule("none.yaml") is None


@pytest.mark.parametrize("policy", [FCFS, SRPT], ids=["fcfs", "srpt"])
@pytest.mark.parametrize("name", [name for name in NODES if name != "none.yaml"])
def test_any_policy_keeps_the_contract_with_it(name, policy):
    check_policy(policy, num_cases=5, scheduler=under(lambda: rule(name)))


def test_none_is_the_default_and_changes_nothing():
    for i in range(4):
        case = hostile(np.random.default_rng(i))
        assert rehearse(SRPT(), case)[0] == rehearse(SRPT(), case, scheduler=under(lambda: None))[0]


# --- each rule's inequality, counted by hand at every plan ----------------------------------------------------------------


def batch(scheduler):
    return [*scheduler.running.members, *scheduler.prefilling]


def rows(scheduler, total):
    """(left, held) of everybody in the batch."""
    out = []
    for r in batch(scheduler):
        g = scheduler.generated(r)
        out.append((max(min(total(r), r.max_new_tokens) - g, 1.0), r.prompt_len + g))
    return sorted(out, reverse=True)


def peak_by_steps(rows):
    """The greatest sum over every future step, one step at a time: who has ended holds nothing."""
    last = int(max((left for left, _ in rows), default=0))
    return max((sum(held + t for left, held in rows if left >= t) for t in range(1, last + 1)), default=0)


def crowd(num=60, seed=0, factor=1.0, gap=0.02):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(num):
        n = int(rng.integers(1, 60))
        guess = point(float(max(round(n * factor), 1)))
        out.append(Ask(gap * i, int(rng.integers(1, 40)), n, 64, guess))
    return Case(tuple(out), pool=300, block_size=1, max_num_seqs=64, cost="even")


def test_max_tokens_never_promises_more_than_the_pool_and_nobody_is_preempted():
    seen = []

    def watch(scheduler, plan, outcome):
        if scheduler.num_running > 1:
            seen.append(sum(r.prompt_len + r.max_new_tokens for r in batch(scheduler)))

    result = play(crowd(), watch=watch, scheduler=partial(Scheduler, admission=MaxTokens()))
    assert max(seen) <= 300 and max(seen) > 200
    assert result.scheduler.num_preemptions == 0 and not np.isnan(result.finish).any()
    assert play(crowd()).scheduler.num_preemptions > 0  # without it the same run does preempt


def test_a_quantile_reserves_less_and_the_rest_is_preempted():
    """Predictions half of the truth are outlived: what was reserved for them was too little."""
    low = play(crowd(factor=0.3), scheduler=partial(Scheduler, admission=Quantile(0.9)))
    right = play(crowd(), scheduler=partial(Scheduler, admission=Quantile(0.9)))
    most = play(crowd(), scheduler=partial(Scheduler, admission=MaxTokens()))
    assert right.scheduler.num_preemptions == 0 < low.scheduler.num_preemptions
    assert max(right.finish) < max(most.finish)  # 64 tokens each is more than anybody has
    wide = LengthDistribution.from_quantiles([0.1, 0.5, 0.9], [10.0, 20.0, 40.0])
    req = Request(0, 0.0, 5, 64, prediction=wide)
    assert Quantile(0.9).total(req, 0) == pytest.approx(40.0, rel=0.1) and Quantile(0.5).total(req, 0) < 25


def test_future_peak_stays_below_the_pool_and_admits_more_than_reservations():
    seen = []

    def watch(scheduler, plan, outcome):
        if scheduler.num_running > 1:
            seen.append(peak_by_steps(rows(scheduler, lambda r: r.prediction.mean())))

    case = crowd()
    peak = play(case, watch=watch, scheduler=partial(Scheduler, admission=FuturePeak()))
    assert 290 <= max(seen) < 300  # strictly below, and near it
    assert peak.scheduler.num_preemptions == 0
    summed = play(case, scheduler=partial(Scheduler, admission=Quantile()))
    assert sum(peak.finish) < sum(summed.finish)  # who ends soon makes room for who comes late


@pytest.mark.parametrize("seed", range(3))
def test_the_outlook_is_the_future_step_by_step(seed):
    """Against a count of every future step, in mid-run, with somebody to come and somebody to go; asked at every step, or so
    seldom that requests have left and come back in between."""
    rng = np.random.default_rng(seed)
    checked = [0]

    def watch(scheduler, plan, outcome):
        if seed and kept and rng.random() < 0.9:
            return
        outlook = kept.setdefault(0, scheduler.outlook(lambda r, g: r.prediction.mean()))
        waiting = [r for r in scheduler.waiting if r.prediction is not None]
        here = batch(scheduler)
        incoming = waiting[int(rng.integers(len(waiting)))] if waiting else None
        without = [here[int(rng.integers(len(here)))]] if here and rng.random() < 0.5 else []
        counted = [r for r in here if r not in without] + ([incoming] if incoming else [])
        triples = []
        for r in counted:
            g = scheduler.generated(r)
            triples.append((max(min(np.ceil(r.prediction.mean()), r.max_new_tokens) - g, 1), r.prompt_len + g))
        assert outlook.peak(incoming, without) == peak_by_steps(triples)
        assert outlook.at_ends(incoming, without) == sum(left + held for left, held in triples)
        checked[0] += 1

    kept: dict = {}
    asks = tuple(Ask(**{**vars(a), "abort_after": 0.4 if i % 7 == 3 else None}) for i, a in enumerate(crowd(40, seed).asks))
    case = Case(asks, "srpt", pool=200, block_size=1, max_num_seqs=6, cost="even", keeps_kv=bool(seed % 2))
    play(case, watch=watch)
    assert checked[0] > (5 if seed else 50)


class Looking(Outlook):
    """Goes through everybody each time, as if it were told of nobody."""

    def _keep_up(self):
        members = self._ledger.running.members
        for req in [r for r in self._rows if r not in members]:
            self._drop(req)
        for req in members:
            if req not in self._rows:
                self._add(req)
            elif self._rows[req][1:] != (req._decode_from, req.prediction):
                self._put(self._rows[req][0], req)


@pytest.mark.parametrize("refine_every", [0, 3])
def test_an_outlook_that_hears_who_changed_is_one_that_looks_at_all(refine_every):
    """Row by row, in the same order, so that sums round alike; asked now and then."""
    changed = 0
    for seed in range(20):
        rng, both = np.random.default_rng(seed), []

        def watch(scheduler, plan, outcome, rng=rng, both=both):
            if not both:
                both += [kind(scheduler, lambda r, g: r.prediction.mean()) for kind in (Outlook, Looking)]
            if rng.random() < 0.4:
                heard, looked = both
                assert heard.at_ends() == looked.at_ends() and heard._requests == looked._requests
                np.testing.assert_array_equal(heard._ends[: len(heard._requests)], looked._ends[: len(heard._requests)])

        changed += rehearse(SRPT(), hostile(rng, 40), watch=watch, refine_every=refine_every)[1].num_preemptions
    assert changed > 20


def test_blocks_are_counted_as_if_the_last_one_were_empty():
    """In blocks of 16 what is below the pool in tokens may not fit in blocks; with oracles nobody is preempted all the same."""
    for seed in range(4):
        case = Case(**{**vars(crowd(seed=seed)), "block_size": 16, "pool": 480})
        result = play(case, scheduler=partial(Scheduler, admission=FuturePeak()))
        assert result.scheduler.num_preemptions == 0


# --- nobody waits for ever ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NODES if name != "none.yaml"])
def test_who_is_never_promised_enough_runs_alone(name):
    """100 tokens of prompt and 200 to come fill the pool of 299 to the last: no strict inequality ever holds for it."""
    big = Ask(0.0, 100, 150, 200, point(200.0))
    small = tuple(Ask(0.001 * i, 4, 20, 20, point(20.0)) for i in range(1, 9))
    case = Case((*small[:4], big, *small[4:]), pool=299, block_size=1, cost="even")
    result = play(case, scheduler=partial(Scheduler, admission=rule(name)), max_steps=5000)
    assert not np.isnan(result.finish).any()


def test_somebody_behind_is_not_let_past_who_is_refused():
    """A refusal blocks the queue, as KV that does not fit does; with backfill it is passed over."""
    runs, big, small = Ask(0.0, 10, 60, 60, point(60.0)), Ask(0.01, 10, 90, 90, point(90.0)), Ask(0.02, 10, 5, 5, point(5.0))
    case = Case((runs, big, small), pool=150, block_size=1, cost="even")
    strict = play(case, scheduler=partial(Scheduler, admission=MaxTokens()))
    assert strict.requests[2]._first_scheduled >= strict.requests[1]._first_scheduled >= strict.finish[0]

    class Skipping(FCFS):
        backfill = 1

    passed = play(case, policy=Skipping(), scheduler=partial(Scheduler, admission=MaxTokens()))
    assert passed.requests[2]._first_scheduled < passed.finish[0] <= passed.requests[1]._first_scheduled


# --- history --------------------------------------------------------------------------------------------------------------


def test_history_draws_from_what_is_longer_than_this_one_by_now():
    history = History(window=5, seed=1)
    reqs = [Request(i, 0.0, 4, 500) for i in range(400)]
    assert history.total(reqs[0], 0) == 500  # nothing seen
    for n in (7, 10, 20, 30, 40, 50):  # 7 falls out of the window
        history.on_finish(Request(999, 0.0, 4), n)
    drawn = [history.total(r, 0) for r in reqs]
    assert set(drawn) == {10, 20, 30, 40, 50} and np.mean(drawn) == pytest.approx(30, abs=3)
    assert drawn == [history.total(r, 0) for r in reqs]  # no second throw
    assert {history.total(r, 25) for r in reqs} == {30, 40, 50}
    assert history.total(reqs[0], 50) == 500
    assert [History(5, 1).total(r, 0) for r in reqs] == [500] * 400


def test_history_learns_to_admit_more():
    """max_new_tokens is 64 and answers have 5: at first one at a time, later many."""
    asks = tuple(Ask(0.0, 10, 5, 64) for _ in range(60))
    most: list[int] = []
    case = Case(asks, pool=160, block_size=1, cost="even")
    result = play(
        case, scheduler=partial(Scheduler, admission=FuturePeak(History())), watch=lambda s, p, o: most.append(s.num_running)
    )
    assert max(most[:3]) <= 2 and max(most) >= 8
    assert not np.isnan(result.finish).any()


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_with_the_value():
    for make in (lambda: Quantile(1.0), lambda: Predicted(0.0), lambda: History(0)):
        with pytest.raises(ValueError, match=r"1\.0|0\.0|window=0"):
            make()


def test_what_a_predictor_cannot_give_is_refused():
    parts = {"workload": "synthetic", "num_requests": 20, "rate": 5.0}
    with pytest.raises(ValueError, match="needs a distribution"):
        lengthwise.simulate(policy="fcfs", predictor="none", admission="quantile", **parts)
    run = lengthwise.simulate(policy="fcfs", predictor="oracle", admission="quantile", **parts)
    assert run.summary["cell"]["admission"] == "quantile" and run.metrics["num_finished"] == 20
    plain = lengthwise.simulate(policy="fcfs", predictor="none", **parts)
    assert "admission" not in plain.summary["cell"] and "victim" not in plain.summary["cell"]
    assert lengthwise.simulate(policy="fcfs", predictor="none", admission="past_future", **parts).metrics["num_finished"] == 20


def test_the_rule_waits_for_predictions_that_it_needs():
    """FCFS needs none; with the rule its requests wait for theirs, as an SJF's do."""
    late = Ask(0.0, 10, 5, 20, point(5.0), ready_delay=1.0)
    assert play(Case((late,)), scheduler=partial(Scheduler, admission=FuturePeak())).requests[0]._first_scheduled >= 1.0
    assert play(Case((late,)), scheduler=partial(Scheduler, admission=MaxTokens())).requests[0]._first_scheduled == 0.0
    assert play(Case((late,)), policy=SJF()).requests[0]._first_scheduled >= 1.0


@pytest.mark.parametrize("part", [{"admission": "max_tokens"}, {"victim": "least_computed"}], ids=["admission", "victim"])
def test_a_server_is_not_asked_for_what_it_does_not_know(part):
    """What would be left out without a word is refused; our own server knows both."""
    executor = {"_target_": "lengthwise.experiments.remote_stage.RemoteStage", "target": "http://127.0.0.1:1"}
    (group,) = part
    cfg = compose(executor=executor, predictor="none", model="tiny", rate=1.0, **part)
    with pytest.raises(ValueError, match=group):
        load_stage(cfg).check(cfg)
    cfg = compose(executor="served", predictor="none", model="tiny", rate=1.0, **part)
    stage = load_stage(cfg)
    stage.check(cfg)
    assert stage.serving(cfg, 3)[group] == cfg[group] and stage.serving(cfg, 3)["choices"][group] == part[group]
