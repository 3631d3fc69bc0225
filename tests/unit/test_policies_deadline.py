"""Deadline policies: their keys by hand, their structures against time, and the optimality that the textbook gives them."""

from __future__ import annotations

import numpy as np
import pytest
from harness import INF

import lengthwise
from lengthwise.experiments.simulate import compose
from lengthwise.sched import FOREVER, SLO, Event, EventKind, LengthDistribution, Preemption, Request, Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.contract import check_policy
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import EDF, FCFS, LLF, Andes, JITServe, Scorpio
from lengthwise.sched.policies.objectives import Objectives
from lengthwise.sched.policies.pace import Pace
from lengthwise.sched.rehearsal import JumpingClock, Log, PlainExecutor, Script

point = LengthDistribution.point


class Look:
    """A View of given progress and time."""

    def __init__(self, generated=0, now=0.0, step=0, num_waiting=0, step_time=0.0):
        self._generated, self.now, self.step, self.num_waiting, self.step_time = generated, now, step, num_waiting, step_time
        self.num_running, self.free_tokens, self.pool_tokens = 0, 100, 1000

    def generated(self, req):
        return self._generated


def one_slot(policy, jobs, **how):
    """Jobs (arrival, tokens, deadline after arrival or None) through one slot of 1 s a step, KV kept: finish times (s)."""
    clock, events = JumpingClock(), []
    for rid, (arrival, n, e2e) in enumerate(jobs):
        req = Request(rid, float(arrival), 1, 4096, prediction=point(float(n)), slo=SLO(e2e=e2e))
        events.append(Event(req.arrival, EventKind.ARRIVAL, req))
    kv = Paged(1 << 20, 1, 0.0)
    engine = Scheduler(policy, Chunked(), kv, Preemption(True), max_num_seqs=1, token_budget=64, check=True)
    log = Log(max_steps=100_000)
    serve(Script(events), engine, PlainExecutor(clock, lambda *_: 1.0, [n for _, n, _ in jobs], **how), clock, log)
    return [log.ended_at[i][2] for i in range(len(jobs))], engine


def feasible(jobs):
    """Whether one preemptive server can meet all: no interval asks for more work than it is long."""
    starts, ends = {a for a, _, _ in jobs}, {a + d for a, _, d in jobs}
    return all(sum(n for a, n, d in jobs if a >= s and a + d <= e) <= e - s for s in starts for e in ends if e > s)


def drawn(seed, num=6):
    rng = np.random.default_rng(seed)
    arrival, size = rng.integers(0, 12, num), rng.integers(1, 7, num)
    return [(int(a), int(n), float(n + rng.integers(0, 3 * num))) for a, n in zip(np.sort(arrival), size, strict=True)]


@pytest.mark.parametrize("make", [EDF, lambda: LLF(step_time=1.0)], ids=["edf", "llf"])
def test_whatever_can_be_met_is_met(make):
    """Preemptive EDF and LLF miss a deadline only where every schedule does (Liu and Layland 1973; Dertouzos and Mok 1989)."""
    met, missed_by_fcfs = 0, 0
    for seed in range(160):
        jobs = drawn(seed)
        if not feasible(jobs):
            continue
        finish, _ = one_slot(make(), jobs)
        late = [f - a - d for f, (a, _, d) in zip(finish, jobs, strict=True)]
        assert max(late) <= 1e-9, (seed, jobs, finish)
        met += 1
        missed_by_fcfs += max(f - a - d for f, (a, _, d) in zip(one_slot(FCFS(), jobs)[0], jobs, strict=True)) > 0
    assert met > 20 and missed_by_fcfs > 3


def test_edf_knows_two_deadlines():
    req, edf = Request(0, 3.0, 10), EDF(ttft=2.0, e2e=30.0)
    assert edf.key(req, Look(0)) == 5.0 and edf.key(req, Look(1)) == 33.0
    req.slo = SLO(ttft=0.5)
    assert edf.key(req, Look(0)) == 3.5 and edf.key(req, Look(7)) == 33.0
    req.slo = SLO(ttft=9.0, e2e=4.0)
    assert edf.key(req, Look(0)) == edf.key(req, Look(1)) == 7.0  # the end comes first
    assert EDF().key(req, Look(1)) == 7.0 and EDF().key(Request(1, 0.0, 1), Look()) == INF
    assert edf.stable(Look(num_waiting=9)) == (FOREVER, INF) and EDF.preemptive


def test_objectives_are_a_requests_own_first():
    asked = Objectives(2.0, 0.1, None)
    assert asked.end(Request(0, 0.0, 1), 50.0) == pytest.approx(7.0)
    own = Request(0, 0.0, 1, slo=SLO(tpot=0.2))
    assert asked.end(own, 50.0) == pytest.approx(12.0) and asked.ttft(own) == 2.0
    assert asked.end(Request(0, 0.0, 1, slo=SLO(e2e=4.0)), 50.0) == 4.0
    assert Objectives(2.0, None, None).end(own, 0.0) == pytest.approx(2.2)
    assert Objectives(None, None, None).end(Request(0, 0.0, 1), 0.0) == INF  # and no NaN
    for wrong in ((0.0, None, None), (None, -1.0, None), (None, None, 0.0)):
        with pytest.raises(ValueError, match="must be > 0"):
            Objectives(*wrong)


# --- least laxity ---------------------------------------------------------------------------------------------------------


def test_llf_is_laxity_less_the_time():
    """deadline - now - remaining x step time orders as the key does, at any time."""
    rng = np.random.default_rng(0)
    llf = LLF(e2e=10.0, step_time=0.5)
    reqs = [Request(i, float(a), 1, prediction=point(float(n))) for i, (a, n) in enumerate(rng.integers(1, 30, (20, 2)))]
    for now in (30.0, 77.0):
        laxity = [r.arrival + 10.0 - now - r.prediction.mean() * 0.5 for r in reqs]
        assert np.allclose([llf.key(r, Look(now=now)) - now for r in reqs], laxity)
    one = reqs[0]
    one.prediction = point(10.0)
    assert [llf.key(one, Look(g)) - llf.key(one, Look(0)) for g in (1, 9, 10, 50)] == [0.5, 4.5, 4.5, 4.5]
    assert llf.rekey_at(one, 0) == 9 and llf.rekey_at(one, 9) == INF and llf.drifts(one, 8) and not llf.drifts(one, 9)
    assert llf.drift == 0.5 and llf.stable(Look(num_waiting=1))[0] == 1 and llf.stable(Look())[0] == FOREVER


def test_llf_thrashes_and_a_margin_ends_it():
    """Two equals swap places at every other step under the textbook's rule; with a margin they do so at its pace."""
    jobs = [(0, 40, 100.0), (0, 40, 100.0)]
    _, pure = one_slot(LLF(step_time=1.0), jobs)
    _, calm = one_slot(LLF(step_time=1.0, margin=10.0), jobs)
    assert pure.num_preemptions > 35 and calm.num_preemptions <= 8
    assert pure.num_thrashed == 2


def test_the_pace_moves_in_steps_and_only_when_looked_at():
    pace = Pace(0.1, weight=1.0, ratio=1.5)
    assert pace.epoch(Look(step_time=9.0)) == 0 and pace.seconds == 0.1  # nobody has ended
    pace.look()
    assert pace.epoch(Look(step_time=0.14)) == 0 and pace.seconds == 0.1
    pace.look()
    assert pace.epoch(Look(step_time=0.2)) == 1 and pace.seconds == 0.2
    assert pace.epoch(Look(step_time=9.0)) == 1
    for wrong in ((0.0, 0.5, 2.0), (1.0, 0.0, 2.0), (1.0, 0.5, 1.0)):
        with pytest.raises(ValueError, match="pace of"):
            Pace(*wrong)


# --- jitserve -------------------------------------------------------------------------------------------------------------


def test_jitserve_key_is_the_authors_formula():
    """Gain of a latency request before its first token and after it, and of one with an end alone."""
    jit = JITServe(ttft=2.0, tpot=0.1, step_time=0.02)
    req = Request(0, 0.0, 100, prediction=point(50.0))
    jit.refresh(Look(now=4.0))
    density, remaining = jit.worth(req, Look(0))
    end = 2.0 + 0.1 * 50
    gain = 100 * (2.0 / 4.02) + 8 * 50 * min(1, end / (4.0 + 50 * 0.02))
    assert remaining == pytest.approx(1.0) and density == pytest.approx(-gain / 1.0)
    jit.refresh(Look(now=8.0))
    density, remaining = jit.worth(req, Look(30))
    assert remaining == pytest.approx(0.4) and density == pytest.approx(-8 * 20 * (end / 8.4) / 0.4)
    only_end = JITServe(e2e=3.0, step_time=0.02, penalty=2.0)
    only_end.refresh(Look(now=4.0))
    density, _ = only_end.worth(req, Look(0))
    assert density == pytest.approx(-(100 + 8 * 50) * (3.0 / 5.0) ** 2)


def test_jitserve_takes_the_upper_quantile():
    wide = LengthDistribution.from_quantiles([0.05, 0.5, 0.95], [5.0, 50.0, 200.0])
    req = Request(0, 0.0, 1, prediction=wide)
    jit = JITServe(step_time=1.0)
    assert jit.worth(req, Look())[1] == pytest.approx(wide.quantile(0.95))
    req.prediction = point(40.0)
    jit.on_refine(req)
    assert jit.worth(req, Look())[1] == 40.0


def test_jitserve_keys_are_frozen_between_refreshes():
    jit, req = JITServe(ttft=2.0, tpot=0.1), Request(0, 0.0, 100, prediction=point(50.0))
    first = jit.key_epoch(Look(step=0)), jit.key(req, Look())
    assert (jit.key_epoch(Look(step=49, now=9.0)), jit.key(req, Look(40, now=9.0))) == first
    assert jit.stable(Look(step=49)) == (1, INF) and jit.stable(Look(step=10)) == (40, INF)
    epoch = jit.key_epoch(Look(step=50, now=9.0, step_time=0.5))
    assert epoch != first[0] and jit.key(req, Look(now=9.0)) != first[1]
    jit.key_epoch(Look(step=100, num_waiting=10_064))
    assert jit.stable(Look(step=100)) == (1000, INF)  # a long queue is refreshed less often
    jit.on_finish(req)
    assert not jit._frozen and not jit._terms


def test_jitserve_prefers_the_short_and_the_urgent_to_the_lost():
    """Of two alike the shorter; of two of a length the one that can still be in time."""
    jit = JITServe(ttft=2.0, tpot=0.1)
    jit.refresh(Look(now=10.0))
    short, long = (Request(i, 9.5, 100, prediction=point(n)) for i, n in ((0, 20.0), (1, 200.0)))
    lost = Request(2, 0.0, 100, prediction=point(20.0))
    keys = [jit.key(r, Look()) for r in (short, long, lost)]
    assert keys[0] < keys[1] and keys[0] < keys[2]


# --- scorpio --------------------------------------------------------------------------------------------------------------


class Desk(Look):
    """A View of a queue of which nobody has started."""

    def computed(self, req):
        return 0


def test_scorpio_gives_up_who_cannot_be_in_time_and_lets_the_rest_move_up():
    """100 tokens at 100 tokens/s each. In order of deadline the second cannot be in time, so the third can."""
    guard = Scorpio(prefill_rate=100.0, margin=0.0)
    reqs = [Request(i, 0.0, 100, slo=SLO(ttft=t)) for i, t in enumerate((1.5, 1.9, 2.0, 3.5))]
    for req in reversed(reqs):
        guard.on_arrival(req)
    epoch = guard.key_epoch(Desk())
    assert [guard.key(r, Desk()) for r in reqs] == [(0.0, 1.5), (1.0, 1.9), (0.0, 2.0), (0.0, 3.5)]
    assert guard.key_epoch(Desk(now=1.6, step=1)) != epoch
    assert [guard.key(r, Desk())[0] for r in reqs] == [1.0, 1.0, 1.0, 0.0]
    started = Request(9, 0.0, 100, slo=SLO(ttft=0.1))
    guard.on_arrival(started)
    guard.key_epoch(Desk(1, now=9.0, step=2))  # all have a first token by now
    assert guard.key(started, Desk(1)) == (0.0, 0.1)
    for req in (*reqs, started):
        guard.on_finish(req)
    assert not (guard._hopeful or guard._late or guard._frozen)


def rush(policy, num=60, seed=0):
    """A rush of prompts at twice what can be prefilled, some asked to start soon: the share that does."""
    rng = np.random.default_rng(seed)
    clock, events, reqs = JumpingClock(), [], []
    for rid, (arrival, ttft) in enumerate(zip(np.cumsum(rng.exponential(0.5, num)), rng.uniform(1.0, 8.0, num), strict=True)):
        reqs.append(Request(rid, float(arrival), 64, 64, prediction=point(4.0), slo=SLO(ttft=float(ttft), tpot=0.5)))
        events.append(Event(reqs[-1].arrival, EventKind.ARRIVAL, reqs[-1]))
    engine = Scheduler(policy, Chunked(), Paged(1 << 16, 16, 0.0), Preemption(True), max_num_seqs=16, token_budget=80)
    executor = PlainExecutor(clock, lambda rows, context, chunks: 0.01 + sum(c.length for c in chunks) / 64.0, [4] * num)
    serve(Script(events), engine, executor, clock, Log())
    return float(np.mean([r._first_token - r.arrival <= r.slo.ttft for r in reqs]))


def test_in_a_rush_the_guard_saves_whom_deadlines_alone_would_lose():
    """Least deadline first serves the lost ones first, one after the other; the guard does not."""
    guarded = [rush(Scorpio(prefill_rate=64.0), seed=s) for s in range(3)]
    by_deadline = [rush(Scorpio(prefill_rate=1e9, margin=0.0, every=1 << 20), seed=s) for s in range(3)]  # never looks
    first_come = [rush(FCFS(), seed=s) for s in range(3)]
    assert min(guarded) > max(by_deadline) + 0.08 and min(guarded) > max(first_come) + 0.05


# --- andes ----------------------------------------------------------------------------------------------------------------


def test_andes_gain_is_the_authors_formula():
    andes, req = Andes(ttft=1.0, tpot=0.2), Request(0, 0.0, 100)
    expected = (10.0 + 50.0) / 0.2
    assert andes.gain(req, 0, 10.0) == pytest.approx(1.0 - (1.0 - 500 / expected) ** 2)  # its ttft is past: 0 if not served
    assert andes.gain(req, 60, 10.0) == pytest.approx(1.0 - (1.0 - (1.0 - 60 / expected) ** 2))  # 60 > 45 wanted by now
    late = 1.0 - (1.0 - (40 + 500) / expected) ** 2
    assert andes.gain(req, 40, 10.0) == pytest.approx(late - (1.0 - (1.0 - 40 / expected) ** 2))
    patient = Andes(ttft=100.0, tpot=0.2)
    assert patient.gain(req, 0, 10.0) < 0  # served or not, it starts in time
    assert Andes().gain(req, 5, 10.0) == 0.0  # nobody asked


def test_andes_orders_by_gain_for_memory_only_when_memory_is_short():
    andes = Andes(ttft=1.0, tpot=0.2)
    small, large = Request(0, 5.0, 100), Request(1, 4.0, 1000)
    view = Look(now=10.0)
    view.free_tokens = 500
    assert not andes.refresh(view)  # keys are arrivals, as before
    assert andes.worth(large, view) < andes.worth(small, view)  # by arrival
    view.free_tokens = 90
    assert andes.refresh(view)
    assert andes.worth(small, view) < andes.worth(large, view) < 0
    gain = andes.gain(small, 0, 5.0)
    assert andes.worth(small, view) == pytest.approx(-gain / 100)
    view.free_tokens = 500
    assert andes.refresh(view) and andes.worth(large, view) == 4.0  # keys are arrivals again
    assert not andes.refresh(view)


@pytest.mark.parametrize(
    "make",
    [
        EDF,
        lambda: LLF(2.0, 0.1),
        lambda: LLF(2.0, 0.1, margin=0.05),
        lambda: JITServe(every=7),
        lambda: Scorpio(ttft=0.3, prefill_rate=2000.0),
        lambda: Scorpio(ttft=0.3, prefill_rate=500.0, every=5),
        lambda: Andes(0.3, 0.01, horizon=0.5, token_time=0.006, tight=0.5, every=3),
    ],
    ids=["edf", "llf", "llf_margin", "jitserve", "scorpio", "scorpio_5", "andes"],
)
def test_the_contract_at_other_settings(make):
    check_policy(make, num_cases=6)


def test_wrong_arguments_are_refused_with_the_value():
    for make in (
        lambda: LLF(margin=-1.0),
        lambda: LLF(step_time=0.0),
        lambda: JITServe(quantile=1.0),
        lambda: JITServe(every=0),
    ):
        with pytest.raises(ValueError, match=r"-1\.0|0\.0|1\.0|every=0"):
            make()
    for policy in (LLF(), JITServe()):
        with pytest.raises(ValueError, match="request 7 has no prediction"):
            policy.key(Request(7, 0.0, 10), Look())


def test_a_cells_objectives_are_those_of_its_policy():
    """Where requests carry none: the deadline of LLF is that of the chat objectives, and of batch ones."""
    parts = {"predictor": "oracle", "workload": "synthetic", "num_requests": 30, "rate": 5.0}
    node = compose(policy="llf", slo="chat", **parts)["policy"]
    assert (node["ttft"], node["tpot"], node["e2e"]) == (2.0, 0.1, None)
    node = compose(policy="llf", slo="batch", **parts)["policy"]
    assert (node["ttft"], node["tpot"], node["e2e"]) == (None, None, 3600.0)
    for policy in ("edf", "llf", "jitserve", "scorpio", "andes", "mc_sf", "a_min", "wait"):
        assert lengthwise.simulate(policy=policy, slo="code", **parts).metrics["num_finished"] == 30
