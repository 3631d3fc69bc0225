"""Oracles with an error: each errs as it states, row by row the same whatever else there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from lengthwise.predictors.adversarial_oracle import AdversarialOracle
from lengthwise.predictors.biased_oracle import BiasedOracle
from lengthwise.predictors.confused_oracle import ConfusedOracle
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.heavy_tailed_oracle import HeavyTailedOracle
from lengthwise.predictors.noisy_oracle import NoisyOracle
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.scores import BANDS, errors_by_band, kendall_tau
from lengthwise.predictors.shifted_oracle import ShiftedOracle
from lengthwise.predictors.spread_oracle import SpreadOracle


def lengths_of(n: int, seed: int = 0) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(seed).lognormal(5.0, 1.2, n)).astype(np.int64)


def said(oracle: Any, truth: np.ndarray, seed: int = 3) -> np.ndarray:
    out = oracle.from_truth(truth, np.random.default_rng(seed))
    assert out.point is not None and np.all(np.isfinite(out.point)) and out.point.min() > 0
    return np.asarray(out.point)


@pytest.mark.parametrize(
    "make", [BiasedOracle, HeavyTailedOracle, ConfusedOracle, lambda: ShiftedOracle(Oracle(), BiasedOracle())]
)
def test_one_truth_does_not_touch_the_error_of_another(make: Any) -> None:
    truth = lengths_of(400)
    changed = truth.copy()
    changed[17] = 4000
    a, b = said(make(), truth), said(make(), changed)
    assert a[17] != b[17] and np.delete(a, 17).tolist() == np.delete(b, 17).tolist()
    assert said(make(), truth).tolist() == a.tolist()
    assert said(make(), truth[:250])[:100].tolist() == a[:100].tolist()  # the i-th draw is row i's


def test_a_bias_is_its_factor_and_moves_no_order() -> None:
    truth = lengths_of(500)
    for factor in (0.25, 1.0, 3.0):
        out = said(BiasedOracle(factor), truth)
        assert_allclose(out / truth, factor, rtol=1e-12)
        assert kendall_tau(out, truth) == pytest.approx(1.0)


@pytest.mark.parametrize("alpha", [0.5, 1.5, 3.0])
def test_heavy_tails_reach_as_far_as_stated_on_both_sides(alpha: float) -> None:
    truth = lengths_of(200_000)
    ratio = said(HeavyTailedOracle(alpha), truth) / truth
    for x in (1.5, 4.0, 10.0):
        for share in (np.mean(ratio > x), np.mean(ratio < 1 / x)):
            want = 0.5 * x**-alpha
            assert abs(share - want) < 4 * np.sqrt(want / len(truth))
    assert np.mean(np.abs(np.log(ratio))) == pytest.approx(1 / alpha, rel=0.02)
    assert abs(np.median(np.log(ratio))) < 0.02


def test_the_greatest_heavy_error_is_finite() -> None:
    class Edge:
        def random(self, n: int) -> np.ndarray:
            return np.array([0.0, 1.0 - 2**-53])[:n]

    out = HeavyTailedOracle(1.0).from_truth([10, 10], Edge()).score  # type: ignore[arg-type]
    assert out == pytest.approx([1e-5, 1e7])


def test_the_longest_share_is_said_to_be_short() -> None:
    truth = lengths_of(1000)
    out = said(AdversarialOracle(0.1, length=2.0), truth)
    wrong = np.flatnonzero(out != truth)
    assert len(wrong) == 100 and set(out[wrong]) == {2.0} and truth[wrong].min() >= np.sort(truth)[-100]
    assert said(AdversarialOracle(0.0), truth).tolist() == truth.tolist()
    assert set(said(AdversarialOracle(1.0), truth)) == {1.0}
    assert said(AdversarialOracle(0.5), np.full(4, 9)).tolist() == [1, 1, 9, 9]  # of equal ones the first


def test_a_shift_has_one_error_before_and_another_after() -> None:
    truth = lengths_of(4000)
    out = said(ShiftedOracle(NoisyOracle(tau=0.6), BiasedOracle(0.5), share=0.75), truth)
    assert kendall_tau(out[:3000], truth[:3000]) == pytest.approx(0.6, abs=0.01)
    assert_allclose(out[3000:] / truth[3000:], 0.5)
    assert said(ShiftedOracle(BiasedOracle(2.0), Oracle(), share=0.0), truth).tolist() == truth.tolist()
    with pytest.raises(ValueError, match="a Constant is no oracle"):
        ShiftedOracle(Oracle(), Constant())  # type: ignore[arg-type]


def test_a_spread_passes_on_the_points_it_is_around() -> None:
    truth = lengths_of(300)
    assert said(SpreadOracle(NoisyOracle(mae=50.0)), truth).tolist() == said(NoisyOracle(mae=50.0), truth).tolist()


@pytest.mark.parametrize("inner", [NoisyOracle(tau=0.5), NoisyOracle(mae=80.0), HeavyTailedOracle(1.0), AdversarialOracle(0.2)])
def test_a_spread_is_as_wide_as_the_errors_are(inner: Any) -> None:
    """Truths fall evenly over their own distributions: among the half said to be short as among the other."""
    truth = lengths_of(4000)
    made = SpreadOracle(inner, spread=True).from_truth(truth, np.random.default_rng(3))
    point = inner.from_truth(truth, np.random.default_rng(3)).point
    assert made.point is None and made.survival is not None
    depth = np.array([row.survival(float(x)) for row, x in zip(made.rows(), truth, strict=True)])
    for part in (point <= np.median(point), point > np.median(point)):
        assert np.mean(depth[part]) == pytest.approx(0.5, abs=0.06)
        assert np.mean(depth[part] < 0.1) == pytest.approx(0.1, abs=0.06)


def test_where_half_the_rows_lie_the_honest_half_is_told_the_truth_and_equal_predictions_the_same() -> None:
    truth = lengths_of(4000)
    point = AdversarialOracle(0.5).from_truth(truth).point
    made = SpreadOracle(AdversarialOracle(0.5), spread=True).from_truth(truth, np.random.default_rng(3))
    assert point is not None and made.survival is not None and np.mean(point == 1.0) >= 0.5
    for row, x, p in zip(made.rows(), truth, point, strict=True):
        if p > 1.0:
            assert row.survival(1.3 * x + 1.0) == 0.0 and row.survival(x / 1.3 - 1.0) == 1.0
    for p in np.unique(point):
        assert np.ptp(np.asarray(made.survival)[point == p], axis=0).max() == 0.0


def test_no_band_is_small_for_ties() -> None:
    class Said:
        def from_truth(self, output_len: Any, rng: Any) -> Predictions:
            return Predictions.from_points(np.repeat([1.0, 2.0, 3.0], [1, 148, 1]))

    made = SpreadOracle(Said(), spread=True).from_truth(lengths_of(150), np.random.default_rng(3))  # type: ignore[arg-type]
    assert made.survival is not None
    assert len(np.unique(made.survival[0])) > 4  # a row alone in its band would be told its truth


def test_what_errs_by_no_spread_is_a_point_on_the_grid_and_keeps_its_bias() -> None:
    truth = lengths_of(500)
    for factor in (1.0, 3.0):
        made = SpreadOracle(BiasedOracle(factor), spread=True).from_truth(truth, np.random.default_rng(3))
        for row, x in zip(made.rows(), truth * factor, strict=True):
            assert row.survival(1.3 * x + 1.0) == 0.0 and row.survival(x / 1.3 - 1.0) == 1.0
    assert len(SpreadOracle(Oracle(), spread=True).from_truth([], np.random.default_rng(3))) == 0
    with pytest.raises(ValueError, match="says no points"):
        SpreadOracle(SpreadOracle(Oracle(), spread=True)).from_truth(truth, np.random.default_rng(3))


def test_confusion_is_that_of_the_predictor_it_was_measured_on(tmp_path: Path) -> None:
    """A predictor that shrinks to the mean: its errors by band come back, as does its order."""
    truth = lengths_of(60_000).astype(float)
    rng = np.random.default_rng(5)
    shrunk = np.exp(np.log(150.0) + 0.5 * (np.log(truth) - np.log(150.0)) + 0.4 * rng.standard_normal(len(truth)))
    errors = errors_by_band(shrunk, truth)
    (tmp_path / "report.json").write_text(json.dumps({"predictor": "x", "errors": errors}))
    later = lengths_of(60_000, 1)
    out = said(ConfusedOracle(tmp_path / "report.json"), later)
    again = errors_by_band(out, later)
    for one, other in zip(errors["bands"], again["bands"], strict=True):
        if one["n"] > 2000:
            assert_allclose(other["log_ratio"], one["log_ratio"], atol=0.12)
    assert kendall_tau(out, later) == pytest.approx(kendall_tau(shrunk, truth), abs=0.06)
    short, long = later < 16, later >= 1024
    assert np.median(out[short] / later[short]) > 1.5 and np.median(out[long] / later[long]) < 0.6


def test_bands_without_errors_take_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "errors.json"
    path.write_text(
        json.dumps({"levels": [0.0, 1.0], "bands": [{"from": 1, "log_ratio": None}, {"from": 100, "log_ratio": [0.0, 0.0]}]})
    )
    assert said(ConfusedOracle(path), np.array([1, 99, 100, 5000])).tolist() == [1, 99, 100, 5000]


def test_the_error_it_brings_along_regresses_to_the_mean() -> None:
    truth = lengths_of(20_000)
    out = said(ConfusedOracle(), truth)
    bands = {band["from"]: band["log_ratio"] for band in errors_by_band(out, truth)["bands"]}
    assert set(bands) == set(BANDS) and bands[1][10] > 0.5 > -0.5 > bands[1024][10]
    assert 0.2 < kendall_tau(out, truth) < 0.7  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no"),
        ("{", "is not JSON"),
        ('{"errors": null}', "only ranks"),
        ('{"levels": [0.1]}', "holds no `errors`"),
        ("[]", "holds no `errors`"),
        ('{"levels": [0.1, 0.9], "bands": [{"from": 1, "log_ratio": null}]}', "a band that has some"),
        ('{"levels": [0.1, 0.9], "bands": [{"from": 1, "log_ratio": [2, 1]}]}', "2 finite quantiles in order"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_name(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says) as raised:
        ConfusedOracle(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BiasedOracle(0.0), "factor=0.0"), (lambda: HeavyTailedOracle(-1.0), "alpha=-1.0"),
        (lambda: AdversarialOracle(1.5), "share=1.5"), (lambda: AdversarialOracle(length=0.5), "length=0.5"),
        (lambda: ShiftedOracle(Oracle(), Oracle(), -0.1), "share=-0.1"),
        (lambda: SpreadOracle(Constant()), "a Constant is no oracle"), (lambda: SpreadOracle(Oracle(), bands=0), "bands=0"),
    ],
)  # fmt: skip
def test_errors_that_are_none_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
