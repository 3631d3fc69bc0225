"""Predictors: the contract of every node, honest splits, calibration, artefacts, fallbacks, latency, oracles, scores."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from omegaconf import OmegaConf

import lengthwise.conf
from lengthwise.predictors import artefact
from lengthwise.predictors.calibration import Residuals, kaplan_meier, lift_censored, soft_log
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.context import CONTEXT
from lengthwise.predictors.contract import check_predictor, synthetic_rows
from lengthwise.predictors.fallback import KINDS, Fallback
from lengthwise.predictors.features import FEATURES, hand_features, refuse_label_columns
from lengthwise.predictors.gbdt import GBDT
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.near_duplicates import prompt_groups
from lengthwise.predictors.noisy_oracle import NoisyOracle
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.profiling import profile_latency
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import bands, crps, kendall_tau, pinball, score, top_recall
from lengthwise.predictors.splits import SPLITS, grouped_folds, named_split, out_of_fold, overlaps, refuse_overlap
from lengthwise.predictors.tfidf import Tfidf
from lengthwise.sched import EDGES, LengthDistribution, Request
from lengthwise.sched.prediction import survival_at

NODES = sorted(Path(next(iter(lengthwise.conf.__path__))).glob("predictor/*.yaml"))
TEXT = (Ridge, GBDT)
# Nodes whose contract is checked in a test of their own, and why.
CHECKPOINT = dict.fromkeys(
    ("encoder", "encoder_regression", "ltr_ranker", "pars", "s3", "ssjf"), "it fine-tunes a checkpoint"
)  # fmt: skip
APART = {
    "embedding": "its encoder is an extra's", "ensemble": "it fits its members six times", **CHECKPOINT,
    "self_estimate": "it reads a file of estimates",
}  # fmt: skip


def node(path: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]


def fitted(make: type[LengthPredictor], num_rows: int = 200) -> LengthPredictor:
    predictor = make()
    predictor.fit(*synthetic_rows(num_rows))
    predictor.unit = "tokens"
    return predictor


# --- the contract of every node ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NODES, ids=lambda p: p.stem)
def test_p6_every_node_keeps_the_contract(path: Path, tmp_path: Path) -> None:
    settings = node(path)
    if path.stem in APART:
        pytest.skip(f"checked in a test of its own: {APART[path.stem]}")
    if "defaults" in settings:  # points at another node
        assert all((path.parent / f"{name}.yaml").exists() for name in settings["defaults"] if name != "_self_")
        return
    if path.stem == "none":
        assert settings == {"_target_": None}
        return
    if path.stem in ("artefact", "artefact_default", "artefact_best", "transferred"):
        fitted(PromptLength).save(tmp_path / "saved")
        loaded = instantiate({**settings, "path": str(tmp_path / "saved")})
        assert isinstance(loaded, PromptLength) and loaded.fitted
        return
    made = instantiate(settings)
    assert made.name == path.stem  # tables and artefacts use the node's name
    if isinstance(made, LengthPredictor):
        check_predictor(lambda: instantiate(settings), tmp_path / "artefact")
    else:
        out = made.from_truth(np.array([3, 1, 700]), np.random.default_rng(0))
        assert len(out) == 3 and np.all(out.score >= 0)
        assert len(made.from_truth(np.zeros(0, dtype=np.int64), np.random.default_rng(0))) == 0


def test_the_contract_notices_a_predictor_that_looks_at_its_neighbours(tmp_path: Path) -> None:
    class Rank(Constant):
        def predict_columns(self, prompts: Prompts) -> Predictions:
            return Predictions.from_points(1.0 + np.argsort(np.argsort(prompts.prompt_len)).astype(float))

    with pytest.raises(AssertionError, match="a batch changes its rows"):
        check_predictor(Rank, tmp_path, new_process=False)


@pytest.mark.parametrize("make", TEXT)
def test_text_predictors_refuse_rows_without_text(make: type[LengthPredictor]) -> None:
    prompts, lengths, censored = synthetic_rows(50)
    with pytest.raises(ValueError, match="needs prompt text"):
        make().fit(Prompts(prompts.prompt_len), lengths, censored)
    with pytest.raises(ValueError, match="request 7 has none"):
        fitted(make, 60).predict([Request(7, 0.0, 10)])


@pytest.mark.parametrize("make", [Constant, PromptLength, Ridge, GBDT])
def test_bad_training_rows_are_refused_by_name(make: type[LengthPredictor]) -> None:
    prompts, lengths, censored = synthetic_rows(50)
    with pytest.raises(ValueError, match="is not fitted"):
        make().predict_columns(prompts)
    with pytest.raises(ValueError, match="19 training rows, at least 20"):
        make().fit(prompts.take(range(19)), lengths[:19], censored[:19])
    with pytest.raises(ValueError, match="at least 1 token"):
        make().fit(prompts, np.zeros(50), censored)
    with pytest.raises(ValueError, match="uncensored"):
        make().fit(prompts, lengths, np.ones(50, dtype=bool))
    with pytest.raises(ValueError, match="output lengths"):
        make().fit(prompts, lengths[:-1], censored)


@pytest.mark.parametrize("make", [PromptLength, Ridge, GBDT])
def test_odd_prompts_get_finite_predictions(make: type[LengthPredictor]) -> None:
    odd = [
        "",
        " \n\t",
        "x" * 200_000,
        "\ud83d lone surrogate",
        "写一首诗 " * 50,
        "<|endoftext|>",
        "\x00\x85\u2028",
        "9" * 5000,
        "```" * 99,
    ]
    out = fitted(make).predict_columns(Prompts(np.array([0, 1, 10**6, 5, 9, 3, 2, 1, 4]), odd))
    assert np.all(np.isfinite(out.means())) and out.means().min() >= 0.5


def test_the_constant_is_the_median_and_needs_no_training_when_stated() -> None:
    prompts, lengths, censored = synthetic_rows(99)
    predictor = Constant()
    predictor.fit(prompts, lengths, censored)
    assert predictor.predict_columns(prompts).point.tolist() == [np.median(lengths)] * 99  # type: ignore[union-attr]
    assert Constant(length=77.0).predict([Request(0, 0.0, 5)])[0].mean() == 77.0


def test_refine_leaves_predictions_as_they_are() -> None:
    mine = LengthDistribution.point(5.0)
    assert Constant(9.0).refine([Request(0, 0.0, 1, prediction=mine)], [3]) == [mine]
    with pytest.raises(ValueError, match="no prediction to refine"):
        Constant(9.0).refine([Request(0, 0.0, 1)], [3])


def test_gbdt_learns_what_the_prompt_says() -> None:
    train, test = synthetic_rows(600, seed=2), synthetic_rows(200, seed=3)
    tau = {}
    for make in (Constant, PromptLength, Ridge, GBDT):
        predictor = make()
        predictor.fit(*train)
        tau[make.name] = kendall_tau(predictor.predict_columns(test[0]).score, test[1])
    assert tau["constant"] == 0.0
    assert abs(tau["prompt_length"]) < 0.1  # these lengths do not depend on it
    assert tau["ridge"] > 0.5 and tau["gbdt"] > 0.5


@pytest.mark.parametrize("make", [PromptLength, Ridge, GBDT])
def test_intervals_cover_what_they_say_on_rows_not_trained_on(make: type[LengthPredictor]) -> None:
    predictor = make()
    predictor.fit(*synthetic_rows(800, seed=4))
    prompts, lengths, _ = synthetic_rows(2000, seed=5)
    found = score(predictor.predict_columns(prompts), lengths)["coverage"]
    for level, low, high in (("50", 0.45, 0.58), ("80", 0.75, 0.87), ("90", 0.86, 0.96)):
        assert low < found[level] < high
    for q in (0.1, 0.5, 0.9):
        assert abs(found[f"below_{q:g}"] - q) < 0.06


# --- censored labels --------------------------------------------------------------------------------------------------


def test_kaplan_meier_by_hand() -> None:
    values, survival = kaplan_meier([1.0, 2.0, 3.0, 4.0], [False, True, False, False])
    assert values.tolist() == [1.0, 3.0, 4.0]
    assert_allclose(survival, [4 / 5, 4 / 5 * 2 / 3, 4 / 5 * 2 / 3 * 1 / 2])


def test_one_outlier_does_not_inherit_the_mass_of_the_censored_rows() -> None:
    observed = np.concatenate((np.linspace(0.0, 1.0, 500), np.full(20, 1.0), [5.0]))
    cut = np.zeros(521, dtype=bool)
    cut[500:520] = True
    whole, _ = kaplan_meier(observed, cut)
    assert whole[-1] == 5.0
    fitted = Residuals.fit(np.zeros(521), observed, cut, 1.0)
    assert fitted.knots[-1] <= 1.0 and 0.02 < fitted.levels[-1] < 0.06


def test_censored_rows_push_the_tail_up_never_down() -> None:
    rng = np.random.default_rng(0)
    truth = np.exp(rng.normal(5.0, 0.7, 4000))
    seen, cut = np.minimum(truth, 300.0), truth > 300.0
    zero = np.zeros(4000)
    honest = Residuals.fit(zero, soft_log(seen, 1.0), cut, 1.0)
    naive = Residuals.fit(zero, soft_log(seen, 1.0), zero.astype(bool), 1.0)
    dropped = Residuals.fit(zero[~cut], soft_log(seen[~cut], 1.0), zero[~cut].astype(bool), 1.0)
    at = {name: r.survival(np.zeros(1))[0] for name, r in {"honest": honest, "naive": naive, "dropped": dropped}.items()}
    i, j = int(np.searchsorted(EDGES, 300.0)) - 1, int(np.searchsorted(EDGES, 320.0))
    assert_allclose(at["honest"][i], np.mean(truth > EDGES[i]), atol=0.02)
    assert at["dropped"][i] < at["honest"][i] - 0.05
    assert at["honest"][j] > 0.04 and at["naive"][j] < 0.01


def test_lifting_moves_only_censored_labels_and_only_up() -> None:
    location, observed = np.zeros(6), np.array([-1.0, 0.0, 1.0, 2.0, 0.5, 3.0])
    cut = np.array([False, False, False, False, True, True])
    lifted = lift_censored(location, observed, cut)
    assert lifted[:4].tolist() == observed[:4].tolist()
    assert lifted[4] == 1.5 and lifted[5] == 3.0  # the mean of 1 and 2; nothing seen above 3


def test_p3_scores_leave_censored_rows_out_and_count_them() -> None:  # ten rows, three cut at 1000
    lengths = np.array([10, 20, 30, 40, 50, 60, 70, 1000, 1000, 1000])
    cut = lengths == 1000
    out = score(Predictions.from_points(lengths.astype(float)), lengths, cut)
    assert out["num_censored"] == 3 and out["n"] == 7 and out["mae"] == 0.0
    wrong = Predictions.from_points(np.where(cut, 1.0, lengths))
    assert score(wrong, lengths, cut)["mae"] == 0.0 and score(wrong, lengths)["mae"] > 100.0


def test_p2_bands_show_the_tail_and_the_share_of_long_labels() -> None:
    lengths = np.array([10, 100, 511, 512, 3000])
    rows = bands(np.full(5, 100.0), np.full(5, 100.0), lengths, np.array([False, False, False, False, True]))
    share = {row["from"]: row["share"] for row in rows}
    assert share[512] + share[1024] + share[2048] == pytest.approx(2 / 5)
    last = rows[-1]
    assert last["to"] is None and last["n"] == 0 and last["num_censored"] == 1 and last["mae"] is None
    assert next(row for row in rows if row["from"] == 512)["mae"] == 412.0


# --- groups, splits, folds --------------------------------------------------------------------------------------------


def test_p10_near_duplicates_and_conversations_are_one_group() -> None:
    long = "Write me a detailed essay about the history of the Roman Empire, "
    prompts = [long + "part one", "other", long.upper() + "PART TWO!", "other ", "third", "fourth"]
    assert prompt_groups(prompts).tolist() == [0, 1, 0, 1, 2, 3]
    assert prompt_groups(prompts, ["a", "b", "c", "d", "d", "a"]).tolist() == [0, 1, 0, 1, 1, 0]  # chained
    assert prompt_groups(["???", "!!!", "", "???"]).tolist() == [0, 1, 2, 0]  # without letters: equal text only
    with pytest.raises(ValueError, match="1 conversations for 2 prompts"):
        prompt_groups(["a", "b"], ["x"])


def test_p10_five_turns_of_a_hundred_conversations_and_twenty_duplicates_never_straddle() -> None:
    conversation = np.repeat(np.arange(100), 5)
    prompts = [f"turn {i} of its own" for i in range(500)]
    for i in range(20):
        prompts[480 + i] = prompts[i]
    group = prompt_groups(prompts, conversation)
    for name in SPLITS:
        train, test = named_split(name, group)
        assert len(train) + len(test) == 500 and 0.18 <= len(test) / 500 <= 0.35
        assert not set(conversation[train]) & set(conversation[test])
        assert not {prompts[i] for i in train} & {prompts[i] for i in test}
        assert overlaps(group, train, test).size == 0
    with pytest.raises(ValueError, match=r"2 group\(s\) are in training and in test, the first: \[0, 3\]"):
        refuse_overlap([0, 0, 1, 3, 3], [0, 2, 3], [1, 4])


@given(st.lists(st.integers(0, 12), min_size=4, max_size=80).filter(lambda g: len(set(g)) >= 2), st.integers(0, 3))
def test_folds_are_whole_groups(group: list[int], seed: int) -> None:
    num_folds = min(4, len(set(group)))
    fold = grouped_folds(group, num_folds, seed)
    assert set(fold.tolist()) == set(range(num_folds))
    for g in set(group):
        assert len({int(f) for f, x in zip(fold, group, strict=True) if x == g}) == 1
    renamed = [100 - g for g in group]
    assert grouped_folds(renamed, num_folds, seed).tolist() == fold.tolist()  # the partition decides, not the ids


def test_named_splits_are_three_and_kept() -> None:
    group = np.arange(50) // 2
    tests = {name: named_split(name, group)[1].tolist() for name in SPLITS}
    assert tests["0"] != tests["1"] != tests["2"] != tests["0"]
    assert tests["0"] == [0, 1, 8, 9, 12, 13, 16, 17, 20, 21]  # named once: a change of the draw is a new name
    with pytest.raises(ValueError, match="not one of 0, 1, 2"):
        named_split("3", group)
    with pytest.raises(ValueError, match="at least 2 groups"):
        named_split("0", np.zeros(9))
    with pytest.raises(ValueError, match="num_folds=6"):
        grouped_folds([0, 1, 2, 3, 4], 6)


def test_p10_out_of_fold_predictions_come_from_models_that_have_not_seen_the_group() -> None:
    prompts, lengths, censored = synthetic_rows(120)
    group = np.arange(120) // 3
    seen: list[set[int]] = []

    class Spy(Constant):
        def fit(self, prompts: Any, lengths: Any, censored: Any, *, group: Any = None) -> None:
            super().fit(prompts, lengths, censored, group=group)
            seen.append(set(group.tolist()))
            self._length = float(len(seen))  # says which fit predicts

    ticks: list[tuple[int, int]] = []
    out, fold = out_of_fold(Spy, prompts, lengths, censored, group, num_folds=4, progress=lambda k, n: ticks.append((k, n)))
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)] and np.bincount(fold).min() >= 27
    for i in range(120):
        assert out.score[i] == fold[i] + 1 and int(group[i]) not in seen[fold[i]]
    whole, fold = out_of_fold(PromptLength, prompts, lengths, None, None, num_folds=3)
    assert len(whole) == 120 and whole.survival is not None


# --- features ---------------------------------------------------------------------------------------------------------


def test_features_are_named_and_see_what_they_name() -> None:
    prompts = ["Write a python function.\n```x```", "How many people live in Rome?", "Écris 200 words, please"]
    x = dict(zip(FEATURES, hand_features(prompts, [9, 8, 7]).T, strict=True))
    assert len(set(FEATURES)) == len(FEATURES)
    assert x["log_tokens"].tolist() == np.log1p([9, 8, 7]).tolist()
    assert x["num_fences"].tolist() == [2, 0, 0] and x["ends_question"].tolist() == [0, 1, 0]
    assert x["starts_write"].tolist() == [1, 0, 0] and x["starts_how"].tolist() == [0, 1, 0]
    assert x["names_language"].tolist() == [1, 0, 0] and x["says_please"].tolist() == [0, 0, 1]
    assert x["non_ascii_share"][2] > 0 == x["non_ascii_share"][0]
    assert x["log_amount"][2] == pytest.approx(math.log1p(260))
    with pytest.raises(ValueError, match="3 prompts"):
        hand_features(prompts, [1, 2])


@pytest.mark.parametrize("leak", [lambda y: y, lambda y: -np.log(y), lambda y: y**2 + 5])
def test_p10_a_column_that_is_or_orders_as_the_label_is_refused(leak: Any) -> None:
    _, lengths, _ = synthetic_rows(200)
    honest = np.random.default_rng(0).standard_normal(200) + np.log(lengths)
    refuse_label_columns(honest[:, None], ["honest"], lengths)
    with pytest.raises(ValueError, match="'leak' follows the label"):
        refuse_label_columns(np.column_stack([honest, leak(lengths.astype(float))]), ["honest", "leak"], lengths)


def test_tfidf_by_hand_and_back_from_text() -> None:
    model = Tfidf(num_terms=3)
    rows = model.fit(["a b", "a c", "a b b"]).toarray()
    assert list(model.vocabulary) == ["a", "a b", "b"]  # by frequency, then by name; "c" is in one prompt only
    idf = 1 + np.log(4 / np.array([4.0, 3.0, 3.0]))
    raw = np.array([1.0, 1.0, 1 + np.log(2)]) * idf
    assert_allclose(rows[2], raw / np.linalg.norm(raw))
    again = Tfidf.from_text(model.vocabulary_text, model.idf)
    assert np.array_equal(again.transform(["b a", "zz"]).toarray(), model.transform(["b a", "zz"]).toarray())
    assert not again.transform(["zz"]).toarray().any() and again.transform([]).shape == (0, 3)
    with pytest.raises(ValueError, match="2 terms and 3 weights"):
        Tfidf.from_text("a\nb", model.idf)


# --- artefacts --------------------------------------------------------------------------------------------------------


def test_the_same_fit_saves_the_same_bytes_and_no_pickle(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fitted(GBDT, 100).save(tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == ["arrays.npz", "artefact.json", "location.txt", "scale.txt", "vocabulary.txt"]
    for file in files:
        raw = (tmp_path / "one" / file).read_bytes()
        assert raw == (tmp_path / "two" / file).read_bytes() and b"pickle" not in raw
    page = json.loads((tmp_path / "one" / "artefact.json").read_text())
    assert page["unit"] == "tokens" and page["features"] == [*FEATURES, *CONTEXT]
    assert set(page["versions"]) >= {"lightgbm", "numpy", "lengthwise"}


def test_an_artefact_carries_its_origin_and_latency(tmp_path: Path) -> None:
    predictor = fitted(Constant)
    predictor.latency = LatencyModel(0.01, 0.002, 0.05, 8)
    predictor.mark_seen(["Hello there, world", "abc"])
    artefact.save(predictor, tmp_path, {"tokenizer": "t", "data_hash": "h", "split": "0"})
    loaded = artefact.load(tmp_path)
    assert loaded.latency == predictor.latency and loaded.training_median == predictor.training_median
    assert loaded.provenance == {"tokenizer": "t", "data_hash": "h", "split": "0"}
    assert loaded.has_seen(["hello THERE world!", "abd"]).tolist() == [True, False]


def test_another_unit_is_refused_or_marked(tmp_path: Path) -> None:
    fitted(Constant).save(tmp_path)
    assert artefact.load(tmp_path, unit="tokens").check_unit("tokens") is None
    with pytest.raises(ValueError, match=r"as 'tokens', the workload as 'words'; set predictor.transfer=true"):
        artefact.load(tmp_path, unit="words")
    marked = artefact.load(tmp_path, unit="words", transfer=True)
    assert len(marked.provenance["marks"]) == 1 and marked.provenance["marks"][0].startswith("transfer:")
    unitless = Constant(5.0)
    with pytest.raises(ValueError, match="has no unit"):
        unitless.save(tmp_path)


def test_other_versions_warn_or_are_refused_with_both_named(tmp_path: Path) -> None:
    fitted(PromptLength).save(tmp_path)
    page = json.loads((tmp_path / "artefact.json").read_text())

    def with_version(name: str, version: str) -> None:
        (tmp_path / "artefact.json").write_text(json.dumps({**page, "versions": {**page["versions"], name: version}}))

    with_version("numpy", "1.26.4")
    with pytest.warns(UserWarning, match=r"made with numpy 1.26.4, installed is \d"):
        artefact.load(tmp_path)
    with_version("lightgbm", "3.3.5")
    with pytest.raises(ValueError, match=r"made with lightgbm 3.3.5, installed is \d.*install lightgbm 3.x"):
        artefact.load(tmp_path)
    with_version("lightgbm", page["versions"]["lightgbm"].split(".")[0] + ".0.0")
    assert artefact.load(tmp_path).fitted  # a minor version is no reason


def test_torn_foreign_and_absent_artefacts_are_refused(tmp_path: Path) -> None:
    fitted(PromptLength).save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"holds no artefact\.json"):
        artefact.load(tmp_path / "b")
    with pytest.raises(ValueError, match="holds a PromptLength, not a Constant"):
        Constant.load(tmp_path / "a")
    model = tmp_path / "a" / "location.txt"
    model.write_text(model.read_text().replace("num_leaves", "num_Leaves", 1))
    with pytest.raises(ValueError, match="SHA-256 differs"):
        artefact.load(tmp_path / "a")
    model.unlink()
    with pytest.raises(ValueError, match=r"location.txt is missing"):
        artefact.load(tmp_path / "a")
    for name, value, message in (
        ("class", "os:system", "not a LengthPredictor"), ("class", "no_such_module:X", "cannot be imported"),
        ("format", 9, "format 9"),
    ):  # fmt: skip
        fitted(Constant).save(tmp_path / "c")
        page = json.loads((tmp_path / "c" / "artefact.json").read_text())
        (tmp_path / "c" / "artefact.json").write_text(json.dumps({**page, name: value}))
        with pytest.raises(ValueError, match=message):
            artefact.load(tmp_path / "c")


def test_features_of_another_version_are_refused(tmp_path: Path) -> None:
    fitted(GBDT, 60).save(tmp_path)
    page = json.loads((tmp_path / "artefact.json").read_text())
    page["features"][0] = "gone"
    (tmp_path / "artefact.json").write_text(json.dumps(page))
    with pytest.raises(ValueError, match="gone, log_tokens"):
        artefact.load(tmp_path)


# --- fallback ---------------------------------------------------------------------------------------------------------


class Broken(Constant):
    """Says what it is told to say."""

    def __init__(self, out: Any) -> None:
        super().__init__(5.0)
        self.training_median, self.out = 40.0, out

    def predict_columns(self, prompts: Prompts) -> Predictions:
        if isinstance(self.out, Exception):
            raise self.out
        return self.out


def survival_with(i: int, value: float) -> np.ndarray:
    s = np.exp(-EDGES / 100.0)
    s[i] = value
    return s


@pytest.mark.parametrize(
    ("out", "kind", "num"),
    [
        (RuntimeError("no"), "raised", 3),
        (Predictions(np.array([1.0, np.nan, 3.0]), np.array([1.0, 2.0, 3.0])), "nan", 1),
        (Predictions(np.array([1.0, 2.0, 3.0]), np.array([1.0, np.inf, 3.0])), "infinite", 1),
        (Predictions(np.array([1.0, 2.0, 3.0]), np.array([1.0, -2.0, 3.0])), "negative", 1),
        (Predictions(np.ones(2), np.ones(2)), "invalid", 3),
        (Predictions(np.ones(3), None, np.stack([survival_with(5, 2.0), *[np.exp(-EDGES / 9.0)] * 2])), "invalid", 1),
        (Predictions(np.ones(3), None, np.stack([survival_with(5, np.nan), *[np.exp(-EDGES / 9.0)] * 2])), "nan", 1),
        (Predictions(np.array([-1.0, -2.0, -3.0])), "", 0),  # ranks may be negative
    ],
)
def test_p7_whatever_a_predictor_does_requests_get_a_prediction_and_it_is_counted(out: Any, kind: str, num: int) -> None:
    requests = [Request(i, 0.0, 10) for i in range(3)]
    by_request, by_column = Fallback(Broken(out)), Fallback(Broken(out))
    rows = by_request.predict(requests)
    columns = by_column.predict_columns(Prompts(np.full(3, 10)))
    assert len(rows) == len(columns) == 3
    assert sum(row.score == 40.0 for row in rows) == np.count_nonzero(np.isclose(columns.score, 40.0)) == num
    for guard in (by_request, by_column):
        assert guard.counts == {**dict.fromkeys(KINDS, 0), **({kind: num} if kind else {})}
        assert guard.share == pytest.approx(num / 3)
    if columns.survival is not None:
        assert_allclose(columns.means()[columns.score == 40.0], 40.0)


def test_late_predictions_fall_back_at_the_deadline() -> None:
    clock = iter([0.0, 0.3, 1.0, 1.1, 2.0, 2.5])
    guard = Fallback(Constant(9.0), length=40.0, deadline=0.2, timer=lambda: next(clock))
    assert guard.predict([Request(0, 0.0, 1)])[0].mean() == 40.0
    assert guard.predict([Request(0, 0.0, 1)])[0].mean() == 9.0
    assert guard.predict_columns(Prompts(np.ones(2))).score.tolist() == [40.0, 40.0]
    assert guard.counts["late"] == 3 and guard.share == pytest.approx(3 / 4)
    arrival = np.array([0.0, 1.0])
    out, ready = guard.meet_deadline(Predictions.from_points(np.array([7.0, 8.0])), arrival, np.array([0.1, 1.9]))
    assert out.score.tolist() == [7.0, 40.0] and ready.tolist() == [0.1, 1.2]
    assert guard.predict([]) == []
    with pytest.raises(ValueError, match="fallback length None"):
        Fallback(Constant())


# --- latency ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "arrival", "ready"),
    [
        (LatencyModel(0.5, 0.25), [], []),
        (LatencyModel(0.5, 0.25), [0.0, 10.0], [0.75, 10.75]),  # idle server
        (LatencyModel(0.5, 0.25), [0.0, 0.1, 0.2], [0.75, 1.75, 1.75]),  # two arrive while the first is served
        (LatencyModel(0.5, 0.25), [1.0, 1.0, 1.0], [2.25, 2.25, 2.25]),  # a burst is one batch
        (LatencyModel(0.5, 0.25, max_batch=2), [1.0, 1.0, 1.0], [2.0, 2.0, 2.75]),
        (LatencyModel(0.5, 0.25, window=0.5), [0.0, 0.5, 0.6], [1.5, 1.5, 2.25]),  # 0.5 is in the window, 0.6 is not
        (LatencyModel(0.5, 0.25, window=0.5, max_batch=1), [0.0, 0.1], [1.25, 2.0]),  # the window of the second passed waiting
        (LatencyModel(0.0, 0.0), [0.0, 3.0], [0.0, 3.0]),
    ],
)
def test_latency_by_hand(model: LatencyModel, arrival: list[float], ready: list[float]) -> None:
    assert model.ready_times(np.array(arrival)).tolist() == ready


@given(
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60), st.floats(0.0, 0.5), st.floats(0.0, 0.1), st.floats(0.0, 0.3),
    st.integers(1, 8),
)  # fmt: skip
def test_latency_laws(gaps: list[float], per_batch: float, per_request: float, window: float, max_batch: int) -> None:
    arrival = np.cumsum(gaps)
    ready = LatencyModel(per_batch, per_request, window, max_batch).ready_times(arrival)
    assert np.all(np.diff(ready) >= 0)  # first come, first served
    assert np.all(ready >= arrival + per_batch + per_request - 1e-9)
    more = np.append(arrival, arrival[-1] + 1.0 + window)  # one that comes later than any batch it could join changes nothing
    assert LatencyModel(per_batch, per_request, window, max_batch).ready_times(more)[:-1].tolist() == ready.tolist() or (
        ready[-1] > arrival[-1] + 1.0
    )


def test_latency_models_are_checked_and_round_trip() -> None:
    model = LatencyModel(0.1, 0.2, 0.3, 4)
    assert LatencyModel.from_dict(json.loads(json.dumps(model.as_dict()))) == model
    for bad in ({"per_batch": -1.0}, {"per_request": math.nan}, {"window": math.inf}, {"max_batch": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LatencyModel(**{"per_batch": 0.0, "per_request": 0.0, **bad})
    with pytest.raises(ValueError, match="not decreasing"):
        model.ready_times([2.0, 1.0])


def test_a_profile_draws_the_line_through_its_timings() -> None:
    now = [0.0]

    class Slow(Constant):
        def predict_columns(self, prompts: Prompts) -> Predictions:
            now[0] += 0.010 + 0.002 * len(prompts)
            return super().predict_columns(prompts)

    profile = profile_latency(Slow(5.0), Prompts(np.ones(100)), timer=lambda: now[0])
    assert profile.single == pytest.approx(0.012) and profile.batch == pytest.approx(0.138)
    assert profile.model.per_batch == pytest.approx(0.010) and profile.model.per_request == pytest.approx(0.002)


# --- oracles ----------------------------------------------------------------------------------------------------------


def lengths_of(n: int, seed: int = 0) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(seed).lognormal(5.0, 1.0, n)).astype(np.int64)


def test_the_oracle_says_the_truth() -> None:
    truth = lengths_of(50)
    assert Oracle().from_truth(truth).score.tolist() == truth.tolist()
    with pytest.raises(ValueError, match="at least 1 token"):
        Oracle().from_truth([0, 3])


@pytest.mark.parametrize("make", [lambda: NoisyOracle(mae=30.0), lambda: NoisyOracle(exponential=True)])
def test_one_truth_does_not_touch_the_noise_of_another(make: Any) -> None:
    truth = lengths_of(300)
    changed = truth.copy()
    changed[17] = 4000
    a, b = (make().from_truth(t, np.random.default_rng(3)).score for t in (truth, changed))
    assert a[17] != b[17] and np.delete(a, 17).tolist() == np.delete(b, 17).tolist()
    assert make().from_truth(truth, np.random.default_rng(4)).score.tolist() != a.tolist()


def test_the_noise_has_the_stated_size() -> None:
    truth = lengths_of(20_000) + 1000  # far from the clip at 1
    out = NoisyOracle(mae=60.0).from_truth(truth, np.random.default_rng(1))
    assert np.mean(np.abs(out.score - truth)) == pytest.approx(60.0, rel=0.03)
    ratio = NoisyOracle(exponential=True).from_truth(truth, np.random.default_rng(1)).score / truth
    assert ratio.mean() == pytest.approx(1.0, rel=0.03) and ratio.std() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("tau", [0.05, 0.35, 0.6, 0.9])
def test_the_noise_has_the_stated_rank_correlation(tau: float) -> None:
    truth = lengths_of(3000)
    out = NoisyOracle(tau=tau).from_truth(truth, np.random.default_rng(2))
    assert kendall_tau(out.score, truth) == pytest.approx(tau, abs=0.005)
    assert out.score.max() < 3 * truth.max()  # lengths stay lengths


def test_a_noisy_oracle_has_one_error() -> None:
    truth = lengths_of(2000)
    assert kendall_tau(NoisyOracle().from_truth(truth, np.random.default_rng(8)).score, truth) == pytest.approx(0.5, abs=0.005)
    assert NoisyOracle(tau=1.0).from_truth(truth, np.random.default_rng(0)).score.tolist() == truth.tolist()
    assert NoisyOracle(tau=0.3).from_truth([7, 7, 7], np.random.default_rng(0)).score.tolist() == [7, 7, 7]
    for bad, message in (
        ({"mae": 1.0, "tau": 0.5}, "state one error, not mae and tau"), ({"mae": -1.0}, "mae=-1.0"), ({"tau": 0.0}, "tau=0.0"),
        ({"tau": 1.5}, "tau=1.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            NoisyOracle(**bad)  # type: ignore[arg-type]


# --- scores -----------------------------------------------------------------------------------------------------------


def test_rank_scores_by_hand() -> None:
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(3 * 2))  # tau-b: ties count
    assert kendall_tau([5, 5, 5], [1, 2, 3]) == 0.0 and kendall_tau([1], [1]) is None
    assert top_recall(np.arange(100), np.arange(100)) == 1.0 and top_recall(-np.arange(100), np.arange(100)) == 0.0
    assert top_recall(np.zeros(100), np.arange(100)) == pytest.approx(0.1)  # no order: chance
    assert top_recall(np.repeat([1, 2, 3], 10), np.repeat([1, 2, 3], 10)) == 1.0 and top_recall([1], [1]) is None


def test_pinball_by_hand() -> None:
    assert pinball(np.array([[10.0, 20.0]]), (0.5, 0.9), [14.0]) == pytest.approx((0.5 * 4 + 0.1 * 6) / 2)


@given(st.floats(2.0, 3000.0), st.floats(1.0, 20_000.0))
def test_crps_is_the_integral_it_names(mean: float, y: float) -> None:
    out = crps(Predictions(np.zeros(1), None, np.exp(-EDGES / mean)[None, :]), [y])[0]
    knots = np.concatenate(([0.0], EDGES))
    x = np.unique(np.append(np.linspace(knots[:-1], knots[1:], 401), y))
    mid = (x[1:] + x[:-1]) / 2
    cdf = 1.0 - survival_at(np.exp(-EDGES / mean)[None, :], mid)[0]
    tail = np.exp(-EDGES[-1] / mean) ** 2 * 8192.0 / 2.0
    assert out == pytest.approx(float(np.sum(np.diff(x) * (cdf - (mid >= y)) ** 2)) + tail, rel=2e-3, abs=1e-2)


def test_crps_of_points_and_limits() -> None:
    assert crps(Predictions.from_points(np.array([3.0, 9.0])), [5.0, 9.0]).tolist() == [2.0, 0.0]
    with pytest.raises(ValueError, match="beyond the grid"):
        crps(Predictions(np.zeros(1), None, np.exp(-EDGES / 9.0)[None, :]), [40_000.0])
    with pytest.raises(ValueError, match="no distribution"):
        crps(Predictions(np.zeros(1)), [4.0])


def test_a_rank_only_prediction_is_scored_as_an_order() -> None:
    out = score(Predictions(np.array([3.0, 1.0, 2.0])), np.array([30, 10, 20]))
    assert out["kendall_tau"] == 1.0 and out["mae"] is None and out["crps"] is None and out["coverage"] is None


def test_predictions_keep_their_kind() -> None:
    points = Predictions.from_points(np.array([4.0, 5.0]))
    joined = Predictions.concatenate([points, points.take([1])])
    assert joined.point is not None and joined.point.tolist() == [4.0, 5.0, 5.0]
    assert [row.mean() for row in joined.rows()] == joined.means().tolist()
    with pytest.raises(ValueError, match="2 kinds"):
        Predictions.concatenate([points, Predictions(np.zeros(1))])
    with pytest.raises(ValueError, match="order, no lengths"):
        Predictions(np.zeros(1)).means()


def test_the_number_of_cores_changes_no_prediction(tmp_path):
    """BLAS threads add in another order; the ridge under the trees must not pass that on."""
    code = (
        "import sys, numpy as np\n"
        "from scipy.sparse import random_array\n"
        "from lengthwise.predictors.ridge import solve_ridge\n"
        "rows = random_array((500, 80_000), density=0.01, format='csr', rng=np.random.default_rng(0))\n"
        "np.save(sys.argv[1], solve_ridge(rows, np.random.default_rng(1).normal(size=500), 3.0)[0])\n"
    )
    weights = []
    for threads in ("1", "2"):
        file = tmp_path / f"{threads}.npy"
        env = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", code, str(file)], env=env, check=True)
        weights.append(np.load(file))
    assert np.array_equal(*weights)
