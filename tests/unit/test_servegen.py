"""ServeGen: each window gets its rate and CV, scaling keeps the curve and the shares, lengths follow quantiles and means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lengthwise.experiments.arrivals.replay import Replay
from lengthwise.experiments.contract import check_workload
from lengthwise.experiments.draw import draw
from lengthwise.experiments.workloads import servegen
from lengthwise.experiments.workloads.servegen_arrivals import Window, client_arrivals
from lengthwise.experiments.workloads.servegen_lengths import QUANTILES, read_lengths

DAY = 86400
STRAIGHT = np.arange(65) * 10.0 + 100  # 100 to 740 tokens
FLAT = np.full(65, 7.0)

Row = dict[str, Any]


def window(client: int, t: int, rate: float, shape: float = 1.0, family: str = "Gamma", workload: str = "m-large") -> Row:
    return {"workload": workload, "client": client, "t": t, "rate": rate, "cv": 1.0, "pattern": family, "param0": shape,
            "param1": 1.0}  # fmt: skip


def lengths(
    client: int, field: str, quantiles: Any = STRAIGHT, t: int = 0, mean: float | None = None, workload: str = "m-large"
) -> Row:
    q = np.asarray(quantiles, dtype=float)
    straight = float((q[:-1] + q[1:]).mean() / 2)
    row = {"workload": workload, "client": client, "t": t, "field": field, "mean": straight if mean is None else mean}
    return {**row, **dict(zip(QUANTILES, q, strict=True))}


def both(client: int, quantiles: Any = STRAIGHT, **more: Any) -> list[Row]:
    return [lengths(client, field, quantiles, **more) for field in ("input_tokens", "output_tokens")]


def files(folder: Path, windows: list[Row], lens: list[Row]) -> dict[str, str]:
    """The two files with these rows, as options of `load`."""
    paths = {"windows": folder / "windows.parquet", "lengths": folder / "lengths.parquet"}
    pd.DataFrame(windows).astype({"workload": "category", "pattern": "category", "rate": "float32"}).to_parquet(
        paths["windows"]
    )
    pd.DataFrame(lens).astype({"workload": "category", "field": "category"}).to_parquet(paths["lengths"])
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def day(tmp_path: Path) -> dict[str, str]:
    """Three clients, 1:2:7 in the mean; the rate of all is three times as high in the second half of the day."""
    rates = {1: 0.01, 2: 0.02, 3: 0.07}
    shapes = {1: (1.0, "Gamma"), 2: (0.25, "Gamma"), 3: (0.7, "Weibull")}
    rows = [
        window(c, t, rate * (3 if t >= DAY / 2 else 1), *shapes[c]) for c, rate in rates.items() for t in range(0, DAY, 600)
    ]
    return files(tmp_path, rows, both(1) + both(2) + both(3, FLAT))


# --- arrivals of a client ---------------------------------------------------------------------------------------------


def chain(*parts: tuple[float, str, float]) -> list[Window]:
    """Windows of 600 s one after the other from (expected arrivals, family, shape)."""
    return [Window(600.0 * i, 600.0 * (i + 1), m / 600, family, shape) for i, (m, family, shape) in enumerate(parts)]


@pytest.mark.parametrize(
    "windows",
    [
        chain((30, "gamma", 0.06), (30, "gamma", 4.0), (30, "gamma", 0.06), (30, "weibull", 1.0)),
        chain((3, "weibull", 0.4), (20, "gamma", 4.0), (3, "gamma", 0.06), (3, "weibull", 0.4), (3, "gamma", 1.0)),
        chain((5, "gamma", 400.0), (0.5, "weibull", 0.5), (5, "gamma", 400.0), (0.5, "weibull", 3.0)),
    ],
    ids=["long", "short", "smooth"],
)
def test_each_window_gets_its_rate_whatever_lies_before_it(windows: list[Window]) -> None:
    rng, repeats = np.random.default_rng(0), 3000
    edges = [0.0] + [w.end for w in windows]
    counts = np.array([np.histogram(client_arrivals(windows, rng), edges)[0] for _ in range(repeats)])
    want = np.array([w.rate * 600 for w in windows])
    error = counts.std(axis=0) / np.sqrt(repeats)
    assert np.all(np.abs(counts.mean(axis=0) - want) < 4 * error), (counts.mean(axis=0), want, error)


@pytest.mark.parametrize("family, shape, cv", [("gamma", 1 / 9, 3.0), ("weibull", 0.5, 5**0.5), ("gamma", 4.0, 0.5)])
def test_gaps_go_on_over_borders(family: str, shape: float, cv: float) -> None:
    """Two arrivals are expected in a window; a process that began afresh in each could have no CV of 3."""
    gaps = np.diff(client_arrivals(chain(*[(2.0, family, shape)] * 30_000), np.random.default_rng(1)))
    assert gaps.mean() == pytest.approx(300.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_the_same_law_on_both_sides_of_a_border_keeps_the_gap() -> None:
    for family, shape in (("gamma", 0.05), ("gamma", 30.0), ("weibull", 0.3), ("weibull", 5.0)):
        one = Window(0.0, 600.0, 1.0, family, shape)
        for gap in (0.5, 1.0, 1.5):
            assert one.gap(one.level(gap)) == pytest.approx(gap, rel=1e-6)
        assert one.gap(0.0) < float("inf")


def test_time_counts_in_expected_arrivals() -> None:
    """Silence adds nothing to a gap, and half the rate makes it twice as long."""
    whole = client_arrivals(chain((100, "gamma", 0.5), (100, "gamma", 0.5)), np.random.default_rng(3))
    later = [Window(0.0, 600.0, 1 / 6, "gamma", 0.5), Window(9000.0, 10200.0, 1 / 12, "gamma", 0.5)]
    parted = client_arrivals(later, np.random.default_rng(3))
    assert len(parted) == len(whole)
    assert parted == pytest.approx(np.where(whole < 600, whole, 9000 + (whole - 600) * 2))


# --- the data set -----------------------------------------------------------------------------------------------------


def test_contract(day: dict[str, str]) -> None:
    data = check_workload(lambda: servegen.load(num_rows=2000, **day))
    assert data.arrival is not None and data.licence == "Apache-2.0" and data.unit == "tokens of m-large"
    assert servegen.load(num_rows=2000, seed=1, **day).arrival.tobytes() != data.arrival.tobytes()  # type: ignore[union-attr]


def test_one_factor_keeps_curve_and_shares(day: dict[str, str]) -> None:
    data = servegen.load(num_rows=40_000, **day)
    assert data.arrival is not None
    assert len(data) == pytest.approx(40_000, rel=0.02)
    assert (data.arrival > DAY / 2).mean() == pytest.approx(0.75, abs=0.02)
    names, counts = np.unique(data.columns["client"].astype(str), return_counts=True)
    assert names.tolist() == ["m-large/1", "m-large/2", "m-large/3"]
    assert counts / len(data) == pytest.approx([0.1, 0.2, 0.7], abs=0.02)
    notes = data.notes
    assert notes["rate_factor"] == pytest.approx(40_000 / (0.2 * DAY), rel=1e-6)
    assert notes["rate"] == len(data) / DAY and notes["num_clients"] == 3
    assert notes["client_shares"] == {"top_1": counts[2] / len(data), "top_5": 1.0, "top_10": 1.0}
    assert notes["rate_share_kept"] == pytest.approx(1.0) and "independently" in notes["lengths"]
    again = draw(data, Replay(), None, None, 0).notes["arrivals"]
    assert again["gap_cv"] == pytest.approx(notes["gap_cv"])


def test_ways_to_say_how_many(day: dict[str, str]) -> None:
    by_rows = servegen.load(num_rows=8640, **day)
    by_rate = servegen.load(rate=0.1, **day)
    assert by_rate.arrival.tobytes() == by_rows.arrival.tobytes()  # type: ignore[union-attr]
    by_scale = servegen.load(scale=by_rows.notes["rate_factor"], **day)
    assert by_scale.arrival.tobytes() == by_rows.arrival.tobytes()  # type: ignore[union-attr]
    plain = servegen.load(**day)
    assert plain.notes["rate_factor"] == 1.0 and len(plain) == pytest.approx(0.2 * DAY, rel=0.05)


def test_a_client_keeps_its_requests_when_others_go(day: dict[str, str]) -> None:
    everyone, largest = (servegen.load(scale=1.0, max_clients=k, **day) for k in (None, 1))
    assert largest.dropped["clients_beyond_max_clients"] == 2
    assert largest.notes["rate_share_kept"] == pytest.approx(0.7, rel=1e-6)
    own = everyone.columns["client"] == "m-large/3"
    assert everyone.arrival is not None and largest.arrival is not None
    there = everyone.arrival[own] + everyone.notes["arrival_offset"]
    assert there == pytest.approx(largest.arrival + largest.notes["arrival_offset"], abs=1e-9)
    assert everyone.output_len[own].tolist() == largest.output_len.tolist()


def test_part_of_a_trace(day: dict[str, str]) -> None:
    part = servegen.load(start=DAY / 2 - 900.0, duration=1800.0, scale=20.0, **day)
    assert part.arrival is not None
    at = part.arrival + part.notes["arrival_offset"]
    assert at[-1] <= 1800.0
    assert len(at) == pytest.approx(20 * (0.1 + 0.3) * 900, rel=0.15)
    assert (at >= 900).mean() == pytest.approx(0.75, abs=0.06)


def test_names_are_shared_and_not_copied(day: dict[str, str]) -> None:
    client = servegen.load(num_rows=5000, **day).columns["client"]
    assert client.dtype == object and len({id(name) for name in client}) == 3


def test_clients_without_lengths(tmp_path: Path) -> None:
    rows = [window(c, t, rate) for c, rate in ((1, 0.4), (2, 0.1), (3, 0.35)) for t in range(0, 6000, 600)]
    lens = both(1, FLAT) + both(2, STRAIGHT)
    options: dict[str, Any] = {"duration": 6000.0, "rate": 1.0, **files(tmp_path, rows, lens)}
    dropped = servegen.load(**options)
    assert dropped.dropped["clients_without_lengths"] == 1 and set(dropped.columns["client"]) == {"m-large/1", "m-large/2"}
    assert dropped.notes["rate_share_without_lengths"] == pytest.approx(0.35 / 0.85)
    assert dropped.notes["rate_share_kept"] == pytest.approx(0.5 / 0.85)
    assert len(dropped) == pytest.approx(6000, rel=0.06)  # the rate asked for is that of the clients that are left
    borrowed = servegen.load(without_lengths="borrow", **options)
    assert borrowed.dropped["clients_without_lengths"] == 0 and borrowed.notes["rate_share_kept"] == 1.0
    third = borrowed.columns["client"] == "m-large/3"
    assert set(borrowed.output_len[third]) == {7}  # of client 1, the nearest in rate
    nobody = options | files(tmp_path, rows, both(9))
    for how in ("drop", "borrow"):
        with pytest.raises(ValueError, match="none of the 3 clients"):
            servegen.load(without_lengths=how, **nobody)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"workload": "m-huge"}, "workload 'm-huge' must be one of m-large"),
        ({"workload": "m-mid"}, "no windows of m-mid"),
        ({"duration": 2.0 * DAY}, "spans 86400 s, start . duration is 172800"),
        ({"start": -1.0}, "start -1"),
        ({"duration": 0.0}, "duration 0"),
        ({"rate": 1.0, "num_rows": 10}, "at most one of"),
        ({"rate": 0.0}, "rate 0.0 must be"),
        ({"scale": float("nan")}, "scale nan"),
        ({"max_clients": 0}, "max_clients 0"),
        ({"without_lengths": "guess"}, "without_lengths 'guess'"),
        ({"rate": 1e6}, "8.64e.10 rows would come out"),
        ({"max_prompt_len": 5}, "no rows came out"),
    ],
)
def test_what_cannot_be_is_refused(day: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        servegen.load(**options, **day)


def test_files_are_named_when_missing_or_wrong(day: dict[str, str], tmp_path: Path) -> None:
    """T12"""
    with pytest.raises(FileNotFoundError, match=r"no_such\.parquet"):
        servegen.load(**{**day, "lengths": "no_such.parquet"})
    wrong = files(tmp_path, [window(1, 0, 1.0, family="Cauchy")], both(1))
    with pytest.raises(ValueError, match="client 1 at 0 s has gaps Cauchy"):
        servegen.load(duration=600.0, **wrong)
    wrong = files(tmp_path, [window(1, 0, 1.0)], [lengths(1, "input_tokens")])
    with pytest.raises(ValueError, match="client 1 of m-large lacks lengths"):
        servegen.load(duration=600.0, **wrong)


def test_longer_prompts_are_left_out_and_counted(day: dict[str, str]) -> None:
    whole, short = (servegen.load(num_rows=3000, max_prompt_len=most, **day) for most in (None, 400))
    over = int((whole.prompt_len > 400).sum())
    assert over > 100 and short.dropped["rows_prompt_over_400"] == over and len(short) == len(whole) - over
    assert short.prompt_len.max() <= 400


# --- lengths ----------------------------------------------------------------------------------------------------------


def one_client(folder: Path, lens: list[Row], n: int = 60_000, duration: float = 600.0, **options: Any) -> Any:
    rows = [window(1, t, 1.0, workload=lens[0]["workload"]) for t in range(0, int(duration), 600)]
    return servegen.load(workload=lens[0]["workload"], duration=duration, num_rows=n, **options, **files(folder, rows, lens))


def test_lengths_follow_the_quantiles(tmp_path: Path) -> None:
    data = one_client(tmp_path, both(1))
    levels = np.arange(1, 64) / 64
    for lens in (data.prompt_len, data.output_len):
        assert np.quantile(lens, levels) == pytest.approx(STRAIGHT[1:-1], abs=8)
        assert lens.min() >= 100 and lens.max() <= 740
    assert abs(np.corrcoef(data.prompt_len, data.output_len)[0, 1]) < 0.02  # marginals only, drawn independently


def test_the_last_part_is_bent_to_the_mean(tmp_path: Path) -> None:
    """Outputs of 20 tokens and one in 64 beyond it, up to 100,000: a straight line would put the mean at 800."""
    long = np.append(np.full(64, 20.0), 100_000.0)
    for mean in (25.0, 120.0, 1200.0):
        lens = [lengths(1, "input_tokens"), lengths(1, "output_tokens", long, mean=mean)]
        output = one_client(tmp_path, lens, 400_000).output_len
        assert output.mean() == pytest.approx(mean, rel=0.08)
        assert output.max() <= 100_000 and (output == 20).mean() >= 0.98
    assert one_client(tmp_path, both(1, long, mean=3.0)).output_len.max() <= 100_000  # a mean that no tail can give


def test_lengths_change_every_six_hours_and_zeros_are_one(tmp_path: Path) -> None:
    lens = [*both(1, FLAT), *both(1, np.zeros(65), t=21600), *both(1, FLAT * 3, t=43200)]
    data = one_client(tmp_path, lens, 20_000, duration=64800.0)
    at = data.arrival + data.notes["arrival_offset"]
    assert set(data.output_len[at < 43200]) == {7}  # nobody was there from 6 h on: the lengths before hold
    assert set(data.output_len[at >= 43200]) == {21}
    some = np.append(np.zeros(64), 1.0)
    assert set(one_client(tmp_path, both(1, some)).output_len) == {1}


def test_a_prompt_is_its_text_and_its_images(tmp_path: Path) -> None:
    fields = {"text_tokens": FLAT, "image_count": np.full(65, 3.0), "image_tokens": np.linspace(100, 200, 65)}
    lens = [lengths(1, name, q, workload="mm-image") for name, q in {**fields, "output_tokens": FLAT}.items()]
    images = one_client(tmp_path, lens, 40_000).prompt_len - 7
    assert images.mean() == pytest.approx(450, abs=1) and images.min() >= 300 and images.max() <= 600
    assert images.std() == pytest.approx((3 / 12) ** 0.5 * 100, rel=0.03)  # each image has a length of its own
    lens[1] = lengths(1, "image_count", np.repeat([0.0, 2.0], [33, 32]), workload="mm-image")
    images = one_client(tmp_path, lens, 40_000).prompt_len - 7
    assert (images == 0).mean() == pytest.approx(0.5, abs=0.02) and images.max() > 300


# --- the published data -----------------------------------------------------------------------------------------------


@pytest.fixture
def published() -> Path:
    folder = os.environ.get("LENGTHWISE_DATA")
    for name in ("servegen_client_windows.parquet", "servegen_length_quantiles.parquet"):
        if not folder or not (Path(folder) / name).is_file():
            pytest.skip(f"needs {name} under LENGTHWISE_DATA")
    return Path(str(folder))


@pytest.mark.data
def test_published_windows(published: Path) -> None:
    """Rates and CVs of the trace, and what its parameters are: shape first; a gamma's is 1 / cv^2."""
    table = pd.read_parquet(published / "servegen_client_windows.parquet")
    windows = {"m-large": 2016, "m-mid": 2016, "m-small": 2016, "deepseek-r1": 144, "mm-image": 144}
    mean_rate = {"m-large": 196, "m-mid": 1790, "m-small": 1174, "deepseek-r1": 16.0, "mm-image": 9.5}
    cv = {"m-large": (2.2, 1.2, 4.3), "m-mid": (3.2, 1.3, 5.1), "m-small": (2.8, 1.2, 5.5), "deepseek-r1": (1.8, 1.0, 4.0),
          "mm-image": (2.4, 1.4, 5.0)}  # fmt: skip
    top = {"m-large": (0.16, 0.43, 0.63), "m-mid": (0.52, 0.67, 0.79), "m-small": (0.30, 0.77, 0.93)}
    for name, own in table.groupby("workload", observed=True):
        shares = (own.groupby("client").rate.sum() / own.rate.sum()).sort_values(ascending=False)
        if name in top:
            assert [shares.iloc[:k].sum() for k in (1, 5, 10)] == pytest.approx(top[name], abs=0.0051)
        assert own.rate.sum() / windows[name] == pytest.approx(mean_rate[name], rel=0.005)
        assert (own.cv.mean(), own.cv.median(), own.cv.quantile(0.9)) == pytest.approx(cv[name], abs=0.051)
    gammas = table[table.pattern == "Gamma"]
    assert (1 / np.sqrt(gammas.param0) / gammas.cv).to_numpy() == pytest.approx(np.ones(len(gammas)), rel=1e-3)
    mean_gap = gammas.param0 * gammas.param1
    assert (1 / mean_gap / gammas.rate).median() == pytest.approx(1.0, abs=0.005)


# workload -> days, mean rate, in mean/p50/p90/p99, out mean/p50/p90/p99 (by rate, over clients with lengths)
GOLDEN: dict[str, tuple[int, tuple[float, ...], tuple[float, ...]]] = {
    "m-large": (14, (914, 601, 2371, 5452), (155, 53, 461, 872)),
    "m-mid": (14, (307, 173, 645, 2583), (51, 34, 95, 397)),
    "m-small": (14, (120, 40, 322, 1478), (15, 3, 44, 142)),
    "deepseek-r1": (1, (1268, 208, 2092, 23423), (1527, 792, 3432, 12607)),
}


@pytest.mark.data
@pytest.mark.parametrize("workload", GOLDEN)
def test_published_lengths(published: Path, workload: str) -> None:
    days, prompt, output = GOLDEN[workload]
    data = servegen.load(workload=workload, duration=days * float(DAY), num_rows=200_000)
    assert len(data) == pytest.approx(200_000, rel=0.05)
    for lens, (mean, *quantiles) in ((data.prompt_len, prompt), (data.output_len, output)):
        assert lens.mean() == pytest.approx(mean, rel=0.06)
        assert np.quantile(lens, [0.5, 0.9]) == pytest.approx(quantiles[:2], rel=0.05, abs=1)
        assert np.quantile(lens, 0.99) == pytest.approx(quantiles[2], rel=0.12)


@pytest.mark.data
def test_published_images_and_shares(published: Path) -> None:
    data = servegen.load(workload="mm-image", num_rows=200_000)
    assert data.output_len.mean() == pytest.approx(130, rel=0.02) and 1950 < data.output_len.max() <= 2000
    lens = read_lengths(published / "servegen_length_quantiles.parquet", "mm-image")
    assert len(lens) == 35 and data.notes["num_clients"] == 35
    assert list(data.notes["client_shares"].values()) == pytest.approx([0.14, 0.56, 0.83], abs=0.01)
    reasoning = servegen.load(workload="deepseek-r1", num_rows=200_000)
    assert list(reasoning.notes["client_shares"].values()) == pytest.approx([0.29, 0.52, 0.68], abs=0.01)


@pytest.mark.data
def test_a_published_day_keeps_its_curve(published: Path) -> None:
    """The hours of m-large's first day, of the clients with lengths, at a seventeenth of the rate."""
    data = servegen.load(workload="m-large", num_rows=500_000)
    assert data.dropped["clients_without_lengths"] == 15 and data.notes["rate_share_without_lengths"] == pytest.approx(
        0.46, abs=0.01
    )
    table = pd.read_parquet(published / "servegen_client_windows.parquet", filters=[("workload", "==", "m-large")])
    have = read_lengths(published / "servegen_length_quantiles.parquet", "m-large")
    assert len(have) == 147
    table = table[(table.t < DAY) & table.client.isin(list(have))]
    hours = table.groupby(table.t // 3600).rate.sum().to_numpy()
    assert data.arrival is not None
    made = np.histogram(data.arrival + data.notes["arrival_offset"], np.arange(25) * 3600.0)[0]
    assert made / made.sum() == pytest.approx(hours / hours.sum(), rel=0.08)
    whole = servegen.load(workload="m-large", duration=14 * float(DAY), num_rows=1000)
    assert whole.notes["rate_share_without_lengths"] == pytest.approx(0.37, abs=0.005)
