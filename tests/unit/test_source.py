"""WorkloadSource: order, ties, late predictions, gating, timeouts, and that no request knows its true length."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.experiments.contract import request_fields
from lengthwise.experiments.dataset import Dataset, Workload
from lengthwise.experiments.source import WorkloadSource
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO, EventKind

INF = float("inf")
ARRIVAL, READY, TIMEOUT = EventKind.ARRIVAL, EventKind.PREDICTION_READY, EventKind.TIMEOUT


def workload(arrival: Any, **columns: Any) -> Workload:
    n = len(arrival)
    data = Dataset("w", np.arange(1, n + 1), np.arange(n, 0, -1), "t", "s", "l", columns=columns, max_new_tokens=99)
    return Workload(data, np.arange(n), np.asarray(arrival, dtype=np.float64))


def points(n: int) -> Predictions:
    return Predictions(np.arange(n) + 0.5, np.arange(n) + 0.5)


def events(source: WorkloadSource, now: float) -> list[tuple[float, EventKind, int]]:
    return [(event.time, event.kind, event.request.rid) for event in source.pop(now)]


def test_arrivals_in_order_with_ties_in_file_order() -> None:
    source = WorkloadSource(workload([0, 1, 1, 1, 3]), None, None, gate=False)
    assert source.peek() == 0.0
    assert events(source, 0.5) == [(0, ARRIVAL, 0)] and source.peek() == 1.0
    assert events(source, 1.0) == [(1, ARRIVAL, 1), (1, ARRIVAL, 2), (1, ARRIVAL, 3)] and source.peek() == 3.0
    assert events(source, 2.0) == []
    assert events(source, INF) == [(3, ARRIVAL, 4)] and source.peek() == INF and events(source, INF) == []


def test_requests_carry_what_the_client_sent_and_the_prediction() -> None:
    rows = np.array([2, 0, 1])
    data = Dataset(
        "w", np.array([10, 20, 30]), np.array([7, 8, 9]), "t", "s", "l", prompts=["a", "b", "c"],
        columns={
            "client": np.array(["x", "y", None], dtype=object), "priority": np.array([1.0, np.nan, 3.0]),
            "max_new_tokens": np.array([5, 6, 7]), "slo_ttft": np.array([1.0, np.nan, 2.0]), "ignored": np.array([1, 2, 3]),
            "turn": np.array([0, 1, 2]),
        },
    )  # fmt: skip
    source = WorkloadSource(Workload(data, rows, np.array([0.0, 1.0, 2.0])), points(3), None, gate=True)
    a, b, c = (event.request for event in source.pop(INF))
    assert (a.rid, a.prompt_len, a.prompt, a.max_new_tokens, a.client, a.priority, a.turn) == (0, 30, "c", 7, None, 3.0, 2)
    assert (b.rid, b.prompt_len, b.prompt, b.max_new_tokens, b.client, b.priority) == (1, 10, "a", 5, "x", 1.0)
    assert (c.client, c.priority, c.slo) == ("y", 0.0, None) and (a.slo, b.slo) == (SLO(ttft=2.0), SLO(ttft=1.0))
    assert [r.prediction.mean() for r in (a, b, c) if r.prediction] == [0.5, 1.5, 2.5]
    assert isinstance(a.prompt_len, int) and isinstance(a.arrival, float) and isinstance(a.max_new_tokens, int)


def test_a_prediction_that_is_late_follows_its_request() -> None:
    ready = np.array([0.0, 4.0, 2.5])
    source = WorkloadSource(workload([0, 1, 2]), points(3), ready, gate=False)
    (first,) = source.pop(0.0)
    assert first.request.prediction is not None and source.peek() == 1.0
    got = {}
    for event in source.pop(3.0):
        got[event.kind, event.request.rid] = event.request.prediction is not None
    assert got == {(ARRIVAL, 1): False, (ARRIVAL, 2): False, (READY, 2): True}
    assert source.peek() == 4.0
    (last,) = source.pop(4.0)
    assert (last.time, last.kind, last.request.rid) == (4.0, READY, 1)
    assert last.request.prediction is not None and last.request.prediction.mean() == 1.5 and source.peek() == INF


def test_a_gated_source_looks_past_arrivals_that_wait() -> None:
    ready = np.array([5.0, 6.0, 2.0, 9.0])
    source = WorkloadSource(workload([0, 1, 2, 3]), points(4), ready, gate=True)
    assert source.peek() == 2.0  # request 2 brings its prediction along
    assert events(source, 2.0) == [(0, ARRIVAL, 0), (1, ARRIVAL, 1), (2, ARRIVAL, 2)]
    assert source.peek() == 5.0
    assert events(source, 5.5) == [(3, ARRIVAL, 3), (5, READY, 0)] and source.peek() == 6.0
    assert events(source, INF) == [(6, READY, 1), (9, READY, 3)] and source.peek() == INF


def test_a_late_prediction_is_attached_when_its_event_is_taken() -> None:
    source = WorkloadSource(workload([0, 0]), points(2), np.array([2.0, 1.0]), gate=True)
    had = [(event.kind, event.request.rid, event.request.prediction is not None) for event in source.pop(3.0)]
    assert had == [(ARRIVAL, 0, False), (ARRIVAL, 1, False), (READY, 1, True), (READY, 0, True)]


def test_what_lies_ahead_of_an_ended_request_is_void() -> None:
    source = WorkloadSource(workload([0, 1, 2], timeout=np.array([10.0, np.nan, 3.0])), None, None, gate=False)
    first, second = (event.request for event in source.pop(1.0))
    assert (first.timeout, second.timeout) == (10.0, None)
    source.on_finish(first, 1.5)
    assert events(source, 2.0) == [(2, ARRIVAL, 2)] and source.peek() == 5.0
    assert events(source, 5.0) == [(5, TIMEOUT, 2)] and source.peek() == INF
    late = WorkloadSource(workload([0, 1]), points(2), np.array([8.0, 1.0]), gate=False)
    (only,) = late.pop(0.5)
    late.on_finish(only.request, 0.75)
    assert late.peek() == 1.0 and events(late, INF) == [(1, ARRIVAL, 1)]


def test_wrong_input_is_refused() -> None:
    w = workload([0, 1])
    with pytest.raises(ValueError, match="3 predictions for 2"):
        WorkloadSource(w, points(3), None, gate=False)
    with pytest.raises(ValueError, match=r"prediction 1 is ready at 0\.5 s.* 1\.0 s"):
        WorkloadSource(w, points(2), np.array([0.0, 0.5]), gate=False)
    with pytest.raises(ValueError, match="prediction 0 is ready at nan"):
        WorkloadSource(w, points(2), np.array([np.nan, 1.0]), gate=False)
    with pytest.raises(ValueError, match="1 ready times for 2"):
        WorkloadSource(w, points(2), np.array([0.0]), gate=False)
    with pytest.raises(ValueError, match="there are none"):
        WorkloadSource(w, None, None, gate=True)
    with pytest.raises(ValueError, match="timeout of request 1"):
        WorkloadSource(workload([0, 1], timeout=np.array([1.0, -1.0])), None, None, gate=False)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_events_are_the_same_however_they_are_popped(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    times = st.integers(0, 12).map(float)
    arrival = np.sort(data.draw(st.lists(times, min_size=n, max_size=n)))
    ready = arrival + np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    gate = data.draw(st.booleans())
    timeout = np.array(data.draw(st.lists(st.sampled_from([1.0, 5.0, np.nan]), min_size=n, max_size=n)))
    w = workload(arrival, timeout=timeout) if data.draw(st.booleans()) else workload(arrival)
    whole = events(WorkloadSource(w, points(n), ready, gate), INF)
    assert [t for t, _, _ in whole] == sorted(t for t, _, _ in whole)
    assert [rid for _, kind, rid in whole if kind == ARRIVAL] == list(range(n))
    stepped, source, now = [], WorkloadSource(w, points(n), ready, gate), 0.0
    while source.peek() < INF:
        now = max(now, source.peek())
        took = events(source, now)
        # peek names the next event that matters: only arrivals without a prediction, under gate, may come before it
        assert all(t == now or (gate and kind == ARRIVAL and ready[rid] > t) for t, kind, rid in took)
        assert took and took[-1][0] == now
        stepped += took
    assert stepped + events(source, INF) == whole


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), columns=st.booleans())
def test_requests_do_not_know_their_true_lengths(seed: int, columns: bool) -> None:
    rng = np.random.default_rng(seed)
    n = 40
    extra = {"priority": rng.random(n), "max_new_tokens": rng.integers(1, 9, n)} if columns else {}
    w = replace(workload(np.sort(rng.random(n)), **extra), rows=rng.permutation(n))
    other = replace(w, dataset=replace(w.dataset, output_len=rng.permutation(w.dataset.output_len)))
    assert request_fields(w) == request_fields(other)


def test_survival_predictions_travel_too() -> None:
    from lengthwise.sched import EDGES

    survival = np.tile(np.linspace(1, 0, EDGES.size), (3, 1))
    source = WorkloadSource(workload([0, 1, 2]), Predictions(np.arange(3.0), None, survival), None, gate=True)
    got = [event.request.prediction for event in source.pop(INF)]
    assert [p.score for p in got if p] == [0.0, 1.0, 2.0] and got[0] is not None and got[0].mean() > 0


@pytest.mark.parametrize("late", [False, True], ids=["at arrival", "late"])
def test_cost_of_popping(late: bool, capsys: pytest.CaptureFixture[str]) -> None:
    n = 100_000
    arrival = np.arange(n) / 10
    source = WorkloadSource(workload(arrival), points(n), arrival + 0.015 if late else None, gate=True)
    start, count = time.process_time(), 0
    while (now := source.peek()) < INF:
        count += sum(1 for _ in source.pop(now))
    spent = time.process_time() - start
    assert count == (2 * n if late else n)
    with capsys.disabled():
        print(f"\npop, prediction {'late' if late else 'at arrival'}: {spent / n * 1e6:.2f} us of CPU a request")


@pytest.mark.parametrize("gate", [False, True])
def test_a_run_on_late_predictions_is_the_same_by_single_steps(gate: bool) -> None:
    from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
    from lengthwise.engine.simulated.affine import Affine
    from lengthwise.sched import Scheduler, serve
    from lengthwise.sched.batching import Chunked
    from lengthwise.sched.kv import Paged
    from lengthwise.sched.policies import FCFS, SRPT
    from lengthwise.sched.preemption import recompute

    class Ends:
        def __init__(self) -> None:
            self.all: dict[int, tuple[int, str, float]] = {}

        def step(self, *_: Any) -> None: ...

        def ended(self, request: Any, num_tokens: int, reason: str, now: float) -> None:
            self.all[request.rid] = (num_tokens, reason, now)

    rng = np.random.default_rng(5)
    n = 300
    arrival = np.cumsum(rng.exponential(0.02, n))
    timeout = np.where(rng.random(n) < 0.2, 0.5, np.nan)
    w = workload(arrival, timeout=timeout)
    runs = []
    for fast_forward in (True, False):
        clock, ends = SimulatedClock(), Ends()
        executor = SimulatedExecutor(clock, Affine(8e-3, 2e-5, 1.2e-8, 6e-5), w.output_len.tolist(), fast_forward=fast_forward)
        policy = SRPT() if gate else FCFS()
        scheduler = Scheduler(policy, Chunked(), Paged(4000), recompute(), max_num_seqs=8, token_budget=256, check=True)
        source = WorkloadSource(w, points(n), arrival + np.random.default_rng(6).exponential(0.05, n), gate=gate)
        serve(source, scheduler, executor, clock, ends)
        assert sorted(ends.all) == list(range(n))
        assert not source._live and not source._held
        runs.append(ends.all)
    assert runs[0] == runs[1]
    reasons = {reason for _, reason, _ in runs[0].values()}
    assert {"timeout", "length"} <= reasons or {"timeout", "stop"} <= reasons
