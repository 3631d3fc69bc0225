"""Metrics against values worked out by hand, and laws that must hold between them."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.experiments.dataset import Dataset, Workload
from lengthwise.experiments.latencies import idle_latency, samples
from lengthwise.experiments.metrics import measure
from lengthwise.experiments.recorder import Recorder
from lengthwise.experiments.run import build
from lengthwise.experiments.windows import Capped, CapReached, Window, window
from lengthwise.sched import Event, EventKind, LengthDistribution, Request, Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, SRPT
from lengthwise.sched.preemption import recompute

NAN = math.nan
COST = Affine(8e-3, 2e-5, 1e-7, 6e-5, 1e-9)


class Arrivals:
    def __init__(self, workload):
        self.work, self.at = workload, 0

    def peek(self):
        return float(self.work.arrival[self.at]) if self.at < len(self.work) else math.inf

    def pop(self, now):
        while self.peek() <= now:
            i, self.at = self.at, self.at + 1
            request = Request(
                i, float(self.work.arrival[i]), int(self.work.prompt_len[i]), self.work.dataset.max_new_tokens,
                prediction=LengthDistribution.point(float(self.work.output_len[i])),
            )  # fmt: skip
            yield Event(request.arrival, EventKind.ARRIVAL, request)

    def on_finish(self, request, now): ...


def work(prompt, output, arrival, cap=2048):
    dataset = Dataset("t", np.asarray(prompt), np.asarray(output), "tokens", "made", "none", max_new_tokens=cap)
    return Workload(dataset, np.arange(len(dataset)), np.asarray(arrival, dtype=float))


def simulate(
    workload, cost, *, policy=None, seqs=256, budget=512, pool=16 * 4096, max_model_len=8192, clip=False, cap=None, **context
):
    window = context.get("window") or Window()
    clock, recorder = SimulatedClock(), Recorder(window=(window.begin, window.end))
    scheduler = Scheduler(
        policy or FCFS(), Chunked(), Paged(pool), recompute(), max_num_seqs=seqs, token_budget=budget,
        max_model_len=max_model_len, clip=clip,
    )  # fmt: skip
    source = Arrivals(workload)
    executor = SimulatedExecutor(clock, cost, workload.output_len.tolist())
    try:
        serve(source if cap is None else Capped(source, cap), scheduler, executor, clock, recorder)
    except CapReached as reached:
        recorder.cut_off(scheduler, reached.now)
    return build(recorder, workload, cost=cost, token_budget=budget, **context)


def table(**columns):
    """A requests table; what is not given is a finished request of 10 + 10 tokens that came at 0 and started at once."""
    n = len(next(iter(columns.values())))
    base = {
        "arrival": 0.0, "first_scheduled": columns.get("arrival", 0.0), "first_token": NAN, "finish": NAN, "prompt_len": 10,
        "output_len": 10, "max_new_tokens": 100, "num_preemptions": 0, "recomputed": 0, "status": "finished", "client": None,
        "censored": False,
    }  # fmt: skip
    return pd.DataFrame({name: np.broadcast_to(columns.get(name, default), (n,)) for name, default in base.items()})


# --- cases ------------------------------------------------------------------------------------------------------------


def test_m3_one_token_has_no_tpot():
    run = simulate(work([10, 10], [1, 3], [0, 5]), Affine(0.1, 0, 0, 0), slo={"tpot": 0.01})
    m = run.metrics
    assert m["tpot_n"] == 1 and m["tpot_undefined"] == 1 and m["tpot_mean"] == pytest.approx(0.1)
    assert m["attainment_tpot_n"] == 1 and m["attainment"] == 0.0 and m["attainment_n"] == 1  # n = 1 is not "met"


def test_m3_no_output_breaks_nothing():
    m = measure(table(output_len=[0, 1], first_token=[NAN, 1.0], finish=[1.0, 1.0])).metrics
    assert m["tpot_n"] == 0 and m["tpot_undefined"] == 2 and m["tpot_mean"] is None and m["normalised_latency_n"] == 1


def test_m4_itl_has_no_ttft_in_it():
    run = simulate(work([10], [3], [0]), Affine(0.1, 0, 0, 0.09))
    assert run.metrics["ttft_mean"] == pytest.approx(1.0)
    assert run.metrics["itl_n"] == 2 and run.metrics["itl_mean"] == pytest.approx(0.1)
    assert run.itl.least == pytest.approx(0.1) and run.itl.greatest == pytest.approx(0.1)
    assert run.metrics["tpot_mean"] == pytest.approx(0.1)


def test_m5_mean_tpot_and_token_weighted_itl_are_two_things():
    """r1: one gap of 1.0 s; r2: nine gaps of 0.1 s."""

    class Slow(Affine):
        def decode_line(self, num_rows, context):
            return (1.0, 0.0, math.inf) if context > 900 else (0.1, 0.0, 900)

    m = simulate(work([1000, 10], [2, 10], [0, 50], 100), Slow(0.1, 0, 0, 0), budget=2048).metrics
    assert m["tpot_mean"] == pytest.approx(0.55)
    assert m["itl_n"] == 10 and m["itl_mean"] == pytest.approx(0.19)


def test_m8_output_counts_what_was_generated():
    limits = {"max_model_len": 100, "seqs": 4}
    clipped = simulate(work([90], [50], [0], cap=50), Affine(0.1, 0, 0, 0), clip=True, **limits)
    assert clipped.requests["output_len"].tolist() == [10] and clipped.requests["reason"].tolist() == ["length"]
    assert clipped.requests["max_new_tokens"].tolist() == [10]
    assert clipped.metrics["output_tokens_per_s"] == pytest.approx(10 / 1.0)
    refused = simulate(work([90], [50], [0], cap=50), Affine(0.1, 0, 0, 0), **limits)
    assert refused.requests["status"].tolist() == ["rejected"] and refused.metrics["num_rejected"] == 1
    assert "90" in refused.requests["reason"][0] and "100" in refused.requests["reason"][0]


def m9():
    ttft = np.array([0.4] * 6 + [0.9, 0.4, NAN, 0.4])
    tpot = np.array([0.05] * 6 + [0.05, 0.2, NAN, NAN])
    return table(
        first_token=ttft, finish=ttft + 9 * tpot, status=["finished"] * 8 + ["failed", "unfinished"],
        output_len=[10] * 8 + [0, 3],
    )  # fmt: skip


def test_m9_goodput_needs_every_slo_and_prints_its_denominators():
    got = measure(m9(), run_end=10.0, slo={"ttft": 0.5, "tpot": 0.2 / 2})
    m = got.metrics
    assert m["goodput_rps"] == pytest.approx(0.6) and m["num_met"] == 6
    # the cut-off one, 9.6 s after its first token, can still make 0.1 s a token over its 100: it is undecided
    assert m["attainment"] == pytest.approx(6 / 9) and m["attainment_n"] == 9 and m["attainment_undecided"] == 1
    assert m["attainment_ttft"] == pytest.approx(7 / 9) and m["attainment_tpot"] == pytest.approx(7 / 9)
    assert m["attainment_ttft_n"] == m["attainment_tpot_n"] == 9 and m["num_failed"] == 1 and m["num_unfinished"] == 1
    assert m["goodput_tokens_per_s"] == pytest.approx(6.0)


def test_m9_a_cut_off_request_that_has_missed_counts_against():
    got = measure(m9(), run_end=10.0, slo={"ttft": 0.3}).metrics
    assert got["attainment_n"] == 10 and got["attainment_undecided"] == 0 and got["num_met"] == 0
    got = measure(m9(), run_end=10.0, slo={"ttft": 0.5, "e2e": 9.0}).metrics
    assert got["attainment_n"] == 10 and got["attainment_e2e_n"] == 10 and got["num_met"] == 7


def test_m9_requests_without_a_target_are_not_met():
    got = measure(m9(), run_end=10.0)
    assert got.metrics["goodput_rps"] is None and got.flags["goodput_rps"] == "no SLO" and got.metrics["num_met"] == 0
    some = measure(m9(), run_end=10.0, slo={"ttft": np.where(np.arange(10) < 2, 0.5, NAN)}).metrics
    assert (some["attainment"], some["attainment_n"]) == (1.0, 2)  # the failed one has no target either
    with pytest.raises(ValueError, match="choose of ttft, tpot, e2e"):
        measure(m9(), slo={"tbt": 1.0})


def test_m9_rejections_count_against_and_client_aborts_apart():
    status = ["finished", "rejected", "aborted", "timeout"]
    got = measure(
        table(status=status, first_token=[0.1, NAN, 0.1, 0.1], finish=[0.2, NAN, NAN, NAN]), run_end=1.0, slo={"ttft": 1.0}
    ).metrics
    assert (got["attainment"], got["attainment_n"]) == (pytest.approx(1 / 3), 3) and got["num_aborted"] == 1


def m10():
    arrival = np.arange(20.0)
    return table(arrival=arrival, first_token=arrival + 0.5, finish=arrival + 1.5, output_len=[2] * 20)


def test_m10_warm_up_and_cool_down_are_cut_by_scheduled_time():
    requests = m10()
    cut = window(requests["arrival"].to_numpy(), load=0.5, rate=1.0, warm_up=5, cool_down=5)
    assert (cut.begin, cut.end) == (5.0, 15.0) and cut.horizon == 20.0
    m = measure(requests, window=cut).metrics
    assert m["e2e_n"] == m["num_counted"] == 10 and m["e2e_mean"] == pytest.approx(1.5)
    assert m["output_tokens_per_s"] == pytest.approx((10 + 10) / 10)  # first tokens 5.5 .. 14.5, last ones 5.5 .. 14.5
    assert m["requests_per_s"] == pytest.approx(1.0)
    assert m["arrival_rps"] == pytest.approx(1.0) and m["arrival_cv"] == 0.0


def test_m10_token_events_come_from_the_steps_where_there_are_steps():
    workload = work([10] * 20, [2] * 20, np.arange(20.0))
    cut = window(workload.arrival, load=0.5, rate=1.0, warm_up=5, cool_down=5)
    m = simulate(workload, Affine(0.4, 0, 0, 0), window=cut).metrics
    assert m["e2e_n"] == 10 and m["output_tokens_per_s"] == pytest.approx(2.0) and m["itl_n"] == 10
    assert m["busy_share"] == pytest.approx(0.8)


def test_m10_a_share_is_a_share_of_requests_and_never_a_count():
    arrival = np.arange(20.0)
    cut = window(arrival, load=0.5, rate=1.0, warm_up=0.1, unit="share")
    assert (~cut.counts(arrival)).sum() == 2
    with pytest.raises(ValueError, match=r"0.1 for 10 %"):
        window(arrival, load=0.5, warm_up=10, unit="share")
    with pytest.raises(ValueError, match="no request of 20"):
        window(arrival, load=0.5, rate=1.0, warm_up=15, cool_down=15)
    with pytest.raises(ValueError, match="leave none of 20"):
        window(arrival, load=0.5, warm_up=0.5, cool_down=0.5, unit="share")


def test_who_ended_after_the_last_arrival_is_counted():
    """Arrivals at 0, 1, 2, 3 s, ends at 1, 2.5, 9, 4 s, three counted: one ended after 3 s, with 7 of 9.5 s of E2E."""
    frame = table(arrival=[0.0, 1.0, 2.0, 3.0], first_token=[0.5, 1.5, 3.5, 3.5], finish=[1.0, 2.5, 9.0, 4.0])
    m = measure(frame, window=Window(0.0, 3.0, False), run_end=9.0).metrics
    assert m["num_after_arrivals"] == 1 and m["after_arrivals_share"] == pytest.approx(7 / 9.5)


def test_at_load_one_and_above_everything_counts_and_the_horizon_is_said():
    arrival = np.arange(20.0)
    cut = window(arrival, load=1.2, rate=2.0, warm_up=5, cool_down=5)
    assert cut.whole and cut.counts(arrival).all() and cut.horizon == 10.0
    assert "horizon N / rate = 10 s" in cut.describe(33.0) and cut.duration(33.0) == 33.0


def test_below_load_one_without_a_cut_all_count():
    arrival = np.arange(20.0) * 1.1  # the last arrives after N / rate
    cut = window(arrival, load=0.9, rate=1.0)
    assert not cut.whole and cut.counts(arrival).all() and cut.duration(99.0) == pytest.approx(20.9)


def test_m11_tails_of_few_requests_are_null_with_n():
    got = measure(table(first_token=[1.0, 2, 3, 4, 100], finish=[1.0, 2, 3, 4, 100]))
    assert got.metrics["ttft_p99"] is None and got.flags["ttft_p99"] == "n=5, p99 wants 100"
    assert got.metrics["ttft_p50"] == 3.0 and got.metrics["ttft_n"] == 5 and got.metrics["ttft_p999"] is None


def test_m12_a_run_that_was_stopped_hides_nobody():
    """One server, service 1 s, 10 arrivals a second for 10 s, stopped at 10 s."""
    run = simulate(work([10] * 100, [1] * 100, np.arange(100) / 10), Affine(1.0, 0, 0, 0), seqs=1, cap=10.0, slo={"e2e": 2.0})
    m, flags = run.metrics, run.summary["flags"]
    assert (m["num_finished"], m["num_unfinished"], m["num_counted"]) == (10, 90, 100)
    assert m["e2e_n"] == m["wait_n"] == m["ttft_n"] == 100
    for name in ("e2e", "wait", "ttft", "tpot", "normalised_latency", "slowdown"):
        assert m[f"{name}_mean"] is None and "90 of" in flags[f"{name}_mean"]
    assert m["wait_share"] is None
    last_seen = run.requests["finish"].fillna(10.0) - run.requests["arrival"]
    assert m["e2e_p50"] == pytest.approx(last_seen.median()) and flags["e2e_p50"].startswith(">=")
    assert m["max_wait"] == pytest.approx(10.0 - 1.0) and flags["max_wait"].startswith(">=")
    # done within 2 s: arrivals 0.0 and 0.1 (ends at 2.0); 10 finished and 80 cut off more than 2 s old are decided
    assert m["num_met"] == 2 and m["attainment_undecided"] == (run.requests["arrival"][10:] >= 8.0).sum()
    assert m["attainment_n"] == 100 - m["attainment_undecided"]


def test_n5_the_summary_gives_percentiles_beside_every_mean():
    m = measure(table(first_token=[1.0] * 3, finish=[2.0] * 3)).metrics
    for name in ("ttft", "tpot", "itl", "e2e", "normalised_latency", "wait", "slowdown"):
        assert {f"{name}_{key}" for key in ("mean", "p50", "p99", "p999")} <= set(m)
    assert {
        "max_wait", "overtaking_max", "jain", "goodput_rps", "attainment", "requests_per_s", "output_tokens_per_s",
        "total_tokens_per_s", "busy_share", "preemptions", "recompute_tax", "kv_use_mean", "prefix_hit_share",
        "fallback_share", "num_finished", "num_rejected", "num_unfinished", "wait_share",
    } <= set(m)  # fmt: skip


def test_every_null_has_its_reason():
    for got in (measure(m9(), run_end=10.0), measure(m10()), measure(table(finish=[NAN], status=["rejected"]))):
        assert {k for k, v in got.metrics.items() if v is None} <= set(got.flags)


# --- laws -------------------------------------------------------------------------------------------------------------


def poisson(n, rate, seed=0, mean=100):
    g = np.random.default_rng(seed)
    output = np.minimum(np.maximum(g.exponential(mean, n).astype(int), 1), 2000)
    return work(g.integers(5, 500, n), output, np.cumsum(g.exponential(1 / rate, n)))


def test_components_add_up():
    run = simulate(poisson(400, 8.0), COST, policy=SRPT(), seqs=16, pool=16 * 400)
    r = run.requests
    waiting, prefill = r["first_scheduled"] - r["arrival"], r["first_token"] - r["first_scheduled"]
    decode = r["finish"] - r["first_token"]
    assert (waiting >= 0).all() and (prefill > 0).all() and (decode >= 0).all()
    assert np.allclose(waiting + prefill + decode, r["finish"] - r["arrival"], rtol=0, atol=1e-9)
    m = run.metrics
    assert m["wait_share"] == pytest.approx(waiting.sum() / (r["finish"] - r["arrival"]).sum())
    assert 0 < m["wait_share"] < 1 and m["preemptions"] == r["num_preemptions"].sum() > 0
    assert m["max_wait"] == waiting.max() and 0 < m["recompute_tax"] < 1
    assert m["itl_mean"] * m["itl_n"] == pytest.approx(decode.sum())


def test_littles_law():
    """Mean number in system, from the steps, = arrival rate x mean E2E, from the requests."""
    run = simulate(poisson(3000, 9.0), COST, seqs=64)
    steps, requests = run.steps, run.requests
    ends = np.sort(requests["finish"])
    leaving = np.searchsorted(ends, steps["end"], "right") - np.searchsorted(ends, steps["end"], "left")
    area = ((steps["num_waiting"] + steps["num_running"] + leaving) * (steps["end"] - steps["start"])).sum()
    horizon = run.summary["window"]["run_end"]
    rate = len(requests) / horizon
    assert area / horizon == pytest.approx(rate * run.metrics["e2e_mean"], rel=0.02)


def test_throughput_and_window_agree_with_counts():
    run = simulate(poisson(300, 5.0), COST)
    m, seconds = run.metrics, run.summary["window"]["seconds"]
    assert m["requests_per_s"] * seconds == pytest.approx(300)
    assert m["output_tokens_per_s"] * seconds == pytest.approx(run.requests["output_len"].sum())
    total = (run.requests["output_len"] + run.requests["prompt_len"]).sum()
    assert m["total_tokens_per_s"] * seconds == pytest.approx(total)
    assert 0 < m["busy_share"] <= 1 and 0 < m["kv_use_mean"] < 1


@given(st.integers(1, 1500), st.integers(1, 80), st.sampled_from([64, 100, 512]))
def test_idle_latency_is_that_of_a_lone_request(prompt, output, budget):
    class Kinked(Affine):
        def decode_line(self, num_rows, context):
            a, c, _ = super().decode_line(num_rows, context)
            return (a, c, 333.5) if context < 333.5 else (a - 333.5 * c, 2 * c, math.inf)

    cost = Kinked(8e-3, 2e-5, 1e-6, 6e-5, 1e-8)
    run = simulate(work([prompt], [output], [0.0]), cost, budget=budget, seqs=1)
    alone = idle_latency(cost, [prompt], [output], budget)
    assert alone[0] == pytest.approx(run.requests["finish"][0], rel=1e-9)
    assert run.metrics["slowdown_mean"] == pytest.approx(1.0)


def test_idle_latency_of_many_equals_that_of_each():
    g = np.random.default_rng(0)
    p, n = g.integers(1, 3000, 50), g.integers(1, 500, 50)
    each = [idle_latency(COST, [a], [b], 512)[0] for a, b in zip(p, n, strict=True)]
    assert np.allclose(idle_latency(COST, p, n, 512), each, rtol=1e-12)
    assert idle_latency(COST, [], [], 512).shape == (0,)
    with pytest.raises(ValueError, match="at least 1"):
        idle_latency(COST, [0], [1], 512)


def test_nobody_is_faster_than_alone():
    run = simulate(poisson(300, 8.0), COST)
    found = samples(run.requests, 1e9, lambda p, n: idle_latency(COST, p, n, 512))
    assert found["slowdown"].values.min() >= 1 - 1e-9 and found["slowdown"].values.max() > 1.1


@given(
    st.lists(st.sampled_from(["finished", "unfinished", "failed", "timeout", "rejected", "aborted"]), min_size=1, max_size=40)
)
def test_attainment_and_counts_balance(statuses):
    n = len(statuses)
    done = np.array([s == "finished" for s in statuses])
    first = np.where(done, 0.1 + np.arange(n) * 0.05, NAN)
    m = measure(table(status=statuses, first_token=first, finish=first + 1), run_end=0.4, slo={"ttft": 0.5}).metrics
    assert sum(m[f"num_{s}"] for s in ("finished", "unfinished", "failed", "timeout", "rejected", "aborted")) == n
    assert m["attainment_n"] + m["attainment_undecided"] + m["num_aborted"] == n
    assert m["num_met"] <= m["num_finished"]


def test_jain_is_one_for_one_client_and_less_for_unequal_ones():
    same = table(client=["a", "a"], first_token=[1.0, 9.0], finish=[2.0, 10.0])
    other = table(client=["a", "b"], first_token=[1.0, 9.0], finish=[2.0, 10.0])
    assert measure(same).metrics["jain"] == 1.0
    assert measure(other).metrics["jain"] == pytest.approx((0.5 + 0.1) ** 2 / (2 * (0.25 + 0.01)))


def test_slowdown_by_decile_of_the_output_length():
    """Ten requests of 1 to 10 tokens that come at 0 and end at 10 s, alone 1 s a token: slowdowns 10, 5, ..., 1."""
    lens = np.arange(1, 11)
    rows = table(output_len=lens, first_token=np.full(10, 5.0), finish=np.full(10, 10.0))
    m = measure(rows, idle=lambda prompt, output: output.astype(float)).metrics
    assert [m[f"slowdown_d{k}_mean"] for k in range(1, 11)] == pytest.approx((10 / lens).tolist())
    two = table(output_len=[1, 1, 2, 2], first_token=[1.0, 1.0, 1.0, 1.0], finish=[2.0, 4.0, 2.0, 4.0])
    found = measure(two, idle=lambda prompt, output: output.astype(float))
    values = [found.metrics[f"slowdown_d{k}_mean"] for k in range(1, 11)]
    assert [v for v in values if v is not None] == [3.0, 1.5]  # equal lengths stay together
    assert found.flags["slowdown_d2_mean"] == "no request of this decile"


def test_slowdown_by_decile_hides_nobody_who_has_not_ended():
    rows = table(output_len=[1, 2], status=["finished", "unfinished"], first_token=[1.0, 1.0], finish=[2.0, NAN])
    found = measure(rows, run_end=9.0, idle=lambda prompt, output: output.astype(float))
    assert found.metrics["slowdown_d1_mean"] is None and found.flags["slowdown_d1_mean"] == "1 of 2 have not ended"
    assert measure(rows, run_end=9.0).flags["slowdown_d1_mean"].startswith("no cost model")
