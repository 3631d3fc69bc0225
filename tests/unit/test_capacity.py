"""Capacity: the search, the stability test, the criterion, what a failing probe does, fleets and cost."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import open_dict

from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.experiments import job
from lengthwise.experiments.bisection import bisect, num_probes
from lengthwise.experiments.capacity import FAILED, FILE, fleet, search
from lengthwise.experiments.capacity_table import lines, read_capacity, table
from lengthwise.experiments.composer import plain
from lengthwise.experiments.criterion import Criterion, Verdict, judge
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.probes import Probes, SearchFailed
from lengthwise.experiments.run import Run
from lengthwise.experiments.simulate import simulate
from lengthwise.experiments.stability import Growth, allowed, growth, in_system, is_steady, pooled
from lengthwise.experiments.token_cost import num_gpus, read_price, token_cost

# An engine of 8 slots whose step takes 10 ms + 2 ms a row; answers of 20 tokens on average; three waits of it are the SLO.
TINY = (
    "hardware=unit", "hardware.cost.decode_base=0.01", "hardware.cost.per_row=0.002", "workload.num_rows=400",
    "workload.prompt_len.mean=20", "workload.output_len.mean=20", "limits.max_num_seqs=8", "num_requests=300",
    "slo.ttft=0.3", "slo.tpot=null", "wandb=off",
)  # fmt: skip


def config(out, *overrides):
    """What `lengthwise capacity TINY OVERRIDES` would search with."""
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        made = hydra_compose("capacity", [*TINY, f"out={out}", *overrides], return_hydra_config=True)
    choices = dict(made.hydra.runtime.choices)
    with open_dict(made):
        del made["hydra"]
    return plain(made, choices)


def quiet(text):
    """No line for a probe."""


# --- bisection --------------------------------------------------------------------------------------------------------


@given(
    edge=st.floats(0.02, 400.0),
    lo=st.floats(0.01, 10.0),
    ratio=st.floats(1.1, 1000.0),
    tolerance=st.sampled_from((0.001, 0.01, 0.02, 0.3)),
)
def test_bisection_finds_the_edge_of_a_monotone_function_in_the_probes_it_promised(edge, lo, ratio, tolerance):
    asked = []

    def passes(rate):
        asked.append(rate)
        return rate <= edge

    found = bisect(passes, lo, lo * ratio, tolerance)
    assert len(asked) == len(set(asked)) <= num_probes(lo, lo * ratio, tolerance) + 2
    if found.kind == "none":
        assert found.lo == 0 and found.hi == pytest.approx(lo, rel=1e-5) and found.hi > edge
    elif found.kind == "at_least":
        assert found.lo <= edge and found.lo == pytest.approx(lo * ratio, rel=1e-5) and found.hi == math.inf
    else:
        assert found.lo <= edge < found.hi
        assert found.hi / found.lo <= 1 + tolerance
        assert {found.lo, found.hi} <= set(asked)


def test_bisection_raises_hi_while_it_passes_and_then_says_at_least():
    asked = []
    found = bisect(lambda rate: asked.append(rate) or rate < 50, 1.0, 10.0, 0.05, raises=3)
    assert asked[:4] == [10.0, 20.0, 40.0, 80.0] and 1.0 not in asked  # a pass at hi says enough about lo
    assert found.lo < 50 <= found.hi and found.kind == "between"
    found = bisect(lambda rate: True, 1.0, 10.0, 0.05, raises=2)
    assert (found.lo, found.hi, found.kind) == (40.0, math.inf, "at_least")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lo": 0.0}, "0 < lo < hi"),
        ({"lo": 20.0}, "lo 20.0 and hi 10.0"),
        ({"hi": math.inf}, "hi inf"),
        ({"tolerance": 0.0}, "tolerance 0.0 must be"),
        ({"tolerance": math.nan}, "tolerance nan"),
        ({"raises": -1}, "raises -1"),
    ],
)
def test_bisection_refuses_what_cannot_be_searched(change, says):
    with pytest.raises(ValueError, match=says):
        bisect(lambda rate: True, **{"lo": 1.0, "hi": 10.0, "tolerance": 0.02, **change})


def test_an_exception_of_a_probe_goes_through_bisection():
    def passes(rate):
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        bisect(passes, 1.0, 10.0, 0.02)


# --- stability --------------------------------------------------------------------------------------------------------


def made_run(arrival, ended, begin=None, end=None, tokens=10, **metrics):
    """A run of which only arrivals, ends and lengths are known."""
    ended = np.asarray(ended, float)
    status = np.where(np.isnan(ended), "unfinished", "finished")
    frame = pd.DataFrame({"arrival": np.asarray(arrival, float), "ended": ended, "output_len": tokens, "status": status})
    return Run(frame, pd.DataFrame(), {"window": {"begin": begin, "end": end}, "metrics": {"arrival_cv": 1.0, **metrics}})


def test_in_system_by_hand():
    """Three come at 0, 1 and 2 s; the first leaves at 1 s, before the second is counted; the third never does."""
    assert in_system([0, 1, 2], [1, 3, math.nan]).tolist() == [1, 1, 2]
    assert in_system([2, 0, 1], [math.nan, 1, 3]).tolist() == [1, 1, 2]
    assert in_system([0, 1, 2], [1, 3, math.nan], [5, 7, 11]).tolist() == [5, 7, 18]


def test_growth_is_the_share_of_what_comes_that_stays_behind():
    at = np.arange(400) / 10.0  # 10 a second, each of the one server's services 0.125 s: 8 a second leave
    found = growth(made_run(at, 0.125 * (np.arange(400) + 1)))
    for kind in ("requests", "tokens"):
        assert found[kind].share == pytest.approx(0.2, abs=0.01) and found[kind].arrivals == 400
        assert not is_steady([found[kind]])
    assert is_steady([growth(made_run(at, at + 0.05))["requests"]])
    assert growth(made_run(at, np.full(400, math.nan)))["requests"].share == pytest.approx(1.0)


def test_a_few_long_ones_left_behind_show_in_their_tokens():
    """Shortest-first in overload: one request in a hundred waits for ever, and is 30 times as long as the others."""
    at, last = np.arange(10_000.0), np.arange(10_000) % 100 == 99
    found = growth(made_run(at, np.where(last, math.nan, at + 0.5), tokens=np.where(last, 300, 10)))
    assert is_steady([found["requests"]]) and found["requests"].share == pytest.approx(0.01, abs=0.001)
    ended = np.where(last, 20_000.0, at + 0.5)  # they end when nobody else comes
    found = growth(made_run(at, ended, tokens=np.where(last, 300, 10)))
    assert found["tokens"].share == pytest.approx(300 / 1290, rel=0.02) and not is_steady([found["tokens"]])
    verdict = judge(
        [made_run(at, ended, tokens=np.where(last, 300, 10), attainment=1.0, num_met=1, attainment_n=1)], Criterion()
    )
    assert not verdict.passes and verdict.reasons[0].startswith("not steady: what is in the system grows, tokens by 23")


def test_x10_filling_up_an_empty_engine_is_not_growth_once_the_warm_up_is_cut():
    """Everybody stays 50 s, one comes a second: it grows for 50 s and never again."""
    at = np.arange(300.0)
    assert growth(made_run(at, at + 50.0))["requests"].share > 0.05
    assert growth(made_run(at, at + 50.0, begin=60.0, end=270.0))["requests"].share == pytest.approx(0.0, abs=1e-9)


def test_seeds_are_pooled_and_chance_is_allowed_for():
    """One of three seeds may clump; few requests resolve less; more of them resolve more."""
    calm, clump = Growth(0.0, 1000), Growth(0.05, 1000)
    assert not is_steady([clump]) and is_steady([clump, calm, calm])
    assert allowed(Growth(0.0, 100)) == pytest.approx(0.1)  # sqrt(100) of 100
    assert allowed(Growth(0.0, 100, cv=3.0)) == pytest.approx(0.3)
    assert allowed(pooled([calm] * 30)) == 0.02
    assert not is_steady([Growth(0.9, 100)])  # whatever chance may do, nearly nobody left


# --- M12 --------------------------------------------------------------------------------------------------------------


def one_server(**options):
    """One slot, 1 s a request, 10 requests/s evenly for 10 s."""
    cost = Affine(0.0, 0.0, 0.0, 0.0, decode_base=1.0)
    hardware = Hardware("one", "none", 1e9, 0, 0, 1, cost, {"range": "everywhere"}, memory_share=1.0)
    rows = Dataset("made_up", np.ones(100, np.int64), np.full(100, 2, np.int64), "tokens", "a generator", "none")
    slo = {"ttft": 2.0, "tpot": None, "e2e": None}
    return simulate(
        workload=rows,
        hardware=hardware,
        arrivals="deterministic",
        rate=10.0,
        num_requests=100,
        max_num_seqs=1,
        slo=slo,
        **options,
    )


def test_m12_a_run_stopped_at_its_time_limit_is_over_slo():
    """10 complete, 90 unfinished are shown, percentiles count the unfinished, and a search takes the cell for over its SLO."""
    run = one_server(window={"cap": 10.0})
    metrics = run.metrics
    assert (metrics["num_finished"], metrics["num_unfinished"], metrics["num_counted"]) == (10, 90, 100)
    assert run.summary["window"]["run_end"] == 10.0
    assert metrics["wait_mean"] is None and "have not ended" in run.summary["flags"]["wait_mean"]
    assert metrics["ttft_p50"] >= 4.0 and run.summary["flags"]["ttft_p50"].startswith(">=")
    verdict = judge([run], Criterion(target=0.01))  # a target that nearly anything meets
    assert not verdict.passes and not verdict.steady
    assert verdict.growth == pytest.approx({"requests": 0.9, "tokens": 0.9}, abs=0.02)
    assert "not steady" in verdict.reasons[0]
    strict = judge([run], Criterion(target=0.99))
    assert "attainment" in strict.reasons[0] and len(strict.reasons) == 2


def test_m12_without_a_limit_the_same_cell_is_no_better():
    """All 100 end, 90 s late: the run that goes on until it is empty is not steady either."""
    run = one_server()
    assert run.metrics["num_finished"] == 100
    verdict = judge([run], Criterion(target=0.01))
    assert not verdict.passes and verdict.growth["requests"] == pytest.approx(0.9, abs=0.02)


def test_a_cap_counts_who_came_before_it_and_nobody_else():
    run = one_server(window={"cap": 4.5})  # the step in flight ends at 5 s
    assert run.summary["window"]["run_end"] == 5.0
    assert run.metrics["num_counted"] == 50 and run.metrics["num_finished"] == 5
    assert one_server(window={"cap": 1000.0}).requests.equals(one_server().requests)


# --- criterion --------------------------------------------------------------------------------------------------------


def test_attainment_is_pooled_over_the_requests_of_all_seeds():
    at = np.arange(100.0)
    runs = [
        made_run(at, at + 0.5, attainment=0.9, num_met=90, attainment_n=100, num_rejected=3),
        made_run(at, at + 0.5, attainment=1.0, num_met=300, attainment_n=300, num_rejected=0),
    ]
    verdict = judge(runs, Criterion(target=0.98))
    assert verdict.attainment == pytest.approx(0.975) and verdict.by_seed == (0.9, 1.0)
    assert verdict.reasons == ("attainment 0.975 < 0.98, 3 requests rejected at the door",)
    assert judge(runs, Criterion(target=0.97)).passes


def test_percentiles_are_those_of_all_requests_together():
    runs = [simulate(rate=20.0, num_requests=200, max_num_seqs=64, seed=seed) for seed in (0, 1)]
    first = np.concatenate([(run.requests["first_token"] - run.requests["arrival"]).to_numpy() for run in runs])
    limit = float(np.quantile(first, 0.99))
    asked = {"ttft_p99": limit * 1.0001, "itl_p99": 1.0, "e2e_p50": 60.0}
    verdict = judge(runs, Criterion(target=None, at_most=asked))
    assert verdict.percentiles["ttft_p99"] == pytest.approx(limit)
    assert verdict.passes == verdict.steady
    over = judge(runs, Criterion(target=None, at_most={"ttft_p99": limit * 0.999}))
    assert not over.passes and "ttft_p99" in over.reasons[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target": None}, "nothing to hold"),
        ({"target": 0.0}, "criterion.target=0.0"),
        ({"target": 1.5}, "criterion.target=1.5"),
        ({"at_most": {"ttfs_p99": 1.0}}, "at_most.ttfs_p99: choose of ttft_p50"),
        ({"at_most": {"ttft_p95": 1.0}}, "at_most.ttft_p95"),
        ({"at_most": {"ttft_p99": -1.0}}, "ttft_p99=-1.0"),
        ({"limit": 0}, "criterion.growth=0"),
    ],
)
def test_a_criterion_that_asks_for_nothing_possible_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Criterion(**arguments)


def test_what_cannot_be_said_is_an_error_and_not_a_verdict():
    at = np.arange(50.0)
    with pytest.raises(ValueError, match="has an SLO"):
        judge([made_run(at, at + 1, attainment=None)], Criterion())
    few = simulate(rate=5.0, num_requests=50, max_num_seqs=64)
    with pytest.raises(ValueError, match="p99 wants 100; raise num_requests"):
        judge([few], Criterion(target=None, at_most={"ttft_p99": 1.0}))


# --- the search -------------------------------------------------------------------------------------------------------


def brute_force(cfg, rates, seeds):
    """The greatest rate of the grid below which every one holds, judged from the requests alone."""
    last = 0.0
    for rate in rates:
        met = asked = counted = 0
        grown = {"number": 0.0, "tokens": 0.0}
        for seed in seeds:
            run = job.run_cell({**cfg, "rate": rate, "seed": seed}, None)
            window = run.summary["window"]
            frame = run.requests[(run.requests["arrival"] >= window["begin"]) & (run.requests["arrival"] < window["end"])]
            met += int((frame["first_token"] - frame["arrival"] <= cfg["slo"]["ttft"]).sum())
            asked += len(frame)
            counted += len(frame)
            here = [(run.requests["arrival"] <= at) & (run.requests["finish"] > at) for at in frame["arrival"]]
            tokens = run.requests["output_len"]
            for kind, values in (
                ("number", [x.sum() for x in here]),
                ("tokens", [tokens[x].sum() / tokens.mean() for x in here]),
            ):
                grown[kind] += np.polyfit(np.arange(len(here)), values, 1)[0] * len(here)
            spread = frame["output_len"].std() / frame["output_len"].mean()
        chance = {"number": math.sqrt(counted), "tokens": math.sqrt(counted * (1 + spread**2))}
        if met < 0.99 * asked or any(grown[kind] > max(0.02 * counted, chance[kind]) for kind in grown):
            return last
        last = rate
    return last


def test_the_search_finds_what_a_scan_over_a_fine_grid_finds(tmp_path):
    cfg = config(tmp_path, "search.tolerance=0.02", "search.confirm=[]", "arrivals.normalised=true")
    told = []
    answer = search(cfg, told.append)
    assert answer["kind"] == "between" and answer["hi"] / answer["lo"] <= 1.02
    assert answer["lo"] == answer["rate"] and answer["searched"]["lo"] < answer["rate"] < answer["searched"]["hi"]
    assert len(answer["probes"]) == num_probes(answer["searched"]["lo"], answer["searched"]["hi"], 0.02) + 2
    assert sum(line.startswith("probe ") for line in told) == len(answer["probes"])
    cell = {key: value for key, value in cfg.items() if key in ("slo", "window", "choices") or not isinstance(value, list)}
    scanned = brute_force(cell, answer["rate"] * 1.01 ** np.arange(-8, 9), [0, 1, 2])
    assert abs(math.log(answer["rate"] / scanned)) <= math.log(1.02) + math.log(1.01) + 1e-9
    found = read_capacity(tmp_path)
    assert found["rate"].tolist() == [answer["rate"]] and found["policy"].tolist() == ["fcfs"]
    assert found["attainment"][0] >= 0.99 and found["num_seeds"][0] == 3


def test_a_repeated_search_finds_its_probes_and_gives_the_same_bytes(tmp_path, monkeypatch):
    cfg = config(tmp_path, "search.tolerance=0.3", "search.confirm=[]")
    folder = tmp_path / "capacity" / search(cfg, quiet)["folder"]
    first = (folder / FILE).read_bytes()
    monkeypatch.setattr(job, "run_cell", None)  # nothing is simulated again
    told = []
    search(cfg, told.append)
    assert (folder / FILE).read_bytes() == first
    assert all(line.endswith("[found]") for line in told if line.startswith("probe "))
    finer = config(tmp_path, "search.tolerance=0.01", "search.confirm=[]")
    with pytest.raises(SearchFailed):  # it would have to simulate more
        search(finer, quiet)


def test_x10_a_simulator_that_fails_at_the_third_probe_fails_the_search(tmp_path, monkeypatch):
    """No number: not the last good value, not a file that could be taken for an answer."""
    seen, real = [], job.run_cell

    def failing(cfg, prepared):
        if cfg["rate"] not in seen:
            seen.append(cfg["rate"])
        if len(seen) == 3:
            raise RuntimeError("planted")
        return real(cfg, prepared)

    monkeypatch.setattr(job, "run_cell", failing)
    cfg = config(tmp_path, "search.tolerance=0.1")
    told = []
    with pytest.raises(SearchFailed, match=r"search failed at probe 3: .* requests/s, seed 0: RuntimeError: planted"):
        search(cfg, told.append)
    assert sum(line.startswith("probe ") for line in told) == 2
    assert not list(tmp_path.rglob(FILE))
    (note,) = tmp_path.rglob(FAILED)
    assert "search failed at probe 3" in note.read_text()
    with pytest.raises(ValueError, match=r"no capacity\.json"):
        read_capacity(tmp_path)
    monkeypatch.setattr(job, "run_cell", real)
    answer = search(cfg, told.append)  # the same command again: two probes are found, the note is gone
    assert answer["kind"] == "between" and not list(tmp_path.rglob(FAILED))
    assert [line.endswith("[found]") for line in told if line.startswith("probe ")][2:5] == [True, True, False]


def test_a_criterion_that_cannot_be_judged_fails_the_search_too(tmp_path):
    cfg = config(tmp_path, "slo.ttft=null")
    with pytest.raises(SearchFailed, match=r"probe 1: .* no counted request has an SLO"):
        search(cfg, quiet)
    assert not list(tmp_path.rglob(FILE))


def test_bounds_that_do_not_hold_the_answer_are_said_so(tmp_path):
    low = search(config(tmp_path, "search.lo=100", "search.hi=200", "for_rate=10"), quiet)
    assert (low["rate"], low["kind"], low["hi"]) == (0.0, "none", 100.0)
    assert low["marks"][0].startswith("even lo = 100 requests/s fails: attainment")
    assert low["fleet"]["replicas"] is None and low["cost"]["gpu_seconds_per_million_output_tokens"] is None
    assert any("0: even 100 requests/s do not hold" in line for line in lines(low))
    high = search(config(tmp_path, "search.lo=1", "search.hi=2", "search.raises=1"), quiet)
    assert (high["rate"], high["kind"], high["hi"]) == (4.0, "at_least", None)
    assert [row["rate"] for row in high["probes"]] == [2.0, 4.0] and "at least" in high["marks"][0]
    assert ">= 4 requests/s" in lines(high)[0]
    assert sorted(read_capacity(tmp_path)["kind"]) == ["at_least", "none"]
    assert ">=" not in table([low, high]) and "at_least" in table([low, high])


def test_an_answer_of_none_says_how_little_it_rests_on(tmp_path):
    """A few requests may seem to pile up by chance, and 0 requests/s would look like a measured capacity."""
    answer = search(config(tmp_path, "search.lo=100", "search.hi=200", "num_requests=30"), quiet)
    assert answer["kind"] == "none" and any("cannot be told from chance" in mark for mark in answer["marks"])


def test_requests_rejected_at_the_door_are_told_where_only_percentiles_are_asked(tmp_path):
    """No percentile holds them: a system that refuses half of what comes would look fast."""
    overrides = ("slo.ttft=null", "criterion.at_most={ttft_p99: 5}", "search.lo=1", "search.hi=2", "search.raises=0")
    answer = search(config(tmp_path, *overrides, "limits.max_model_len=60", "workload.max_new_tokens=30"), quiet)
    rejected = [mark for mark in answer["marks"] if "rejected at the door" in mark]
    assert answer["rate"] == 2.0 and len(rejected) == 1
    metrics = [json.loads(path.read_text())["metrics"] for path in tmp_path.glob("capacity/*rate2-*/summary.json")]
    assert len(metrics) == 3
    found = f"{sum(one['num_rejected'] for one in metrics)} of {sum(one['num_counted'] for one in metrics)} requests"
    assert rejected[0].startswith(found) and not found.startswith("0 ")


def test_a_table_of_searches_holds_what_was_asked_for(tmp_path):
    low = search(config(tmp_path, "search.lo=1", "search.hi=2", "search.raises=0"), quiet)
    assert "replicas" not in table([low]) and "/M output" not in table([low]).replace("GPU-s/M output", "")
    asked = ("price.per_gpu_hour=3.6", "price.date=2026-01-31", "price.currency=EUR", "for_rate=5", "gpus_per_replica=2")
    head, line = table([search(config(tmp_path, "search.lo=1", "search.hi=2", "search.raises=0", *asked), quiet)]).splitlines()
    assert "EUR/M output" in head and head.split()[-3:] == ["replicas", "fleet", "GPUs"] and line.split()[-2:] == ["3", "6"]


def test_a_pass_above_a_fail_is_reported(tmp_path, monkeypatch):
    """Nothing makes attainment monotone in the rate; two more probes look, and what they find travels with the number."""
    from lengthwise.experiments import probes

    def strange(runs, criterion):
        rate = runs[0].summary["cell"]["rate"]
        passes = rate <= 9 or 11 < rate < 13
        none = {"requests": 0.0, "tokens": 0.0}
        return Verdict(passes, True, 1.0, (1.0, 1.0), none, (none, none), none, {}, () if passes else ("planted",))

    monkeypatch.setattr(probes, "judge", strange)
    cfg = config(tmp_path, "search.lo=5", "search.hi=20", "search.tolerance=0.02", "search.confirm=[0.9,1.3]", "seeds=[0,1]")
    answer = search(cfg, quiet)
    assert answer["rate"] <= 9 < answer["hi"]
    assert answer["contradictions"] and "passes" in answer["contradictions"][0]
    assert any(mark.startswith("not monotone") for mark in answer["marks"])
    rates = [row["rate"] for row in answer["probes"]]
    assert rates[-1] == pytest.approx(answer["rate"] * 1.3, rel=1e-5)


def test_seeds_of_a_probe_in_other_processes_are_the_same_search(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    overrides = ("search.tolerance=0.3", "search.confirm=[]")
    a, b = search(config(one, *overrides), quiet), search(config(two, *overrides, "n_jobs=2"), quiet)
    assert a == b


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rate=3"], "rate=3.0: the rate is what is searched"),
        (["load=0.8"], "load=0.8"),
        (["seed=1"], r"seeds=\[0,1,2\]"),
        (["study.size=small"], "study.size=small"),
        (["seeds=[]"], r"seeds=\[\]"),
        (["seeds=[1,1]"], "names one twice"),
        (["arrivals=replay"], "arrivals=replay: they have a rate of their own"),
        (["arrivals=closed_loop"], "arrivals=closed_loop"),
        (["window.warm_up=0"], "filling up an empty engine"),
        (["search.tolerance=0"], "tolerance 0"),
        (["search.lo=5", "search.hi=5"], "0 < lo < hi"),
        (["search.lo=-1"], "search.lo=-1 must be"),
        (["search.lo_load=a"], "search.lo_load='a' must be"),
        (["search.raises=a"], "search.raises='a' must be"),
        (["search.confirm=0.9"], "search.confirm=0.9 must be a list"),
        (["search.confirm=[x]"], r"search.confirm=\['x'\] must be a list"),
        (["n_jobs=0"], "n_jobs=0 must be"),
        (["policy=srpt"], "policy=srpt needs a prediction"),
        (["price.per_gpu_hour=2"], "needs price.date"),
        (["for_rate=0"], "for_rate=0"),
        (["gpus_per_replica=0"], "gpus_per_replica=0"),
        (["name=prepared"], "name='prepared'"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_the_first_probe(tmp_path, overrides, says):
    with pytest.raises(ValueError, match=says):
        search(config(tmp_path, *overrides), quiet)
    assert not list(tmp_path.rglob("summary.json"))


def test_policies_that_need_predictions_get_them(tmp_path):
    """A learned predictor is prepared once and its hash is part of every probe."""
    cfg = config(tmp_path, "policy=sjf", "predictor=prompt_length", "predictor.num_rounds=5", "search.tolerance=0.5")
    answer = search(cfg, quiet)
    assert answer["cell"]["predictor"] == "prompt_length" and answer["provenance"]["predictor"]["num_folds"] == 5
    assert len(list((tmp_path / "prepared/predictions").glob("*/content"))) == 1


# --- fleets and cost --------------------------------------------------------------------------------------------------


def test_replicas_are_whole():
    assert fleet(10.0, None, 4) is None
    assert fleet(10.0, 100.0, 4) | {"assumes": ""} == {"for_rate": 100.0, "replicas": 10, "gpus": 40, "assumes": ""}
    assert fleet(10.0, 100.1, 1)["replicas"] == 11
    assert fleet(0.1, 0.3, 1)["replicas"] == 3  # 0.3 / 0.1 is a little above 3
    assert fleet(0.0, 5.0, 1)["replicas"] is None


def summary(seconds, output, total):
    return {"window": {"seconds": seconds}, "metrics": {"output_tokens_per_s": output, "total_tokens_per_s": total}}


def test_cost_per_million_tokens_by_hand():
    """2 GPUs, 1,000 output and 4,000 tokens in all a second: 2,000 and 500 GPU-seconds a million; at 3.6 an hour 2 and 0.5."""
    price = read_price({"per_gpu_hour": 3.6, "date": "2026-01-31", "currency": "EUR", "source": "made up"})
    found = token_cost([summary(10.0, 500.0, 2000.0), summary(10.0, 1500.0, 6000.0)], 2, price)
    assert found["gpu_seconds_per_million_output_tokens"] == pytest.approx(2000.0)
    assert found["gpu_seconds_per_million_total_tokens"] == pytest.approx(500.0)
    assert found["cost_per_million_output_tokens"] == pytest.approx(2.0)
    assert found["cost_per_million_total_tokens"] == pytest.approx(0.5)
    assert found["price"] == {"per_gpu_hour": 3.6, "currency": "EUR", "date": "2026-01-31", "source": "made up"}


def test_without_a_price_there_is_no_money():
    found = token_cost([summary(10.0, 500.0, 2000.0)], 1, read_price({"per_gpu_hour": None, "date": None}))
    assert sorted(found) == ["gpu_seconds_per_million_output_tokens", "gpu_seconds_per_million_total_tokens"]
    assert token_cost([], 1)["gpu_seconds_per_million_output_tokens"] is None


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"per_gpu_hour": 2.0}, "needs price.date=YYYY-MM-DD"),
        ({"date": "2026-01-31"}, "without price.per_gpu_hour"),
        ({"per_gpu_hour": 2.0, "date": "last week"}, "must be a day"),
        ({"per_gpu_hour": -2.0, "date": "2026-01-31"}, "per_gpu_hour=-2.0"),
        ({"per_gpu_hour": "2", "date": "2026-01-31"}, "per_gpu_hour='2'"),
    ],
)
def test_a_price_is_dated_or_refused(node, says):
    with pytest.raises(ValueError, match=says):
        read_price(node)


def test_gpus_of_a_replica():
    assert num_gpus(Hardware("one", "none", 1e9, 0, 0, 1, Affine(0, 0, 0, 0), {"range": "everywhere"})) == 1
    assert num_gpus(SimpleNamespace(num_gpus=8)) == 8
    assert num_gpus(SimpleNamespace(num_gpus=8), 4) == 4


def test_a_priced_answer_says_its_date(tmp_path):
    overrides = (
        "price.per_gpu_hour=3.6",
        "price.date=2026-01-31",
        "gpus_per_replica=4",
        "for_rate=1000",
        "search.tolerance=0.5",
    )
    answer = search(config(tmp_path, *overrides), quiet)
    page = "\n".join(lines(answer))
    assert "2026-01-31" in page and "4 GPUs" in page and f"{answer['fleet']['replicas']} replicas" in page
    assert answer["fleet"]["gpus"] == 4 * math.ceil(1000 / answer["rate"])
    spent, seconds = (answer["cost"][f"{kind}_per_million_output_tokens"] for kind in ("cost", "gpu_seconds"))
    assert spent == pytest.approx(seconds / 1000)
    stored = json.loads((tmp_path / "capacity" / answer["folder"] / FILE).read_text())
    assert stored == answer
    needed = {
        "rate",
        "lo",
        "hi",
        "tolerance",
        "gpus",
        "seeds",
        "slo",
        "target",
        "criterion",
        "stability",
        "probes",
        "provenance",
    }
    assert needed <= set(stored)
    assert stored["provenance"]["hardware"]["name"] == "unit"


def test_probes_are_cells_of_the_study_folder(tmp_path):
    from lengthwise.experiments.load_runs import load_runs

    answer = search(config(tmp_path, "search.tolerance=0.5", "search.confirm=[]"), quiet)
    runs = load_runs(tmp_path / "capacity")
    assert len(runs) == 3 * len(answer["probes"]) and set(runs["status"]) == {"ok"}
    assert sorted(set(runs["rate"])) == sorted(row["rate"] for row in answer["probes"])
    assert Probes({}, [0], Criterion(), quiet).contradictions() == []
