"""Scheduling regret: the cells are the quickstart's, paired by seed, and a predictor's own time is charged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from lengthwise.experiments.composer import plain
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.regret import POLICIES, Held, Regret
from lengthwise.experiments.statistics import gap_closed
from lengthwise.experiments.train import train
from lengthwise.experiments.train_report import table
from lengthwise.experiments.train_table import frame_of, text_of, transfers_of
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.contract import synthetic_rows
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.online import Online
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.prompt_length import PromptLength


def dataset(num_rows: int = 400) -> Dataset:
    asked, _, _ = synthetic_rows(num_rows)
    lengths = np.ceil(np.random.default_rng(0).lognormal(5.0, 1.2, num_rows)).astype(np.int64)
    return Dataset(
        name="made_up", prompt_len=asked.prompt_len.astype(int), output_len=lengths, unit="made-up tokens",
        source="a generator", licence="none", prompts=asked.texts,
    )  # fmt: skip


def held(rows: Dataset, says: Any, seeds: tuple[str, ...] = ("0", "1", "2")) -> dict[str, Held]:
    at = np.arange(len(rows))
    return {seed: Held(at, says(rows.output_len.astype(float)), float(np.median(rows.output_len))) for seed in seeds}


SMALL = Regret(300, 3.0)  # overloaded: an order pays, and is seen to
ROWS = dataset()


def test_a_cell_is_one_of_the_quickstart() -> None:
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        words = [
            "study=quickstart",
            "setting=slots64_gamma3",
            "load=0.95",
            "policy=srpt",
            "predictor=oracle",
            "workload=synthetic",
        ]
        composed = GlobalHydra.instance().hydra.compose_config("run", words, run_mode=RunMode.RUN)
        theirs = plain(composed, composed.hydra.runtime.choices)
    ours = Regret(theirs["num_requests"]).cell(ROWS, None, theirs["seed"], "srpt", "oracle")
    different = {key for key in ours if key not in ("workload", "choices") and ours[key] != theirs.get(key)}
    assert different == {"window", "resample"}
    assert ours["window"].items() <= theirs["window"].items() and theirs["window"]["cap"] is None


def test_an_oracle_closes_the_gap_and_a_constant_says_as_much_as_itself() -> None:
    found = SMALL(ROWS, "key", held(ROWS, Predictions.from_points), None)
    median = float(np.median(ROWS.output_len))
    flat = SMALL(ROWS, "key", held(ROWS, lambda y: Predictions.from_points(np.full(len(y), median))), None)
    for policy in POLICIES:
        assert found["policies"][policy]["predictor"]["e2e_mean"] == found["policies"][policy]["oracle"]["e2e_mean"]
        assert found["policies"][policy]["predictor"]["gap_closed"] == pytest.approx(1.0)
        assert flat["policies"][policy]["predictor"] == flat["policies"][policy]["constant"]
        arms = {
            name: {int(s): v for s, v in flat["policies"][policy][name]["e2e_mean_by_split"].items()}
            for name in ("constant", "oracle")
        }
        fcfs = {int(s): v for s, v in flat["fcfs"]["e2e_mean_by_split"].items()}
        assert flat["policies"][policy]["constant"]["gap_closed"] == gap_closed(fcfs, arms["constant"], arms["oracle"]).share
    assert found["fcfs"] == flat["fcfs"] and found["seeds"] == [0, 1, 2] and found["charged_ms"] is None
    assert found["policies"]["srpt"]["oracle"]["e2e_mean"] < found["fcfs"]["e2e_mean"]


def test_time_is_charged_and_the_shared_arms_are_run_once() -> None:
    one = Regret(200)
    free = one(ROWS, "key", held(ROWS, Predictions.from_points), LatencyModel(0.0, 0.0))
    kept = dict(one._kept)
    slow = one(ROWS, "key", held(ROWS, Predictions.from_points), LatencyModel(0.5, 0.0))
    assert one._kept == kept and slow["charged_ms"] == 500.0 and free["charged_ms"] == 0.0
    for policy in POLICIES:
        assert free["policies"][policy]["predictor"]["e2e_mean"] == free["policies"][policy]["oracle"]["e2e_mean"]
        assert slow["policies"][policy]["predictor"]["e2e_mean"] > free["policies"][policy]["predictor"]["e2e_mean"] + 0.3
    one(ROWS, "another", held(ROWS, Predictions.from_points, ("0",)), None)
    assert len(one._kept) > len(kept)


def test_other_rows_of_the_same_data_are_other_runs() -> None:
    one, half = Regret(200), np.arange(200)
    says = Predictions.from_points(ROWS.output_len[half].astype(float))
    some = {seed: Held(half, says, 200.0) for seed in ("0", "1")}
    one(ROWS, "key", held(ROWS, Predictions.from_points, ("0", "1")), None)
    assert one(ROWS, "key", some, None) == Regret(200)(ROWS, "key", some, None)
    longer = {seed: one_split._replace(median=400.0) for seed, one_split in some.items()}
    assert one(ROWS, "key", longer, None) == Regret(200)(ROWS, "key", longer, None)


def test_an_order_serves_sjf_alone_and_one_that_learns_is_corrected() -> None:
    found = SMALL(ROWS, "key", held(ROWS, Predictions), None)["policies"]
    assert found["sjf"]["predictor"]["e2e_mean"] == found["sjf"]["oracle"]["e2e_mean"]
    assert "no lengths" in found["srpt"]["predictor"]["skipped"]
    report = train(ROWS, lambda: Online(PromptLength()), baselines=(), regret=Regret(100))
    assert report["volatile"]["regret"]["policies"]["srpt"]["predictor"]["e2e_mean"] > 0


def test_it_stands_in_the_report_and_in_the_table() -> None:
    regret = Regret(100)
    reports = [train(ROWS, make, regret=regret, baselines=("oracle",)) for make in (PromptLength, Constant)]
    text = table(reports[0])
    assert "slots64_gamma3 at load 0.95, 3 x 100 requests" in text and "gap closed" in text
    assert max(map(len, text.splitlines())) <= 130
    frame = frame_of(reports).set_index("predictor")
    assert (frame.loc[["prompt_length", "constant", "oracle"], ["e2e_sjf", "e2e_srpt"]] > 0).all(axis=None)
    assert frame.loc["oracle", "gap_closed_srpt"] == 1.0
    assert "SRPT gap" in text_of(frame.reset_index(), transfers_of(reports))
    assert "SRPT gap" not in text_of(frame_of([train(ROWS, Constant, baselines=())]), transfers_of([]))


@pytest.mark.parametrize("options", [{"num_requests": 99}, {"load": 0.0}, {"load": float("nan")}])
def test_sizes_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="regret: num_requests="):
        Regret(**options)
