"""Overtaking is counted as defined, to the last pass, and a declared bound can be checked by it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.dataset import Dataset, Workload
from lengthwise.experiments.recorder import Recorder
from lengthwise.experiments.run import build
from lengthwise.experiments.starvation import by_class, by_decile, ccdf, jain, overtakes
from lengthwise.sched import Event, EventKind, LengthDistribution, Request, Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, SJF, Aging
from lengthwise.sched.preemption import recompute

NAN = math.nan
moments = st.integers(0, 12).map(float)


@st.composite
def histories(draw):
    """Requests that wait, start, are preempted and come back, at few distinct times, so that ties abound."""
    rows = []
    for _ in range(draw(st.integers(0, 9))):
        arrival = draw(moments)
        eligible = arrival + draw(st.integers(0, 2))
        first = NAN if draw(st.booleans()) and draw(st.booleans()) else eligible + draw(moments)
        aways, at = [], first
        while not math.isnan(at) and len(aways) < 3 and draw(st.booleans()):
            left = at + draw(st.integers(0, 3))
            at = NAN if draw(st.integers(0, 4)) == 0 else left + draw(moments)
            aways.append((left, at))
        rows.append((arrival, eligible, first, aways, 60.0, float(draw(st.integers(0, 8)))))
    return rows


def by_definition(rows):
    starts = [(t, a) for a, _, first, aways, _, _ in rows for t in (first, *(b for _, b in aways)) if not math.isnan(t)]
    count, lead, over = [], [], []
    for a, eligible, first, aways, gone, bound in rows:
        waits = [(u, gone if math.isnan(v) else v) for u, v in ((eligible, first), *aways)]
        leads = [b - a for u, v in waits for t, b in starts if b > a and u <= t < v]
        count.append(len(leads))
        lead.append(max(leads, default=0.0))
        over.append(sum(x >= bound for x in leads))
    return count, lead, over


@given(histories())
def test_overtakes_equals_its_definition(rows):
    aways = [(i, left, back) for i, row in enumerate(rows) for left, back in row[3]]
    got = overtakes(
        [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], ended=[r[4] for r in rows],
        rows=[x[0] for x in aways], left=[x[1] for x in aways], back=[x[2] for x in aways], bound=[r[5] for r in rows],
    )  # fmt: skip
    count, lead, over = by_definition(rows)
    assert got.count.tolist() == count
    assert got.lead.tolist() == lead
    assert got.over_bound is not None and got.over_bound.tolist() == over


@given(st.lists(moments, max_size=20))
def test_nobody_passes_in_order_of_arrival(gaps):
    arrival = np.cumsum(gaps)
    got = overtakes(arrival, arrival, np.maximum.accumulate(arrival + 3))
    assert not got.count.any() and not got.lead.any() and got.over_bound is None


def test_reverse_order_passes_everybody():
    got = overtakes([0, 1, 2, 3], [0, 1, 2, 3], [10, 9, 8, 7])
    assert got.count.tolist() == [3, 2, 1, 0] and got.lead.tolist() == [3, 2, 1, 0]


def test_a_request_that_is_not_yet_eligible_is_not_passed():
    assert overtakes([0, 1], [5, 1], [6, 2]).count.tolist() == [0, 0]
    assert overtakes([0, 1], [2, 1], [6, 2]).count.tolist() == [1, 0]


def simulate(policy, arrival, lengths, predicted=None, base=0.0101):
    n = len(arrival)
    dataset = Dataset("t", np.full(n, 10), np.asarray(lengths), "tokens", "made", "none", max_new_tokens=200)
    workload = Workload(dataset, np.arange(n), np.asarray(arrival, dtype=float))

    class Arrivals:
        at = 0

        def peek(self):
            return workload.arrival[self.at] if self.at < n else math.inf

        def pop(self, now):
            while self.at < n and workload.arrival[self.at] <= now:
                i, self.at = self.at, self.at + 1
                request = Request(
                    i, float(workload.arrival[i]), 10, 200, prediction=LengthDistribution.point(float(lengths[i]))
                )
                yield Event(request.arrival, EventKind.ARRIVAL, request)

        def on_finish(self, request, now): ...

    clock, recorder = SimulatedClock(), Recorder()
    scheduler = Scheduler(policy, Chunked(), Paged(4096), recompute(), max_num_seqs=1, token_budget=512)
    serve(Arrivals(), scheduler, SimulatedExecutor(clock, Affine(base, 0, 0, 0), list(lengths)), clock, recorder)
    return recorder, workload


def test_s6_shortest_first_starves_and_the_guard_keeps_its_declared_bound():
    n, alpha = 1500, 20.0
    arrival = np.concatenate(([0.0], np.arange(n) * 0.01))  # a short one every 10 ms, each takes 10.1 ms
    lengths = [100] + [1] * n
    horizon = np.array([99 / alpha] + [0.0] * n)  # what Aging declares: (key - 1) / alpha
    found = {}
    for name, policy in (("sjf", SJF()), ("aging", Aging(SJF(), alpha)), ("fcfs", FCFS())):
        recorder, workload = simulate(policy, arrival, lengths)
        found[name] = build(recorder, workload, bound=horizon)
    passes = {name: run.overtakes(horizon) for name, run in found.items()}
    waits = {name: run.requests["first_scheduled"] - run.requests["arrival"] for name, run in found.items()}
    assert passes["sjf"].count[0] == n - 1 and waits["sjf"][0] > 15  # the first short one is no later arrival
    assert passes["sjf"].over_bound[0] > 900 and found["sjf"].metrics["num_over_bound"] == 1
    assert passes["aging"].over_bound.sum() == 0 and found["aging"].metrics["num_over_bound"] == 0
    assert 0 < passes["aging"].lead[0] < 99 / alpha and waits["aging"][0] < 5.1
    assert passes["fcfs"].count.sum() == 0 and found["fcfs"].metrics["overtaking_max"] == 0
    table = by_class(waits["sjf"], np.where(np.arange(n + 1) == 0, "long", "short"), passes["sjf"].over_bound)
    assert table["class"].tolist() == ["long", "short"] and table["num_starved"].tolist() == [1, 0]
    assert table["max_wait"][0] == waits["sjf"][0]


def test_ccdf():
    w, share = ccdf([1.0, 1.0, 2.0, 4.0])
    assert w.tolist() == [1, 2, 4] and share.tolist() == [0.5, 0.25, 0.0]


def test_by_decile_keeps_every_value_and_orders_sizes():
    g = np.random.default_rng(0)
    size, value = g.integers(1, 1000, 1000), g.random(1000)
    table = by_decile(value, size)
    assert table["decile"].tolist() == list(range(1, 11)) and table["n"].sum() == 1000
    assert (table["least_size"].to_numpy()[1:] > table["greatest_size"].to_numpy()[:-1]).all()
    assert (table["n"] * table["mean"]).sum() == pytest.approx(value.sum())
    assert by_decile([1.0, NAN], [5, 6])["n"].tolist() == [1]
    assert by_decile([], []).empty


def test_jain():
    assert jain([3.0]) == 1.0 and jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25 and jain([0.0, 0.0]) == 1.0
    with pytest.raises(ValueError, match="finite share"):
        jain([])


def test_by_class_without_a_bound_shows_no_count():
    table = by_class([1.0, 5.0], ["a", "b"])
    assert table["num_starved"].isna().all() and table["max_wait"].tolist() == [1.0, 5.0]
