"""This project's own policy: SRPT where computing is free and memory ample, else by what is still to be paid and held."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.sched import LengthDistribution, Phase, Request
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import check_policy, hostile, rehearse
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import SRPT, Lengthwise, WorkGuard
from lengthwise.sched.prediction import EDGES

POINT = LengthDistribution.point


class Look:
    """A View of an engine with 8 rows, on which everybody has `generated` tokens and the KV of `computed`."""

    max_num_seqs = 8

    def __init__(self, generated: int = 0, computed: int = 0) -> None:
        self._generated, self._computed = generated, computed

    def generated(self, req: Request) -> int:
        return self._generated

    def computed(self, req: Request) -> int:
        return self._computed


@pytest.mark.parametrize("seed", range(6))
def test_where_computing_is_free_and_memory_ample_it_is_srpt(seed):
    case = hostile(np.random.default_rng([11, seed]), ample=True)
    assert rehearse(Lengthwise(math.inf), case)[0] == rehearse(SRPT(), case)[0]


def test_a_token_to_compute_costs_its_share_of_a_step_of_all_slots():
    policy, req = Lengthwise(ridge=16.0), Request(0, 0.0, 100, prediction=POINT(200.0))
    req._phase = Phase.WAITING
    assert policy.key(req, Look()) == 200.0 + 100 * 8 / 16
    assert policy.key(req, Look(64)) == 136.0 + 164 * 8 / 16  # its KV is lost: prompt and answer are computed anew
    req._phase = Phase.PAUSED
    assert policy.key(req, Look(64, 163)) == 136.0 + 1 * 8 / 16  # its KV is kept
    for phase in (Phase.PREFILLING, Phase.DECODING):
        req._phase = phase
        assert policy.key(req, Look(64)) == 136.0


def test_a_switch_is_made_only_where_it_pays():
    """With much left to do, a shorter newcomer takes the slot; near the end, what the victim's KV cost holds it."""
    policy = Lengthwise(ridge=16.0)
    victim, newcomer = Request(0, 0.0, 100, prediction=POINT(200.0)), Request(1, 1.0, 100, prediction=POINT(60.0))
    victim._phase, newcomer._phase = Phase.DECODING, Phase.WAITING

    class Both(Look):
        def generated(self, req: Request) -> int:
            return self._generated if req is victim else 0

    assert policy.may_preempt(newcomer, victim, Both(20)) and not policy.may_preempt(newcomer, victim, Both(90))
    assert SRPT().may_preempt(newcomer, victim, Both(90))


def test_whoever_enters_stays_where_predictions_are_right():
    lost, eager, others = 0, 0, 0
    for seed in range(12):
        case = hostile(np.random.default_rng([12, seed]))
        exact = [POINT(float(min(n, 60))) for n in case.output_len]
        case = replace(
            case, max_num_seqs=24, prediction=exact, token_budget=1024, batching=Chunked, kv=lambda: Paged(160, 4, 0.0)
        )
        lost += rehearse(Lengthwise(16.0), case)[1].num_preemptions
        eager += rehearse(Lengthwise(16.0, ahead=False), case)[1].num_preemptions
        others += rehearse(SRPT(), case)[1].num_preemptions
    assert lost == 0 and eager > 5 and others > 10


@pytest.mark.parametrize("ridge", [8.0, math.inf])
@pytest.mark.parametrize("guarded", [False, True])
def test_it_keeps_the_contract(ridge, guarded):
    def make():
        return WorkGuard(Lengthwise(ridge, 0.8), 1.0, 20.0, 4) if guarded else Lengthwise(ridge)

    check_policy(make, num_cases=4, constant_is_fcfs=False)


def test_fast_forward_stops_only_while_somebody_is_refused():
    case = hostile(np.random.default_rng(3), ample=True)
    policy = Lengthwise()
    rehearse(policy, case)
    assert not policy._refused and policy.stable(Look())[0] > 1
    spread = LengthDistribution.from_survival(np.exp(-EDGES / 100.0))
    req = Request(0, 0.0, 10, prediction=spread)
    assert Lengthwise(quantile=0.9).total(req, 0) == spread.quantile(0.9) > Lengthwise().total(req, 0) == spread.mean()


def test_it_says_what_is_wrong():
    for wrong in ({"ridge": 0.0}, {"quantile": 1.0}):
        with pytest.raises(ValueError, match=str(*wrong)):
            Lengthwise(**wrong)


def test_nothing_is_kept_of_those_who_run_one_after_the_other():
    """Nobody is asked about while a request runs alone: what the outlook was told meanwhile must not pile up."""
    case = hostile(np.random.default_rng(0), 60, ample=True)
    first = [0.0, 0.001, 0.002]  # here some run together, so that there is an outlook
    case = replace(case, arrival=[*first, *(1000.0 * (1 + np.arange(57))).tolist()], delay=[0.0] * 60)
    policy = Lengthwise()
    rehearse(policy, case)
    assert policy._outlook is not None and len(policy._outlook._told) <= 3
