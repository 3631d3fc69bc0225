"""Arrival processes: rates, spreads, pairing across loads, and the cases where tools disagree about a word."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from math import gamma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lengthwise.experiments.arrivals.borrowed import Borrowed
from lengthwise.experiments.arrivals.burst import Burst
from lengthwise.experiments.arrivals.deterministic import Deterministic
from lengthwise.experiments.arrivals.gamma import Gamma
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.arrivals.replay import Replay
from lengthwise.experiments.arrivals.staged import Staged
from lengthwise.experiments.arrivals.summary import describe_arrivals
from lengthwise.experiments.arrivals.tidal import Tidal
from lengthwise.experiments.arrivals.weibull import Weibull, weibull_cv, weibull_shape
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.draw import Arrivals, draw, stream
from lengthwise.experiments.nodes import make
from lengthwise.experiments.simulate import simulate
from lengthwise.experiments.workloads import table

CONF = Path(importlib.util.find_spec("lengthwise").origin).parent / "conf" / "arrivals"  # type: ignore[union-attr, arg-type]


def trace(*times: float) -> Dataset:
    n = len(times)
    return Dataset("trace", np.arange(1, n + 1), np.arange(1, n + 1), "t", "s", "l", arrival=np.array(times, dtype=float))


ALL: list[Any] = [
    Poisson(), Poisson(normalised=True), Gamma(cv=3.0), Gamma(cv=0.5), Gamma(cv=3.0, normalised=True), Deterministic(),
    Burst(), Burst(size=7), Staged([{"rate": 1, "duration": 10}, {"rate": 0, "duration": 5}, {"rate": 4, "duration": 20}]),
    Weibull(cv=3.0), Weibull(shape=2.0), Weibull(cv=0.5, normalised=True), Tidal(peak_over_trough=4.0, period=50.0),
    Tidal(profile=[0, 0, 1, 3], period=20.0, phase=0.3, cv=3.0), Tidal(profile=[2.0], cv=2.0, gaps="weibull", phase=0.9),
    Borrowed(trace(3, 4, 4, 9, 10)), Borrowed(trace(*range(40), 90), normalised=True),
]  # fmt: skip
SCALED = [a for a in ALL if not isinstance(a, (Staged, Tidal))]
GROWING = [a for a in ALL if not getattr(a, "normalised", False)]


@pytest.mark.parametrize("arrivals", ALL, ids=lambda a: str(a)[:48])
@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 500), rate=st.floats(0.01, 100), seed=st.integers(0, 2**32))
def test_times_are_sorted_from_zero_and_repeat(arrivals: Arrivals, n: int, rate: float, seed: int) -> None:
    times = arrivals.times(n, rate, stream(seed, "arrivals"))
    assert times.shape == (n,) and times.dtype == np.float64
    assert np.all(np.isfinite(times)) and times[0] >= 0 and np.all(np.diff(times) >= 0)
    assert times.tobytes() == arrivals.times(n, rate, stream(seed, "arrivals")).tobytes()


@pytest.mark.parametrize("arrivals", SCALED, ids=str)
def test_another_rate_is_the_same_pattern_scaled(arrivals: Arrivals) -> None:
    one, four = (arrivals.times(500, rate, stream(3, "arrivals")) for rate in (1.0, 4.0))
    assert four * 4 == pytest.approx(one, rel=1e-14)


@pytest.mark.parametrize("arrivals", GROWING, ids=lambda a: str(a)[:48])
def test_a_longer_draw_begins_with_the_shorter_one(arrivals: Arrivals) -> None:
    short, long = (arrivals.times(n, 3.0, stream(5, "arrivals")) for n in (200, 700))
    assert np.array_equal(long[:200], short)


@pytest.mark.parametrize(
    "arrivals, cv",
    [
        (Poisson(), 1.0), (Gamma(cv=3.0), 3.0), (Gamma(cv=0.5), 0.5), (Deterministic(), 0.0), (Weibull(cv=3.0), 3.0),
        (Weibull(cv=0.5), 0.5), (Weibull(shape=1.0), 1.0), (Weibull(shape=0.5), 5**0.5),
    ],
)  # fmt: skip
def test_rate_and_cv_are_what_was_asked(arrivals: Arrivals, cv: float) -> None:
    got = describe_arrivals(arrivals.times(200_000, 5.0, stream(0, "arrivals")))
    assert got["rate"] == pytest.approx(5.0, rel=0.03)
    assert got["gap_cv"] == pytest.approx(cv, rel=0.05, abs=1e-9)
    assert arrivals.describe()["cv"] == pytest.approx(cv)


def test_a4_stages_keep_their_own_rates() -> None:
    stages = Staged([{"rate": 5.0, "duration": 60.0}, {"rate": 10.0, "duration": 60.0}])
    for seed in range(5):
        times = stages.times(1200, None, stream(seed, "arrivals"))
        assert 231 <= (times < 60).sum() <= 369
        assert 502 <= ((times >= 60) & (times < 120)).sum() <= 698
        assert times[-1] > 120  # the first stage has returned
    doubled = stages.times(2400, 15.0, stream(0, "arrivals"))  # the mean rate over a round was 7.5
    assert 500 <= (doubled < 60).sum() <= 700 and 1061 <= ((doubled >= 60) & (doubled < 120)).sum() <= 1339


def test_a4_a_stage_of_rate_zero_is_silent() -> None:
    times = Staged([{"rate": 2.0, "duration": 10.0}, {"rate": 0.0, "duration": 5.0}]).times(2000, None, stream(1, "arrivals"))
    assert np.all(times % 15 <= 10 + 1e-9)


def test_a5_normalised_is_exact_and_named() -> None:
    borrowed = Borrowed(trace(0, 1, 1, 7), normalised=True)
    for process in (Poisson(normalised=True), Gamma(cv=3.0, normalised=True), Weibull(cv=3.0, normalised=True), borrowed):
        times = process.times(3000, 5.0, stream(0, "arrivals"))
        assert len(times) == 3000 and times[-1] <= 600.0
        assert process.describe()["process"].endswith(", normalised")
    assert Poisson().describe()["process"] == "poisson"
    plain = [Poisson().times(3000, 5.0, stream(seed, "arrivals"))[-1] for seed in range(20)]
    assert min(plain) < 600 < max(plain)


def test_a5_every_process_is_named_in_the_notes() -> None:
    names = {
        draw(trace(*range(20)), arrivals, None, 5.0, 0).notes["arrivals"]["process"]
        for arrivals in (Poisson(), Poisson(normalised=True), Gamma(cv=2.0), Weibull(cv=2.0), Deterministic(), Tidal(4.0))
    }
    assert names == {"poisson", "poisson, normalised", "gamma", "weibull", "deterministic", "tidal poisson"}


def test_a6_speedup_is_named_by_its_effect() -> None:
    workload = draw(trace(0, 10, 20), Replay(speedup=2.0), None, None, 0)
    assert workload.arrival.tolist() == [0.0, 5.0, 10.0]
    plain = draw(trace(0, 10, 20), Replay(), None, None, 0)
    assert workload.notes["arrivals"]["rate"] == 2 * plain.notes["arrivals"]["rate"] == 0.2
    assert workload.notes["arrivals"]["speedup"] == 2.0


def test_t10_fractions_of_a_second_survive_a_replay() -> None:
    workload = draw(trace(0.0, 0.4, 0.9, 1.2), Replay(), None, None, 0)
    assert np.diff(workload.arrival) == pytest.approx([0.4, 0.5, 0.3], abs=1e-12)


def test_a7_an_epoch_clock_is_replayed_from_zero_and_all_of_it_completes() -> None:
    run = simulate(workload=trace(1.7e9, 1.7e9 + 1), arrivals=Replay(), num_requests=2)
    assert run.metrics["num_finished"] == 2
    assert run.requests["arrival"].tolist() == [0.0, 1.0] and run.requests["finish"].max() < 1000


def test_a6_a_replay_is_rescaled_only_when_told() -> None:
    with pytest.raises(ValueError, match="rescale=true"):
        draw(trace(0, 10, 20), Replay(), None, 1.0, 0)
    workload = draw(trace(0, 10, 40), Replay(rescale=True), None, 1.0, 0)
    assert workload.arrival.tolist() == [0.0, 0.5, 2.0]
    assert workload.notes["arrivals"]["rate"] == 1.0
    with pytest.raises(ValueError, match=r"speedup 2\.0"):
        Replay(speedup=2.0, rescale=True)
    with pytest.raises(ValueError, match="no rate to rescale"):
        draw(trace(0, 0, 0), Replay(rescale=True), None, 1.0, 0)


def test_a6_the_rate_of_a_rescaled_replay_is_that_of_the_requests_that_count() -> None:
    """Below load 1 arrivals go on after the last one that counts; how they come must not change the rate of those before."""
    times = [*range(50), *range(50, 550, 10)]
    short, long = (draw(trace(*times), Replay(rescale=True), 50, 4.0, 0, extra=extra) for extra in (0, 50))
    assert long.notes["arrivals"]["rate"] == pytest.approx(4.0) and len(long) == 100
    assert long.arrival[:50].tolist() == short.arrival.tolist() and long.arrival[-1] == pytest.approx(540 / 4)


def test_borrowed_gaps_come_in_their_order_from_where_the_seed_says() -> None:
    """Gaps 1, 3 and 2 s, at 0.5 requests/s as they are; after the last the first; every place is begun at by some seed."""
    borrowed = Borrowed(trace(10, 11, 14, 16))
    seen = {tuple(np.diff(borrowed.times(6, 0.5, stream(seed, "arrivals")), prepend=0.0).round(9)) for seed in range(30)}
    assert seen == {(1, 3, 2, 1, 3, 2), (3, 2, 1, 3, 2, 1), (2, 1, 3, 2, 1, 3)}
    assert borrowed.times(3, 1.0, stream(0, "arrivals"))[-1] == pytest.approx(3.0)  # all gaps once: at the rate exactly
    got = borrowed.describe()
    assert (got["trace"], got["num_gaps"]) == ("trace", 3) and got["cv"] == pytest.approx((2 / 3) ** 0.5 / 2)
    assert repr(borrowed) == "Borrowed(normalised=False)"


def test_borrowed_gaps_serve_another_workload_and_its_rows_are_drawn_as_ever() -> None:
    data = replace(trace(*range(60)), arrival=None)
    a, b = (draw(data, arrivals, 50, 2.0, 4) for arrivals in (Borrowed(trace(0, 0, 5)), Poisson()))
    assert a.rows.tolist() == b.rows.tolist() and set(np.diff(a.arrival).round(9)) == {0.0, 1.0}
    assert a.notes["arrivals"]["asked_rate"] == 2.0 and a.notes["arrivals"]["trace"] == "trace"


@pytest.mark.parametrize("times", [None, (1.0,), (2.0, 2.0, 2.0)])
def test_borrowed_wants_gaps(times: Any) -> None:
    data = trace(1, 2) if times is None else trace(*times)
    with pytest.raises(ValueError, match="trace has no two arrival times"):
        Borrowed(replace(data, arrival=None) if times is None else data)


def test_borrowed_from_a_trace_that_is_not_there_says_what_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    node = OmegaConf.load(CONF / "borrowed.yaml")
    node.workload.limit = 17  # a node of its own: what has been loaded is kept
    with pytest.raises(FileNotFoundError, match=r"Azure 2023 conv trace.*azure_llm_2023_conv\.csv.*LENGTHWISE_DATA"):
        make(OmegaConf.to_container(node))


@pytest.mark.data
def test_borrowed_from_the_chat_trace() -> None:
    try:
        borrowed = make(OmegaConf.to_container(OmegaConf.load(CONF / "borrowed.yaml")))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    got = describe_arrivals(borrowed.times(19_365, 5.0, stream(0, "arrivals")))
    assert borrowed.describe()["num_gaps"] == 19_365 and borrowed.describe()["cv"] == pytest.approx(got["gap_cv"], rel=0.01)
    assert got["rate"] == pytest.approx(5.0, rel=0.01)


def test_replay_keeps_file_order_and_needs_times() -> None:
    workload = draw(trace(0, 0, 1, 4), Replay(), 3, None, 9)
    assert workload.rows.tolist() == [0, 1, 2] and workload.arrival.tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="no arrival times"):
        draw(Dataset("d", np.array([1]), np.array([1]), "t", "s", "l"), Replay(), 1, None, 0)


def test_a8_burstiness_is_the_inverse_of_cv_squared() -> None:
    assert Gamma(burstiness=1 / 9).describe()["cv"] == pytest.approx(3.0)
    assert Gamma(cv=3.0).describe()["burstiness"] == pytest.approx(0.111, abs=5e-4)
    a, b = (g.times(100, 1.0, stream(0, "arrivals")) for g in (Gamma(cv=2.0), Gamma(burstiness=0.25)))
    assert np.array_equal(a, b)
    for wrong in ({"burstiness": 0.0}, {"burstiness": -1.0}, {"cv": 0.0}, {"cv": float("nan")}, {}, {"cv": 1, "burstiness": 1}):
        with pytest.raises(ValueError, match=r"burstiness|cv"):
            Gamma(**wrong)


def test_weibull_shape_is_found_from_cv() -> None:
    for cv in (0.01, 0.3, 1.0, 3.0, 20.0, 1000.0):
        assert weibull_cv(weibull_shape(cv)) == pytest.approx(cv, rel=1e-9)
    assert weibull_shape(1.0) == pytest.approx(1.0) and weibull_cv(0.5) == pytest.approx(5**0.5)
    a, b = (w.times(100, 1.0, stream(0, "arrivals")) for w in (Weibull(cv=weibull_cv(0.7)), Weibull(shape=0.7)))
    assert a == pytest.approx(b, rel=1e-9)
    wrong: list[dict[str, float]] = [{}, {"cv": 1, "shape": 1}, {"cv": 0.0}, {"cv": -1.0}, {"cv": float("nan")}, {"cv": 1e9}]
    for options in (*wrong, {"shape": 0.0}, {"shape": float("inf")}, {"shape": -2.0}):
        with pytest.raises(ValueError, match=r"cv|shape"):
            Weibull(**options)


def test_weibull_gaps_have_their_law() -> None:
    """P(gap > x) = exp(-(x / scale)^shape), the scale such that the mean is one over the rate."""
    gaps = np.diff(Weibull(shape=0.6).times(100_000, 2.0, stream(0, "arrivals")))
    scale = 0.5 / gamma(1 + 1 / 0.6)
    for x in (0.05, 0.3, 1.0, 3.0):
        assert (gaps > x).mean() == pytest.approx(np.exp(-((x / scale) ** 0.6)), abs=0.006)


# --- tides ------------------------------------------------------------------------------------------------------------


def by_phase(times: Any, period: float, bins: int, phase: float = 0.0) -> Any:
    """Arrivals in each part of the period over their mean, whole periods only."""
    share = times / period + phase
    share = share[(share >= 1) & (share < np.floor(share[-1]))]
    counts = np.histogram(share % 1.0, bins, (0.0, 1.0))[0]
    return counts / counts.mean()


@pytest.mark.parametrize("cv, gaps", [(1.0, "gamma"), (3.0, "gamma"), (3.0, "weibull")])
def test_a_sinusoid_has_its_rate_and_its_curve(cv: float, gaps: str) -> None:
    tide = Tidal(peak_over_trough=4.0, period=100.0, cv=cv, gaps=gaps)
    times = tide.times(300_000, 20.0, stream(0, "arrivals"))
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.02)
    middle = (np.arange(10) + 0.5) / 10
    assert by_phase(times, 100.0, 10) == pytest.approx(1 - 0.6 * np.cos(2 * np.pi * middle), abs=0.04)
    assert tide.describe()["peak_over_mean"] / tide.describe()["trough_over_mean"] == pytest.approx(4.0)


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.99])
def test_a_profile_is_joined_by_straight_lines(phase: float) -> None:
    times = Tidal(profile=[0, 0, 1, 3], period=100.0, phase=phase).times(300_000, 20.0, stream(0, "arrivals"))
    want = [0, 0, 0.25, 0.75, 1.5, 2.5, 2.25, 0.75]  # relative rate in the middles of eighths, mean 1
    assert by_phase(times, 100.0, 8, phase) == pytest.approx(want, abs=0.03)
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.01)


def test_a_flat_tide_is_the_plain_process_and_any_rate_has_the_same_numbers() -> None:
    for plain, tide in ((Gamma(cv=3.0), Tidal(profile=[5.0], cv=3.0)), (Weibull(cv=2.0), Tidal(1.0, cv=2.0, gaps="weibull"))):
        a, b = (x.times(500, 2.0, stream(0, "arrivals")) for x in (plain, tide))
        assert a == pytest.approx(b, rel=1e-9)
    tide = Tidal(peak_over_trough=5.0, period=80.0, phase=0.25, cv=2.0)
    swing = 4 / 6
    for rate in (0.5, 7.0):  # expected arrivals until each one: the curve's integral, here in closed form
        share = tide.times(500, rate, stream(0, "arrivals")) / 80.0 + 0.25
        integral = (share - swing / (2 * np.pi) * np.sin(2 * np.pi * share)) - (0.25 - swing / (2 * np.pi))
        expected = Gamma(cv=2.0).times(500, 1.0, stream(0, "arrivals"))
        assert integral * rate * 80.0 == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "one of them"),
        ({"peak_over_trough": 2.0, "profile": [1.0]}, "one of them"),
        ({"peak_over_trough": 0.5}, "peak_over_trough 0.5"),
        ({"profile": []}, "profile"),
        ({"profile": [0.0, 0.0]}, "profile"),
        ({"profile": [1.0, -1.0]}, "profile"),
        ({"peak_over_trough": 2.0, "period": 0.0}, "period 0"),
        ({"peak_over_trough": 2.0, "phase": 1.0}, "phase 1"),
        ({"peak_over_trough": 2.0, "gaps": "pareto"}, "gaps 'pareto'"),
        ({"peak_over_trough": 2.0, "cv": 0.0}, "cv 0"),
    ],
)
def test_tides_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tidal(**options)


@pytest.mark.data
def test_a8_the_code_trace_is_no_poisson() -> None:
    name = "azure_llm_2023_code.csv.gz"
    folder = os.environ.get("LENGTHWISE_DATA")
    if not folder or not (Path(folder) / name).is_file():
        pytest.skip(f"needs {name} under LENGTHWISE_DATA")
    data = table.load(
        name, prompt_len="ContextTokens", output_len="GeneratedTokens", unit="tokens", arrival="TIMESTAMP", time_unit="datetime"
    )
    got = draw(data, Replay(), None, None, 0).notes["arrivals"]
    assert got["n"] == 8819
    assert got["rate"] == pytest.approx(2.57, abs=0.005)
    assert got["gap_cv"] == pytest.approx(13.15, abs=0.05)
    assert got["longest_gap"] == pytest.approx(217.2, abs=0.1)


def test_summary_of_little() -> None:
    assert describe_arrivals(np.array([3.0])) == {
        "n": 1, "span": 0.0, "rate": None, "gap_cv": None, "longest_gap": None, "num_ties": 0,
    }  # fmt: skip
    assert describe_arrivals(np.zeros(3))["rate"] is None
    got = describe_arrivals(np.array([0.0, 1.0, 1.0, 4.0]))
    assert (got["rate"], got["longest_gap"], got["num_ties"], got["span"]) == (0.75, 3.0, 1, 4.0)


@pytest.mark.parametrize(
    "arrivals", [Poisson(), Gamma(cv=1.0), Deterministic(), Burst(size=2), Weibull(cv=1.0), Tidal(2.0)], ids=str
)
@pytest.mark.parametrize("rate", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_checked(arrivals: Arrivals, rate: float | None) -> None:
    with pytest.raises(ValueError, match="arrival rate"):
        arrivals.times(3, rate, stream(0, "arrivals"))


def test_bursts() -> None:
    assert Burst().times(3, None, stream(0, "arrivals")).tolist() == [0, 0, 0]
    assert Burst(size=2).times(5, 1.0, stream(0, "arrivals")).tolist() == [0, 0, 2, 2, 4]
    with pytest.raises(ValueError, match="burst size 0"):
        Burst(size=0)


@pytest.mark.parametrize(
    "stages", [[], [{"rate": 1}], [{"rate": 0, "duration": 1}], [{"rate": 1, "duration": 0}], [{"rate": -1, "duration": 1}]]
)
def test_stages_are_checked(stages: Any) -> None:
    with pytest.raises(ValueError, match=r"stage"):
        Staged(stages)


@pytest.mark.parametrize("node", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_node_makes_arrivals_that_describe_themselves(node: str, tmp_path: Path) -> None:
    config = OmegaConf.load(CONF / f"{node}.yaml")
    if node == "borrowed":  # of a trace of three rows
        config.workload.path = str(tmp_path / "trace.csv")
        rows = ("TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:15:{s},5,7" for s in ("46.6805900", "50", "51.5")))
        Path(config.workload.path).write_text("\n".join(rows) + "\n")
    made = instantiate(config)
    assert type(made).__module__ == f"lengthwise.experiments.arrivals.{node}"
    data = replace(trace(*range(50)), columns={"session": np.arange(50) // 4, "turn": np.arange(50) % 4})
    workload = draw(data, made, 40, None if node in ("replay", "closed_loop") else 2.0, 0)
    assert len(workload) == 40 and workload.notes["arrivals"]["process"].split(",")[0].split()[0] == node.split("_")[0]
