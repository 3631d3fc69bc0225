"""SessionSource: turns follow answers, users take the next request, predictions queue as the offline rule says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.dataset import Dataset, Workload
from lengthwise.experiments.sessions import SessionSource
from lengthwise.experiments.source import WorkloadSource
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.prediction_queue import PredictionQueue
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import EventKind, Outcome, Plan, Request, Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, SJF
from lengthwise.sched.preemption import pause


def workload(arrival: Any, output_len: Any, **more: Any) -> Workload:
    n = len(arrival)
    columns = more.pop("columns", {})
    data = Dataset("w", np.full(n, 8), np.asarray(output_len), "t", "s", "l", columns=columns, max_new_tokens=500)
    return Workload(data, np.arange(n), np.asarray(arrival, dtype=np.float64), **more)


class Ends:
    """An observer that keeps when each request arrived and ended."""

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, float, str]] = {}

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None: ...

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        self.times[request.rid] = (request.arrival, now, reason)


def run(load: Workload, *, policy: Any = None, predictions: Any = None, latency: Any = None, seqs: int = 4) -> Any:
    clock, ends = SimulatedClock(), Ends()
    source = SessionSource(load, predictions, latency)
    executor = SimulatedExecutor(clock, Affine(0.01, 0.001, 0.0, 0.0001), load.output_len.tolist())
    scheduler = Scheduler(policy or FCFS(), Chunked(), Paged(4096), pause(), max_num_seqs=seqs, check=True, max_model_len=600)
    serve(source, scheduler, executor, clock, ends)
    return source, ends.times


def test_a_turn_arrives_its_gap_after_the_answer_before_it() -> None:
    load = workload([0, 0, 1, 3], [5, 9, 4, 7], after=np.array([-1, -1, 0, 2]), gap=np.array([0.0, 0.0, 1.0, 2.0]))
    source, times = run(load)
    assert len(times) == 4 and source.num_born == 4
    assert times[2][0] == times[0][1] + 1.0  # exactly: no clock in between
    assert times[3][0] == times[2][1] + 2.0
    assert source.arrival.tolist() == [times[i][0] for i in range(4)]


def test_a_refused_turn_does_not_end_its_session() -> None:
    load = workload([0, 1, 2], [5, 5, 5], after=np.array([-1, 0, 1]), gap=np.array([0.0, 1.0, 1.0]),
                    columns={"max_new_tokens": np.array([50, 100_000, 50])})  # fmt: skip
    _, times = run(load)
    assert times[1][2].startswith("rejected") and times[1][1] == times[0][1] + 1.0
    assert times[2][0] == times[1][1] + 1.0 and times[2][2] == "stop"


def test_a_tree_of_calls_waits_for_the_one_that_made_them() -> None:
    load = workload([0, 1, 1, 1], [5, 5, 9, 3], after=np.array([-1, 0, 0, 0]), gap=np.array([0.0, 1.0, 1.0, 1.5]))
    _, times = run(load)
    assert times[1][0] == times[2][0] == times[0][1] + 1.0 and times[3][0] == times[0][1] + 1.5


@settings(max_examples=25, deadline=None)
@given(users=st.integers(1, 5), n=st.integers(1, 30), seed=st.integers(0, 99))
def test_a_closed_loop_never_has_more_requests_than_users(users: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gap = rng.exponential(0.05, n)
    arrival = np.concatenate((np.sort(gap[:users]), np.full(max(n - users, 0), np.sort(gap[:users]).max())))[:n]
    _, times = run(workload(arrival, rng.integers(1, 40, n), users=users, gap=gap), seqs=3)
    assert sorted(times) == list(range(n))
    changes = sorted([(a, 1) for a, _, _ in times.values()] + [(e, -1) for _, e, _ in times.values()])
    assert np.cumsum([c for _, c in sorted(changes, key=lambda x: (x[0], x[1]))]).max() <= users
    ends = sorted(e for _, e, _ in times.values())
    for rid in range(users, n):  # taken in order, each by whoever came free, after thinking
        assert times[rid][0] == ends[rid - users] + gap[rid]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=40), st.floats(0, 3), st.floats(0, 2), st.sampled_from([0.0, 0.5, 2.0]),
    st.integers(1, 5), st.lists(st.floats(0, 60), max_size=30),
)  # fmt: skip
def test_the_queue_is_the_offline_rule(arrivals, per_batch, per_request, window, most, asks) -> None:  # type: ignore[no-untyped-def]
    model = LatencyModel(per_batch, per_request, window, most)
    at = sorted(float(a) for a in arrivals)
    queue, found, told = PredictionQueue(model), {}, 0
    for now in [*sorted(asks), float("inf")]:
        while told < len(at) and at[told] <= now:
            queue.add(told, at[told])
            told += 1
        assert queue.next() >= max([now for now, _ in found.values()], default=0.0)
        before = queue.next()
        for ready, rid in queue.pop(now):
            assert before <= ready <= now or not np.isfinite(now)
            found[rid] = (ready, rid)
    assert [found[i][0] for i in range(len(at))] == model.ready_times(at).tolist()


@pytest.mark.parametrize("policy", [FCFS(), SJF()])
def test_an_open_workload_gives_the_same_as_the_open_source(policy: Any) -> None:
    rng = np.random.default_rng(3)
    arrival = np.sort(np.round(rng.uniform(0, 3, 80), 2))
    lens = rng.integers(1, 60, 80)
    predictions, latency = Predictions.from_points(lens.astype(float)), LatencyModel(0.01, 0.005, 0.02, 4)
    load = workload(arrival, lens, after=np.full(80, -1), gap=np.zeros(80))
    source, closed = run(load, policy=policy, predictions=predictions, latency=latency)
    ready = latency.ready_times(arrival)
    assert source.ready.tolist() == ready.tolist()
    clock, ends = SimulatedClock(), Ends()
    opened = WorkloadSource(workload(arrival, lens), predictions, ready, gate=isinstance(policy, SJF))
    executor = SimulatedExecutor(clock, Affine(0.01, 0.001, 0.0, 0.0001), lens.tolist())
    serve(
        opened,
        Scheduler(type(policy)(), Chunked(), Paged(4096), pause(), max_num_seqs=4, max_model_len=600),
        executor,
        clock,
        ends,
    )
    assert ends.times == closed


def test_timeouts_run_from_the_real_arrival() -> None:
    load = workload(
        [0, 1], [200, 200], after=np.array([-1, 0]), gap=np.array([0.0, 1.0]), columns={"timeout": np.array([np.nan, 0.5])}
    )
    _, times = run(load)
    arrival, end, reason = times[1]
    assert reason == "timeout" and arrival == times[0][1] + 1.0 and arrival + 0.5 <= end < arrival + 0.6


def test_a_prediction_that_is_ready_when_its_request_times_out_comes_first() -> None:
    """As from an open source, where events of one time go by kind."""
    lens, latency = np.array([50]), LatencyModel(0.5, 0.0)
    predictions = Predictions.from_points(lens.astype(float))
    columns = {"timeout": np.array([0.5])}
    closed = SessionSource(workload([0], lens, after=np.array([-1]), gap=np.zeros(1), columns=columns), predictions, latency)
    opened = WorkloadSource(workload([0], lens, columns=columns), predictions, np.array([0.5]), gate=True)
    kinds = [[(event.time, event.kind) for now in (0.0, 0.5) for event in source.pop(now)] for source in (closed, opened)]
    wanted = [EventKind.ARRIVAL, EventKind.PREDICTION_READY, EventKind.TIMEOUT]
    assert kinds[0] == kinds[1] and [kind for _, kind in kinds[0]] == wanted


def test_bad_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="request 0 waits for request 1"):
        workload([0, 1], [1, 1], after=np.array([1, -1]), gap=np.zeros(2))
    with pytest.raises(ValueError, match="gap of request 1 is nan"):
        workload([0, 1], [1, 1], after=np.array([-1, 0]), gap=np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="a closed loop of 0 users"):
        workload([0, 1], [1, 1], users=0, gap=np.zeros(2))
    with pytest.raises(ValueError, match="take a WorkloadSource"):
        SessionSource(workload([0, 1], [1, 1]), None)
