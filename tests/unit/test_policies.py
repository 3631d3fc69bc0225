"""Policies: every node of conf/policy keeps the contract, and what each policy says it does, it does."""

from __future__ import annotations

import math
from importlib.resources import files

import pytest
from harness import Ask, Case, play
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.sched import FOREVER, LengthDistribution, Policy, Request
from lengthwise.sched.contract import check_policy
from lengthwise.sched.policies import FCFS, PSJF, SJF, SRPT, Aging, Priority

NODES = sorted(p.name for p in (files("lengthwise.conf") / "policy").iterdir() if p.name.endswith(".yaml"))
point = LengthDistribution.point


def node(name: str) -> Policy:
    return instantiate(OmegaConf.create((files("lengthwise.conf") / "policy" / name).read_text()))


class Look:
    """A View of given progress."""

    now, step_time, num_waiting, num_running, free_tokens, step = 0.0, 0.0, 0, 0, 0, 0

    def __init__(self, generated: int = 0) -> None:
        self._generated = generated

    def generated(self, req: Request) -> int:
        return self._generated


def test_there_are_nodes():
    assert {"fcfs.yaml", "sjf.yaml", "psjf.yaml", "srpt.yaml", "priority.yaml", "aging_srpt.yaml", "aging_sjf.yaml"} <= set(
        NODES
    )


@pytest.mark.parametrize("name", NODES)
def test_every_node_keeps_the_contract(name):
    counts_prompts = name.startswith("lengthwise")  # equal answers are no equal jobs to it
    check_policy(lambda: node(name), num_cases=8, constant_is_fcfs=False if counts_prompts else None)


# --- policies of a plug-in's author that use what no policy here uses -----------------------------------------------------


class LeastAttained(Policy):
    """Foreground-background: a key that grows while it runs."""

    preemptive = True
    drift = 1.0

    def key(self, req, view):
        return float(view.generated(req))


class Epochs(PSJF):
    """What counts changes every 16 decode steps, for all at once; `stable` says when."""

    def key_epoch(self, view):
        return view.step // 16

    def key(self, req, view):
        return super().key(req, view) * (1 + (req.rid * 7 + view.step // 16) % 5)

    def stable(self, view):
        return 16 - view.step % 16, math.inf


class Hours(PSJF):
    """What counts changes at given times."""

    def key_epoch(self, view):
        return view.now // 0.125

    def key(self, req, view):
        return super().key(req, view) * (1 + (req.rid * 7 + int(view.now // 0.125)) % 5)

    def stable(self, view):
        return FOREVER, 0.125 * (view.now // 0.125 + 1)


class Limited(SRPT):
    """Not preempted any more once half of the prediction has run (TRAIL, ICLR 2025)."""

    def may_preempt(self, incoming, victim, view):
        young = view.generated(victim) < 0.5 * victim.prediction.mean()
        return young and super().may_preempt(incoming, victim, view)

    def victim(self, running, view):
        running = list(running)
        young = [r for r in running if view.generated(r) < 0.5 * r.prediction.mean()]
        return super().victim(young or running, view)


class Pairs(SJF):
    """Keys that are tuples: class first, then length."""

    preemptive = True

    def key(self, req, view):
        return (req.priority, req.prediction.score)


class Skipping(SRPT):
    backfill = 2


class Thrifty(FCFS):
    """Admits only below a predicted memory peak."""

    needs = frozenset({"prediction", "future_peak"})

    def admit(self, req, view):
        return view.num_running == 0 or view.future_peak() < 150

    def stable(self, view):
        return 1, math.inf


class ByHand(PSJF):
    """An order written out."""

    def order(self, waiting, view):
        return iter(sorted(waiting, key=lambda r: (r.prediction.score, r.arrival, r.rid)))


@pytest.mark.parametrize(
    "make", [LeastAttained, Epochs, Hours, Limited, Pairs, Skipping, Thrifty, ByHand], ids=lambda make: make.__name__
)
def test_a_plug_in_keeps_the_contract(make):
    check_policy(make, num_cases=40, constant_is_fcfs=False)


# --- the contract itself finds those who break it ---------------------------------------------------------------------


class Coin(FCFS):
    """Remembers calls: not deterministic in its key."""

    def __init__(self):
        self.calls = 0

    def key(self, req, view):
        self.calls += 1
        return float(self.calls % 7)


class Drowsy(PSJF):
    """Lets go of the running request at every 10th token, but says that nothing changes."""

    def key(self, req, view):
        return super().key(req, view) + 100.0 * (view.generated(req) // 10)

    def victim(self, running, view):
        return super().victim(running, view)


class Cheat(SJF):
    """Learns from the past, which is allowed: not anticipating, but its stored keys move."""

    def __init__(self):
        self.bonus = 0.0

    def key(self, req, view):
        return super().key(req, view) * (1.0 if req.rid % 2 else self.bonus)

    def on_finish(self, req):
        self.bonus += 1.0


class Greedy(FCFS):
    """Claims to be calm and takes slots all the same: anybody may preempt anybody."""

    preemptive = True

    def key(self, req, view):
        return -req.arrival

    def may_preempt(self, incoming, victim, view):
        return incoming.rid != victim.rid and (incoming.rid + victim.rid) % 3 == 0


class Backwards(SJF):
    """Constant predictions order nobody, and yet it is not FCFS: last come first served."""

    def key(self, req, view):
        return -req.arrival


class Boaster(Aging):
    """Declares a tighter bound than it keeps."""

    def overtaking_horizon(self, req, view):
        return req.arrival


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (Coin, "keys"),
        (Drowsy, "fast-forward == single step"),
        (Cheat, "keys"),
        (Greedy, "may preempt each other"),
        (Backwards, "constant prediction == FCFS"),
        (lambda: Boaster(SRPT(), 40.0), "overtaking bound"),
    ],
    ids=["coin", "drowsy", "cheat", "greedy", "backwards", "boaster"],
)
def test_the_contract_names_the_broken_law(make, law):
    with pytest.raises(AssertionError, match=law):
        check_policy(make, num_cases=24)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_say_what_the_docstrings_say():
    req = Request(0, 3.0, 10, prediction=point(10.0), priority=-2.0)
    assert FCFS().key(req, Look()) == 3.0
    assert Priority().key(req, Look()) == -2.0
    assert SJF().key(req, Look(4)) == PSJF().key(req, Look(4)) == 10.0
    assert SRPT().key(req, Look(4)) == 6.0
    assert Aging(SRPT(), 2.0).key(req, Look(4)) == 6.0 + 2.0 * 3.0
    assert not FCFS.preemptive and not SJF.preemptive and PSJF.preemptive and SRPT.preemptive
    assert Priority().preemptive and not Priority(preemptive=False).preemptive


def test_srpt_clips_an_overrun_at_one_token_and_stands_still():
    req, srpt = Request(0, 0.0, 10, prediction=point(10.0)), SRPT()
    assert [srpt.key(req, Look(g)) for g in (0, 8, 9, 10, 5000)] == [10.0, 2.0, 1.0, 1.0, 1.0]
    assert srpt.rekey_at(req, 0) == 9 and srpt.rekey_at(req, 9) == math.inf
    assert srpt.drifts(req, 8) and not srpt.drifts(req, 9)


def test_srpt_reestimates_by_doubling_a_point():
    req, srpt = Request(0, 0.0, 10, prediction=point(10.0)), SRPT("reestimate")
    assert srpt.key(req, Look(9)) == 1.0
    assert srpt.rekey_at(req, 10) == 20 and srpt.key(req, Look(10)) == 10.0
    assert srpt.rekey_at(req, 20) == 40 and srpt.key(req, Look(20)) == 20.0
    srpt.on_finish(req)
    assert srpt.key(req, Look(0)) == 10.0


@pytest.mark.parametrize("policy", [SJF, PSJF, SRPT, lambda: Aging(SRPT(), 1.0)])
def test_a_missing_prediction_is_named(policy):
    with pytest.raises(ValueError, match="request 7 has no prediction"):
        policy().key(Request(7, 0.0, 10), Look())


def test_wrong_arguments_are_refused_with_the_value():
    with pytest.raises(ValueError, match="truncate"):
        SRPT("truncate")  # type: ignore[arg-type]
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="alpha="):
            Aging(SRPT(), alpha)


@pytest.mark.parametrize("policy", [FCFS, SJF, PSJF, SRPT, Priority])
def test_static_keys_say_so(policy):
    assert policy().stable(Look()) == (FOREVER, math.inf)


# --- aging ------------------------------------------------------------------------------------------------------------


def test_aging_bound_holds_for_keys_below_one_token():
    """A prediction of 0 tokens is legal, and so is a rank-only score of -50; the bound must know the least key there is."""
    asks = (
        Ask(0.0, 4, 30, prediction=point(1.0)),
        Ask(0.01, 4, 30, prediction=point(1.5)),
        Ask(0.026, 4, 30, prediction=point(0.0)),
    )
    # alpha 40: request 1 may be passed by who arrives before 0.01 + (1.5 - 1) / 40 = 0.0225. Request 2 comes after that.
    order = play(Case(asks, policy="aging_sjf", max_num_seqs=1, cost="tick"))
    assert order.finish[1] < order.finish[2]


def test_aging_bound_holds_for_ranks():
    """Scores without lengths are no tokens: aging over them is refused, or keeps its bound all the same."""
    rank = LengthDistribution.rank_only
    asks = (
        Ask(0.0, 4, 30, prediction=rank(5.0)),
        Ask(0.01, 4, 30, prediction=rank(5.0)),
        Ask(0.3, 4, 30, prediction=rank(-50.0)),  # the bound of request 1 is 0.01 + (5 - 1) / 40 = 0.11
    )
    try:
        result = play(Case(asks, policy="aging_sjf", max_num_seqs=1, cost="even"))
    except ValueError as error:
        assert "rank" in str(error) or "tokens" in str(error)
    else:
        assert result.finish[1] < result.finish[2]


def test_aging_does_not_lose_what_the_inner_policy_overrides():
    """key_epoch, may_preempt and victim of the wrapped policy count; else the wrapper has to refuse it."""

    class Shifting(SJF):
        preemptive = True

        def key_epoch(self, view):
            return view.num_waiting // 2

        def may_preempt(self, incoming, victim, view):
            return False

        def victim(self, running, view):
            return next(iter(running), None)

    try:
        aging = Aging(Shifting(), 1.0)
    except ValueError:
        return
    one, two = Request(0, 0.0, 4, prediction=point(5.0)), Request(1, 0.0, 4, prediction=point(50.0))
    view = Look()
    view.num_waiting = 4
    assert aging.key_epoch(view) == 2
    assert not aging.may_preempt(one, two, view)
    assert aging.victim([one, two], view) is one


def test_aging_refuses_keys_that_may_rise():
    """The declared bound is frozen at eligibility; a key that grows later would let later arrivals past it."""
    with pytest.raises(ValueError, match="may rise later"):
        Aging(SRPT("reestimate"), 40.0)


def test_aging_refuses_a_key_that_rises_while_a_request_runs():
    """Least attained service under Aging: who has run is passed by who came after the bound of its first key."""
    try:
        aging = Aging(LeastAttained(), 40.0)
    except ValueError:
        return
    asks = (Ask(0.0, 4, 200, prediction=point(1.0)), Ask(1.0, 4, 10, prediction=point(1.0)))
    result = play(Case(asks, max_num_seqs=1, cost="tick"), policy=aging)
    assert result.finish[0] < result.finish[1]
