"""What the recorder keeps adds up: tokens, gaps, requests, time; and a Run survives its files."""

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from harness import play
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import reusing

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.dataset import Dataset, Workload
from lengthwise.experiments.recorder import ENDED_SIZE, STEP_SIZE, Recorder
from lengthwise.experiments.run import FILES, REQUEST_COLUMNS, Run, build
from lengthwise.experiments.windows import Capped, CapReached, Window
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO, Event, EventKind, LengthDistribution, Request, Scheduler, serve
from lengthwise.sched.batching import Chunked, Mixed, PrefillFirst, Static
from lengthwise.sched.kv import Contiguous, Paged
from lengthwise.sched.policies import FCFS, SJF, SRPT
from lengthwise.sched.preemption import pause, recompute
from lengthwise.sched.rehearsal import Log

COST = Affine(8e-3, 2e-5, 1e-7, 6e-5)


class Arrivals:
    """Requests of a workload at their times, and events beside them."""

    def __init__(self, workload, events=(), **fields):
        self.requests = [
            Request(
                i, float(a), int(p), workload.dataset.max_new_tokens,
                prediction=LengthDistribution.point(float(n)), **{k: v[i] for k, v in fields.items()},
            )
            for i, (a, p, n) in enumerate(zip(workload.arrival, workload.prompt_len, workload.output_len, strict=True))
        ]  # fmt: skip
        self.events = [Event(r.arrival, EventKind.ARRIVAL, r) for r in self.requests]
        self.events += [Event(t, kind, self.requests[i]) for t, kind, i in events]
        self.events.sort(key=lambda e: (e.time, e.kind))
        self.at = 0

    def peek(self):
        return self.events[self.at].time if self.at < len(self.events) else math.inf

    def pop(self, now):
        while self.at < len(self.events) and self.events[self.at].time <= now:
            self.at += 1
            yield self.events[self.at - 1]

    def on_finish(self, request, now): ...


def work(n=60, seed=0, rate=20.0, mean=40, cap=400, **columns):
    g = np.random.default_rng(seed)
    output = np.minimum(np.maximum(1, g.exponential(mean, n).astype(int)), cap)
    dataset = Dataset("made", g.integers(5, 300, n), output, "tokens", "made", "none", max_new_tokens=cap, **columns)
    return Workload(dataset, np.arange(n), np.cumsum(g.exponential(1 / rate, n)))


def simulate(
    workload, policy=None, batching=None, mode=None, *, pool=60 * 16, seqs=8, budget=512, recorder=None, events=(),
    fast_forward=True, kv=None, cost=COST, cap=None, **fields,
):  # fmt: skip
    clock, recorder = SimulatedClock(), recorder or Recorder()
    scheduler = Scheduler(
        policy or FCFS(), batching or Chunked(), kv or Paged(pool), mode or recompute(), max_num_seqs=seqs,
        token_budget=budget, max_model_len=4096, check=True,
    )  # fmt: skip
    executor = SimulatedExecutor(clock, cost, workload.output_len.tolist(), fast_forward=fast_forward)
    source = Arrivals(workload, events, **fields)
    try:
        serve(source if cap is None else Capped(source, cap), scheduler, executor, clock, recorder)
    except CapReached as reached:
        recorder.cut_off(scheduler, reached.now)
    return recorder, scheduler


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([FCFS, SJF, SRPT]),
    st.sampled_from([Chunked, Mixed, PrefillFirst, Static]),
    st.sampled_from([pause, recompute]),
    st.sampled_from([50, 60, 120]),
    st.booleans(),
)
def test_gaps_between_tokens_add_up(seed, policy, batching, mode, blocks, fast_forward):
    """Every token but the first closes one gap, and a request's gaps add up to last - first token, whatever happens to it."""
    workload = work(40, seed)
    recorder, scheduler = simulate(
        workload, policy(), batching(), mode(), pool=blocks * 16, fast_forward=fast_forward, budget=512
    )
    got = recorder.requests()
    done = got["status"] == 0
    recorder.steps()
    assert recorder.itl.n == (got["output_len"][done] - 1).sum()
    assert recorder.itl.total == pytest.approx((got["ended"] - got["first_token"])[done].sum(), rel=1e-9)
    assert recorder.run_totals.get("output_tokens", 0) == got["output_len"].sum()
    computed = got["prompt_len"][done].sum() + (got["output_len"][done] - 1).sum() + got["recomputed"].sum()
    assert recorder.run_totals.get("computed_tokens", 0) == computed
    assert got["num_preemptions"].sum() == scheduler.num_preemptions == len(recorder.preemptions()["rid"])


class Recording(Log):
    """Logs and records the same run."""

    def __init__(self):
        super().__init__()
        self.recorder = Recorder()

    def step(self, start, plan, outcome, scheduler):
        super().step(start, plan, outcome, scheduler)
        self.recorder.step(start, plan, outcome, scheduler)

    def ended(self, request, num_tokens, reason, now):
        super().ended(request, num_tokens, reason, now)
        self.recorder.ended(request, num_tokens, reason, now)


@settings(max_examples=150, deadline=None)
@given(reusing())
def test_gaps_are_those_a_client_sees_with_reuse_and_swapping(case):
    """Single steps: as many gaps as tokens that are not first, of the same sum, and the same greatest; and the same tokens and
    preemptions in a run that is fast-forwarded."""
    log, fast = Recording(), Recording()
    times = play(case, plain=True, fast_forward=False, log=log).executor.token_times.values()
    play(case, log=fast)
    gaps = [b - a for one in times for a, b in pairwise(one)]
    for recorder in (log.recorder, fast.recorder):
        recorder.requests(), recorder.steps()
        assert recorder.itl.n == len(gaps) and recorder.itl.total == pytest.approx(sum(gaps), rel=1e-9)
        assert recorder.run_totals.get("output_tokens", 0) == sum(len(one) for one in times)
    assert log.recorder.itl.greatest == pytest.approx(max(gaps, default=log.recorder.itl.greatest))
    one, two = log.recorder.preemptions(), fast.recorder.preemptions()
    assert all(np.array_equal(one[name], two[name], equal_nan=True) for name in one)


@pytest.mark.parametrize("mode", [pause, recompute])
def test_a_preempted_request_has_one_long_gap(mode):
    """One slot; a long request decodes 0.1 s a token, a short one takes the slot for 3 steps."""
    dataset = Dataset("t", np.array([10, 10]), np.array([20, 3]), "tokens", "made", "none", max_new_tokens=50)
    workload = Workload(dataset, np.arange(2), np.array([0.0, 0.45]))
    recorder, _ = simulate(workload, SRPT(), mode=mode(), seqs=1, cost=Affine(0.1, 0, 0, 0))
    got, aways = recorder.requests(), recorder.preemptions()
    recorder.steps()
    assert aways["rid"].tolist() == [0]
    assert (aways["left"][0], aways["back"][0]) == (pytest.approx(0.5), pytest.approx(0.8))
    assert recorder.itl.n == 19 + 2 and recorder.itl.greatest == pytest.approx(0.4)  # 0.3 away, 0.1 for the token
    assert recorder.itl.total == pytest.approx(got["ended"][0] - got["first_token"][0] + 0.2)


def test_prefill_first_shows_the_stall_of_others():
    """A's decoding stands still while B's prompt is computed: B's prefill is in A's gap."""
    dataset = Dataset("t", np.array([10, 100]), np.array([10, 1]), "tokens", "made", "none", max_new_tokens=50)
    workload = Workload(dataset, np.arange(2), np.array([0.0, 0.45]))
    recorder, _ = simulate(workload, batching=PrefillFirst(), cost=Affine(0.1, 0, 0, 0))
    recorder.steps()
    assert recorder.itl.n == 9 and recorder.itl.least == pytest.approx(0.1)
    assert recorder.itl.greatest == pytest.approx(0.2)


def test_fast_forward_records_the_same_requests():
    one, two = (simulate(work(), SRPT(), fast_forward=ff)[0].requests() for ff in (True, False))
    assert all(np.array_equal(one[name], two[name], equal_nan=True) for name in one if name != "reason")


def test_steps_run_on_without_gap_or_overlap_and_balance():
    recorder, scheduler = simulate(work(200, rate=30.0), pool=3000)
    steps = recorder.steps()
    assert (steps["start"][1:] >= steps["end"][:-1]).all() and (steps["end"] > steps["start"]).all()
    assert steps["num_steps"].min() >= 1 and steps["num_running"].max() <= 8
    assert steps["kv_free_blocks"][-1] == recorder.num_blocks == scheduler.kv.num_blocks
    assert recorder.run_totals["busy"] == pytest.approx((steps["end"] - steps["start"]).sum())
    assert recorder.end == steps["end"][-1]


def test_rows_survive_the_buffer(monkeypatch):
    """More rows than one buffer holds come out whole and in order, with steps or without."""
    monkeypatch.setattr("lengthwise.experiments.recorder.STEP_BYTES", 32 * STEP_SIZE)
    monkeypatch.setattr("lengthwise.experiments.recorder.ENDED_BYTES", 32 * ENDED_SIZE)
    n = 3 * 32 + 5
    workload = Workload(
        Dataset("t", np.full(n, 4), np.full(n, 1), "tokens", "made", "none", max_new_tokens=4), np.arange(n), np.arange(n) * 1.0
    )
    recorder, _ = simulate(workload)
    lean, _ = simulate(workload, recorder=Recorder(steps=False))
    assert recorder.requests()["rid"].tolist() == list(range(n))
    steps = recorder.steps()
    assert len(steps["start"]) == n and (np.diff(steps["start"]) > 0).all()
    assert len(lean.steps()["start"]) == 0 and lean.run_totals == recorder.run_totals


def test_window_totals_share_plans_that_cross_its_edge():
    workload = Workload(
        Dataset("t", np.array([10]), np.array([11]), "tokens", "made", "none", max_new_tokens=50), np.arange(1), np.zeros(1)
    )
    recorder, _ = simulate(workload, cost=Affine(0.1, 0, 0, 0), recorder=Recorder(window=(0.3, 0.8)))
    recorder.steps()  # prefill [0, 0.1), then one plan of 10 steps [0.1, 1.1)
    assert recorder.window_totals["busy"] == pytest.approx(0.5)
    assert recorder.window_totals["output_tokens"] == pytest.approx(5)
    assert recorder.run_totals["output_tokens"] == 11


def test_every_way_to_end_has_its_status():
    workload = Workload(
        Dataset("t", np.array([10, 10, 10, 900]), np.array([50, 50, 50, 5]), "tokens", "made", "none", max_new_tokens=100),
        np.arange(4), np.zeros(4),
    )  # fmt: skip
    events = [(1.05, EventKind.ABORT, 1), (1.55, EventKind.TIMEOUT, 2)]
    recorder, _ = simulate(workload, cost=Affine(0.1, 0, 0, 0), events=events)
    run = build(recorder, workload)
    got = run.requests
    assert got["status"].tolist() == ["finished", "aborted", "timeout", "rejected"]
    assert got["reason"][0] == "stop" and got["reason"][3].startswith("rejected: prompt 900")
    assert got["output_len"].tolist() == [50, 11, 16, 0]
    assert got["finish"].notna().tolist() == [True, False, False, False]
    assert got["ended"].tolist() == pytest.approx([5.0, 1.1, 1.6, 0.0])
    m = run.metrics
    assert (m["num_finished"], m["num_aborted"], m["num_timeout"], m["num_rejected"]) == (1, 1, 1, 1)
    assert m["e2e_mean"] is None and run.summary["flags"]["e2e_mean"] == "1 of 2 have not ended"  # the timed-out one


def test_many_different_reasons_stay_bounded(monkeypatch):
    monkeypatch.setattr("lengthwise.experiments.recorder.KEPT_REASONS", 3)
    recorder = Recorder()
    for i in range(10):
        recorder.ended(Request(i, 0.0, 5), 0, f"rejected: {i}", 0.0)
    assert len(recorder.reasons) == 4 and (recorder.requests()["status"] == 1).all()
    with pytest.raises(ValueError, match="names no status"):
        unknown = Recorder()
        unknown.ended(Request(0, 0.0, 5), 0, "vanished", 0.0)
        unknown.requests()


def test_a_request_that_ends_twice_is_refused():
    recorder = Recorder()
    for _ in range(2):
        recorder.ended(Request(7, 0.0, 5), 1, "stop", 1.0)
    with pytest.raises(ValueError, match="request 7 ended twice"):
        recorder.requests()


# --- Run --------------------------------------------------------------------------------------------------------------


def whole_run(n=60):
    columns = {"censored": np.arange(n) % 7 == 0, "group": np.arange(n) // 2}
    workload = work(n, **columns)
    recorder, _ = simulate(workload, SRPT(), client=[f"c{i % 3}" for i in range(n)])
    predicted = Predictions(np.arange(n) * 1.0, np.arange(n) * 1.0)
    return build(
        recorder, workload, predictions=predicted, eligible=workload.arrival + 0.001, fold=np.arange(n) % 5,
        fallback=np.arange(n) == 3, slo=SLO(ttft=1.0, tpot=0.05), cost=COST, token_budget=512, cell={"policy": "srpt"},
        provenance={"seed": 0}, volatile={"wall": 1.0},
    )  # fmt: skip


def test_run_has_the_columns_of_the_contract():
    run = whole_run()
    assert tuple(run.requests.columns) == REQUEST_COLUMNS and run.requests["rid"].tolist() == list(range(60))
    assert run.requests["predicted"].tolist() == list(range(60)) and run.requests["fold"].tolist()[:6] == [0, 1, 2, 3, 4, 0]
    assert run.requests["censored"].sum() == 9 == run.metrics["num_censored"]
    assert set(run.requests["client"]) == {"c0", "c1", "c2"} and 0 < run.metrics["jain"] < 1
    assert run.metrics["fallback_share"] == pytest.approx(1 / 60)
    assert run.summary["slo"] == {"ttft": 1.0, "tpot": 0.05}
    assert list(run.steps.columns) == [
        "start", "end", "prefill_pairs", "num_steps", "num_decode", "num_padding", "context_tokens", "prefill_tokens",
        "num_chunks", "num_waiting", "num_running", "kv_free_blocks",
    ]  # fmt: skip


def test_run_survives_its_files(tmp_path):
    run = whole_run()
    run.save(tmp_path / "cell")
    got = Run.load(tmp_path / "cell")
    pd.testing.assert_frame_equal(got.requests, run.requests)
    pd.testing.assert_frame_equal(got.steps, run.steps)
    pd.testing.assert_frame_equal(got.preemptions, run.preemptions)
    assert got.summary == run.summary and got.itl.n == run.metrics["itl_n"]
    assert np.array_equal(got.overtakes().count, run.overtakes().count) and len(run.preemptions) > 0
    assert "NaN" not in (tmp_path / "cell" / "summary.json").read_text()


def test_same_seed_same_bytes(tmp_path):
    for name in ("one", "two"):
        whole_run().save(tmp_path / name)
    for file in FILES:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@pytest.mark.parametrize("lost", FILES)
def test_half_a_run_is_not_loaded(tmp_path, lost):
    whole_run(8).save(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(FileNotFoundError, match=lost):
        Run.load(tmp_path)


def test_requests_that_never_entered_are_unfinished():
    workload = work(30, rate=5.0)
    recorder, _ = simulate(workload, cap=float(workload.arrival[9]) + 1e-6)
    run = build(recorder, workload)
    assert run.metrics["num_finished"] + run.metrics["num_unfinished"] == 30 and run.metrics["num_unfinished"] >= 20
    late = run.requests[run.requests["reason"] == "never entered"]
    assert (late["arrival"] >= workload.arrival[9]).all() and late["first_scheduled"].isna().all()


def test_a_cap_that_is_not_reached_changes_nothing():
    workload = work(20)
    one, two = (simulate(workload, cap=cap)[0] for cap in (None, 1e6))
    assert one.requests()["ended"].tolist() == two.requests()["ended"].tolist() and one.end == two.end


def test_columns_that_do_not_fit_are_refused():
    workload = work(10)
    with pytest.raises(ValueError, match="fold has 3 rows, the workload 10"):
        build(simulate(workload)[0], workload, fold=[0, 1, 2])
    with pytest.raises(ValueError, match="window is"):
        build(simulate(workload)[0], workload, window=Window(1.0, 2.0, False))
    with pytest.raises(ValueError, match="choose of ttft, tpot, e2e"):
        build(simulate(workload)[0], workload, slo={"tbt": 1.0})


def test_a_request_s_own_slo_goes_before_the_cell_s():
    workload = work(10, rate=1.0)
    recorder, _ = simulate(workload, slo=[SLO(e2e=1e-6) if i == 4 else None for i in range(10)])
    run = build(recorder, workload, slo={"e2e": 100.0})
    assert (run.metrics["num_met"], run.metrics["attainment_n"]) == (9, 10)


def test_an_empty_engine_makes_an_empty_but_whole_run(tmp_path):
    workload = Workload(
        Dataset("t", np.array([5000]), np.array([5]), "tokens", "made", "none", max_new_tokens=10), np.arange(1), np.zeros(1)
    )
    run = build(simulate(workload)[0], workload, cost=COST)
    run.save(tmp_path)
    assert Run.load(tmp_path).metrics["num_rejected"] == 1 and run.metrics["e2e_mean"] is None
    assert run.metrics["requests_per_s"] is None and len(run.steps) == 0


@pytest.mark.parametrize("kv", [Contiguous, Paged])
def test_kv_use_counts_what_is_held_while_it_is_held(kv):
    workload = Workload(
        Dataset("t", np.array([16]), np.array([2]), "tokens", "made", "none", max_new_tokens=17), np.arange(1), np.zeros(1)
    )
    recorder, _ = simulate(workload, kv=kv(160), cost=Affine(0.1, 0, 0, 0))
    # one block for the prompt, a second for the token decoded; contiguous reserves 16 + 17 - 1 = 2 blocks from the start
    assert build(recorder, workload).metrics["kv_use_mean"] == pytest.approx(0.15 if kv is Paged else 0.2)
