"""Predictors that say a distribution: buckets, log-t, quantile heads, similar past prompts, the model's own estimate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import t as student

from lengthwise.predictors.buckets import Buckets, marginal_survival
from lengthwise.predictors.calibration import kaplan_meier
from lengthwise.predictors.contract import check_predictor, synthetic_rows
from lengthwise.predictors.histogram import Histogram, _redistributed
from lengthwise.predictors.log_t import LogT, corrected, log_t_survival, mean_log_abs_t
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor, TrainingRows
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.retrieval import Retrieval, weighted_survival
from lengthwise.predictors.scores import crps, kendall_tau, score
from lengthwise.predictors.self_estimate import SelfEstimate, parse_estimate, prompt_key, question, read_estimates
from lengthwise.predictors.upper_quantile import UpperQuantile, missed
from lengthwise.sched import EDGES
from lengthwise.sched.prediction import survival_at

NU = 3.5
LOCATION = np.array([3.0, 4.0, 5.0, 6.0])
SCALE = np.array([0.7, 0.15, 0.4, 0.2])
ASKS = ("yes or no, is it so", "poem about the rain", "python function that sorts", "detailed report on a town")


def known_truth(num_rows: int, seed: int, limit: float = math.inf) -> tuple[Prompts, Any, Any, Any]:
    """(prompts, lengths, censored, topic): log lengths are LOCATION + SCALE x t(NU) of the topic; cut at `limit`."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(4, size=num_rows)
    times = rng.integers(0, 9, num_rows).tolist()
    texts = [f"Number {i}: write a {ASKS[topic[i]]} {'again ' * times[i]}" for i in range(num_rows)]
    lengths = np.maximum(1.0, np.round(np.exp(LOCATION[topic] + SCALE[topic] * rng.standard_t(NU, num_rows))))
    lengths = np.minimum(lengths, 20_000.0)
    cut = lengths > limit
    return Prompts(np.full(num_rows, 20.0), texts), np.where(cut, limit, lengths), cut, topic


def trained(make: Any, *, limit: float = math.inf, num_rows: int = 1500) -> LengthPredictor:
    predictor = make()
    predictor.fit(*known_truth(num_rows, seed=1, limit=limit)[:3])
    return predictor


def rows_of(lengths: Any, censored: Any, texts: Any = None) -> TrainingRows:
    n = len(lengths)
    prompts = Prompts(np.ones(n), texts)
    return TrainingRows(prompts, np.asarray(lengths, float), np.asarray(censored, bool), np.arange(n))


# --- distributions on rows whose true distribution is known --------------------------------------------------------------


@pytest.mark.parametrize("make", [LogT, Histogram, UpperQuantile, Retrieval])
def test_distributions_are_near_the_true_one(make: Any) -> None:
    prompts, lengths, _, topic = known_truth(1500, seed=2)
    out = trained(make).predict_columns(prompts)
    best = Predictions.from_survivals(log_t_survival(LOCATION[topic], SCALE[topic], NU, 20_000.0))
    whole = Predictions.from_survivals(np.tile(marginal_survival(lengths, np.zeros(1500, dtype=bool)), (1500, 1)))
    mine, truth, nothing = (float(np.mean(crps(p, lengths))) for p in (out, best, whole))
    assert truth < mine < truth + 0.15 * (nothing - truth)
    found = score(out, lengths)
    for level, low, high in (("50", 0.42, 0.62), ("80", 0.72, 0.90), ("90", 0.84, 0.96)):
        assert low < found["coverage"][level] < high, (level, found["coverage"])
    assert kendall_tau(out.quantiles((0.5,))[:, 0], lengths) > 0.6  # type: ignore[operator]


@pytest.mark.parametrize("make", [LogT, Histogram, UpperQuantile, Retrieval])
def test_p3_censored_answers_leave_the_tail_where_it_was(make: Any) -> None:
    """A third of the answers are cut at 200 tokens: what a row says of lengths above comes from its being cut alone."""
    predictor = trained(make, limit=200.0)
    prompts, lengths, _, topic = known_truth(800, seed=3)
    out = predictor.predict_columns(prompts)
    beyond = survival_at(np.asarray(out.survival), [190.0])[:, 0]
    assert abs(beyond.mean() - np.mean(lengths > 190.0)) < 0.05
    naive = make()
    fit_prompts, seen, cut, _ = known_truth(1500, seed=1, limit=200.0)
    naive.fit(fit_prompts, seen, np.zeros_like(cut))
    shorter = naive.predict_columns(prompts)
    long = topic == 3
    q = 0.75
    assert np.median(out.quantiles((q,))[long]) > 1.02 * np.median(shorter.quantiles((q,))[long])


# --- buckets --------------------------------------------------------------------------------------------------------------


def test_p5_every_length_has_a_class_in_range() -> None:
    """Group size 64 and at most 8192, where a class of one too many was an assertion at the first short answer."""
    some = Buckets(np.arange(64, 8193, 64), marginal_survival(*lengths_and_cut()))
    classes = some.classes([0, 10, 63, 64, 65, 8192, 9000])
    assert classes.tolist() == [0, 0, 0, 0, 1, 127, 128] and len(some) == 129
    assert np.all((classes >= 0) & (classes < len(some))) and np.all(np.diff(classes) >= 0)


def lengths_and_cut(num_rows: int = 300) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    return np.maximum(1, np.round(rng.lognormal(5, 1, num_rows))), rng.random(num_rows) < 0.1


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=9, unique=True), st.integers(0, 40_000))
def test_buckets_are_laws(bounds: list[int], length: int) -> None:
    some = Buckets(sorted(bounds), marginal_survival(*lengths_and_cut()))
    k = int(some.classes([length])[0])
    assert 0 <= k < len(some)
    low, high = ([0.0, *sorted(bounds), math.inf][i] for i in (k, k + 1))
    assert low < length <= high or (length == 0 and k == 0)
    sure = some.survival(np.eye(len(some)))  # rows: all mass in one bucket
    assert np.all(np.diff(sure, axis=1) <= 1e-12) and sure.min() >= 0 and sure.max() <= 1
    assert np.all(sure[k][high <= EDGES] <= 1e-6) and np.all(sure[k][low >= EDGES] >= 1 - 1e-6)
    assert_allclose(some.survival(some.mass[None, :])[0], some.marginal, atol=1e-9)  # the training shares give all lengths back
    above = some.shares_above(float(length))
    assert above.sum() == pytest.approx(1.0) and np.all(above[:k] <= 1e-12) and above.min() >= 0


def test_equal_mass_bounds_are_quantiles_and_equal_ones_are_one() -> None:
    lengths = np.arange(1, 101)
    some = Buckets.fit(lengths, np.zeros(100, dtype=bool), levels=(0.25, 0.5, 0.75))
    assert np.abs(some.bounds - [25, 50, 75]).max() <= 1
    assert np.abs(np.bincount(some.classes(lengths)) - 25).max() <= 2
    many = Buckets.fit([7] * 80 + [9] * 20, np.zeros(100, dtype=bool), levels=(0.25, 0.5, 0.75))
    assert many.bounds.tolist() == [7] and many.classes([7, 9]).tolist() == [0, 1]
    for wrong in ({}, {"levels": (0.5,), "bounds": (9,)}):
        with pytest.raises(ValueError, match="state one of both"):
            Buckets.fit(lengths, lengths < 0, **wrong)  # type: ignore[arg-type]
    for bounds in ([], [9, 9], [0.5], [9, 8], [math.inf]):
        with pytest.raises(ValueError, match="bucket bounds"):
            Buckets(bounds, some.marginal)


def test_a_censored_row_counts_in_the_buckets_above_only() -> None:
    lengths = np.append(np.arange(1.0, 1000.0), 60.0)
    rows = rows_of(lengths, np.arange(1000) == 999)
    some = Buckets.fit(rows.lengths, rows.censored, bounds=(50, 500))
    row, target, weight = _redistributed(some, rows)
    mine = row == 999
    assert weight[~mine].tolist() == [1.0] * 999 and np.bincount(target[~mine].astype(int)).tolist() == [50, 450, 499]
    assert target[mine].tolist() == [1, 2] and weight[mine].sum() == pytest.approx(1.0)
    assert weight[mine] == pytest.approx([440 / 939, 499 / 939], abs=0.03)  # of those that are longer than 60


def test_a_histogram_takes_stated_bounds_and_says_its_direction() -> None:
    predictor = trained(lambda: Histogram(bounds=[40, 90, 300], num_rounds=10), num_rows=300)
    state = predictor.state()
    assert state.arrays["bucket_bounds"].tolist() == [40, 90, 300]
    assert state.values["direction"] == "a higher class is a longer answer"
    with pytest.raises(ValueError, match="num_buckets=1"):
        Histogram(num_buckets=1)


# --- log-t ----------------------------------------------------------------------------------------------------------------


def test_log_t_survival_is_students() -> None:
    out = log_t_survival(np.array([5.0, 2.0]), np.array([0.5, 1.5]), NU, 3000.0)
    for row, (mu, sigma) in zip(out, ((5.0, 0.5), (2.0, 1.5)), strict=True):
        assert_allclose(row[EDGES < 3000], student.sf((np.log(EDGES[EDGES < 3000]) - mu) / sigma, NU))
        assert not row[EDGES >= 3000].any()


@pytest.mark.parametrize("nu", [1.0, 3.5, 30.0])
def test_the_mean_logarithm_of_a_t(nu: float) -> None:
    x = (np.arange(200_000) + 0.5) / 200_000
    assert mean_log_abs_t(nu) == pytest.approx(np.mean(np.log(np.abs(student.ppf(x, nu)))), abs=2e-3)


def test_two_numbers_mend_shift_and_stretch_also_under_censoring() -> None:
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.2, 1.0, 4000)
    errors = 0.3 + 1.7 * scale * rng.standard_t(NU, 4000)
    limit = rng.uniform(0.0, 2.0, 4000)
    cut = errors > limit
    assert 0.2 < cut.mean() < 0.6
    assert corrected(np.minimum(errors, limit), scale, cut, NU) == pytest.approx((0.3, 1.7), abs=0.08)
    assert corrected(errors, scale, np.zeros(4000, dtype=bool), NU) == pytest.approx((0.3, 1.7), abs=0.06)
    assert corrected(np.zeros(50), np.ones(50), np.zeros(50, dtype=bool), NU)[1] == pytest.approx(1 / 8)  # never nothing


def test_log_t_finds_location_and_scale() -> None:
    prompts, _, _, topic = known_truth(400, seed=7)
    predictor = trained(LogT)
    assert isinstance(predictor, LogT)
    location, scale = predictor.heads(prompts)
    for k in range(4):
        assert np.median(location[topic == k]) == pytest.approx(LOCATION[k], abs=0.3)
        assert 0.6 < np.median(scale[topic == k]) / SCALE[k] < 1.6
    assert np.median(scale[topic == 0]) > 2 * np.median(scale[topic == 1])


# --- quantile heads ---------------------------------------------------------------------------------------------------------


def test_the_score_is_the_upper_quantile_and_few_answers_exceed_it() -> None:
    prompts, lengths, _, _ = known_truth(2000, seed=4)
    predictor = trained(UpperQuantile)
    out = predictor.predict_columns(prompts)
    assert np.mean(lengths > out.score) == pytest.approx(0.05, abs=0.025)
    assert_allclose(out.score, out.quantiles((0.95,))[:, 0], rtol=0.15)
    assert np.all(out.score >= out.quantiles((0.5,))[:, 0])


def test_crossing_heads_are_sorted() -> None:
    predictor = trained(lambda: UpperQuantile(num_rounds=5), num_rows=300)
    assert isinstance(predictor, UpperQuantile)
    predictor._shifts = predictor._shifts[::-1] * 9.0  # heads that cross wildly
    out = predictor.predict_columns(known_truth(50, seed=8)[0])
    values = out.quantiles((0.05, 0.5, 0.95))
    assert np.all(np.diff(values, axis=1) >= 0) and out.score.min() >= 1.0
    with pytest.raises(ValueError, match="within"):
        UpperQuantile(level=1.0)


def test_a_missed_quantile_is_the_error_that_leaves_a_share_above() -> None:
    errors = np.linspace(-1.0, 1.0, 201)
    exact = rows_of(np.ones(201), np.zeros(201))
    assert missed(errors, exact, 0.75) == pytest.approx(0.5, abs=0.02)
    cut = errors > 0.0  # all above 0 are only known to be more
    assert missed(np.minimum(errors, 0.0), rows_of(np.ones(201), cut), 0.25) == pytest.approx(-0.5, abs=0.02)
    assert missed(np.minimum(errors, 0.0), rows_of(np.ones(201), cut), 0.9) == pytest.approx(0.0, abs=0.02)
    errors, limit = np.random.default_rng(0).uniform(-1, 1, (2, 3000))  # half of them cut, anywhere
    assert missed(np.minimum(errors, limit), rows_of(np.ones(3000), errors > limit), 0.5) == pytest.approx(0.0, abs=0.06)


# --- retrieval --------------------------------------------------------------------------------------------------------------


def test_weighted_survival_with_equal_weights_is_the_product_limit() -> None:
    flat = np.exp(-EDGES / 100.0)
    lengths, cut = np.array([5.0, 9.0, 9.0, 40.0]), np.array([False, True, False, False])
    out = weighted_survival(lengths, cut, np.ones(4), flat)
    at = {e: float(out[np.searchsorted(EDGES, e)]) for e in (4.0, 6.0, 9.0, 13.0)}
    assert at[4.0] == 1.0 and at[6.0] == pytest.approx(3 / 4) and at[9.0] == at[13.0] == pytest.approx(3 / 4 * 2 / 3)
    assert not out[EDGES >= 40].any()
    doubled = weighted_survival(np.repeat(lengths, 2), np.repeat(cut, 2), np.ones(8), flat)
    assert_allclose(weighted_survival(lengths, cut, np.full(4, 2.0), flat), out)
    assert abs(doubled - out).max() < 0.1
    censored = weighted_survival(lengths, np.array([False, False, False, True]), np.ones(4), flat)
    i = int(np.searchsorted(EDGES, 40.0))
    assert_allclose(censored[i:], 0.25 * flat[i:] / flat[i])  # goes on as all lengths do


def test_retrieval_finds_the_same_prompt_and_says_all_lengths_of_a_strange_one() -> None:
    texts = ["alpha beta gamma"] * 30 + ["delta epsilon zeta"] * 30
    lengths = np.array([50] * 15 + [60] * 15 + [900] * 30)
    predictor = Retrieval(prior=1e-6)
    predictor.fit(Prompts(np.ones(60), texts), lengths, np.zeros(60))
    out = predictor.predict_columns(Prompts(np.ones(3), ["Alpha beta gamma", "delta epsilon zeta", "never seen words"]))
    assert 48 < out.quantiles((0.5,))[0, 0] < 65 and 800 < out.quantiles((0.5,))[1, 0] < 1000
    assert_allclose(np.asarray(out.survival)[2], marginal_survival(lengths, np.zeros(60, dtype=bool)))
    few = Retrieval(num_neighbours=1, prior=1e-6)
    few.fit(Prompts(np.ones(60), texts), lengths, np.zeros(60))
    assert few.predict_columns(Prompts(np.ones(1), ["alpha beta gamma"])).quantiles((0.9,))[0, 0] < 60  # the first of equals
    with pytest.raises(ValueError, match="num_neighbours=0"):
        Retrieval(num_neighbours=0)


# --- the model's own estimate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("120", 120.0), ("About 1,200 words.", 1200.0), ("I would say 50-100 words", 50.0), ("~ 37.5 tokens", 37.5), ("", None),
        ("I cannot tell.", None), ("0", None), ("zero, or 12", 12.0), ("-5", 5.0), ("99999999999", None), ("**250**\n", 250.0),
    ],
)  # fmt: skip
def test_the_first_number_of_an_answer_is_the_estimate(answer: str, number: float | None) -> None:
    assert parse_estimate(answer) == number


def test_the_question_holds_the_prompt_and_asks_for_a_number() -> None:
    asked = question("Sing of arms.")
    assert asked.startswith("Sing of arms.\n") and "words" in asked and "number" in asked


def estimates_file(path: Path, prompts: Prompts, estimates: Any) -> str:
    lines = [
        json.dumps({"prompt_sha": prompt_key(text), "estimate": float(x)})
        for text, x in zip(prompts.texts or (), estimates, strict=True)
        if x > 0
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_estimates_are_read_by_hash_and_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    rows = [
        {"prompt_sha": prompt_key("a"), "estimate": 7},
        {"prompt_sha": prompt_key("b"), "answer": "some 40 words"},
        {"prompt_sha": prompt_key("c"), "answer": "no idea"},
        {"prompt_sha": prompt_key("a"), "estimate": 9.5},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_estimates(file) == {prompt_key("b"): 40.0, prompt_key("a"): 9.5}
    for line, why in (
        ("{", "line 2"), ('{"estimate": 3}', "prompt_sha"), ('{"prompt_sha": "xyz", "estimate": 3}', "line 2"),
        ('{"prompt_sha": "ab"}', "answer"), ('{"prompt_sha": "ab", "estimate": -3}', "-3.0"), ("[1]", "line 2"),
    ):  # fmt: skip
        file.write_text(json.dumps(rows[0]) + "\n" + line)
        with pytest.raises(ValueError, match=why):
            read_estimates(file)


def test_self_estimate_learns_the_factor_and_keeps_the_contract(tmp_path: Path) -> None:
    prompts, lengths, cut = synthetic_rows(200)
    asked, _, _ = synthetic_rows(65, seed=1)
    rng = np.random.default_rng(0)
    words = lengths / 1.4 * np.exp(0.2 * rng.standard_normal(200))
    words[::10] = 0.0  # the model gave no number
    texts = [*(prompts.texts or ()), *(asked.texts or ())]
    path = estimates_file(tmp_path / "e.jsonl", Prompts(np.ones(265), texts), np.concatenate((words, rng.uniform(5, 500, 65))))
    check_predictor(lambda: SelfEstimate(path), tmp_path / "artefact")

    predictor = SelfEstimate(path)
    predictor.fit(prompts, lengths, cut)
    assert predictor.factor == pytest.approx(1.4, rel=0.12)
    out = predictor.predict_columns(prompts)
    told = words > 0
    assert kendall_tau(out.score[told], lengths[told]) > 0.75  # type: ignore[operator]
    assert_allclose(np.asarray(out.survival)[~told], np.tile(marginal_survival(lengths, cut), (20, 1)))
    assert abs(score(out.take(np.flatnonzero(told)), lengths[told], cut[told])["coverage"]["80"] - 0.8) < 0.1


def test_self_estimate_refuses_to_guess(tmp_path: Path) -> None:
    prompts, lengths, cut = synthetic_rows(60)
    with pytest.raises(ValueError, match=r"predictor\.path=FILE\.jsonl"):
        SelfEstimate().fit(prompts, lengths, cut)
    path = estimates_file(tmp_path / "e.jsonl", prompts.take(range(9)), np.ones(9))
    with pytest.raises(ValueError, match="estimates 9 of 60 training prompts, 20 are needed"):
        SelfEstimate(path).fit(prompts, lengths, cut)


# --- odd input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LogT, Histogram, UpperQuantile, Retrieval])
def test_odd_prompts_and_few_rows_get_finite_predictions(make: Any) -> None:
    predictor = trained(make, num_rows=60)
    odd = ["", "\ud83d lone", "x" * 100_000, "\x00\u2028", "写一首诗 " * 9]
    out = predictor.predict_columns(Prompts(np.array([0, 1, 9e5, 2, 8]), odd))
    assert np.all(np.isfinite(out.means())) and np.all(np.isfinite(out.score)) and out.means().min() > 0.5
    with pytest.raises(ValueError, match="is not fitted"):
        make().predict_columns(Prompts(np.ones(1), ["a"]))
    with pytest.raises(ValueError, match="needs prompt text"):
        make().fit(Prompts(np.ones(30)), np.arange(1, 31), np.zeros(30))


def test_the_marginal_is_the_product_limit_of_all_lengths() -> None:
    lengths, cut = lengths_and_cut()
    values, survival = kaplan_meier(lengths, cut)
    at = np.searchsorted(values, EDGES, side="right") - 1
    inside = (at >= 0) & (np.quantile(lengths, 0.95) > EDGES)
    assert_allclose(marginal_survival(lengths, cut)[inside], survival[at[inside]], atol=0.02)
