"""Fine-tuned encoders on tiny random models made in place: the nodes of published predictors, their heads, their training."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from numpy.testing import assert_allclose
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertModel, OPTConfig, OPTModel, PreTrainedTokenizerFast

import lengthwise.conf
from lengthwise.predictors import artefact
from lengthwise.predictors.contract import check_predictor, synthetic_rows
from lengthwise.predictors.encoder import Encoder
from lengthwise.predictors.encoder_network import EncoderNetwork, seeded
from lengthwise.predictors.heads.bucket import Bucket
from lengthwise.predictors.heads.calibrated import Calibrated, line_through
from lengthwise.predictors.heads.head import Head, made
from lengthwise.predictors.heads.listmle import ListMLE
from lengthwise.predictors.heads.ordinal import Ordinal
from lengthwise.predictors.heads.pairwise import Pairwise
from lengthwise.predictors.heads.regression import Regression
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.scores import kendall_tau, score
from lengthwise.sched import EDGES

CONF = Path(next(iter(lengthwise.conf.__path__))) / "predictor"
PUBLISHED = ("encoder", "encoder_regression", "ltr_ranker", "pars", "s3", "ssjf")
DECILES = [i / 10 for i in range(1, 10)]
HEADS = (
    lambda: Calibrated(Regression()), lambda: Bucket(levels=DECILES), lambda: Ordinal(levels=DECILES), ListMLE, Pairwise,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # and in the other process, where an artefact is loaded
    yield
    torch.set_num_threads(before)


def save_checkpoint(folder: Path, model: Any, start: str, end: str) -> str:
    words = sorted({word for text in synthetic_rows(200)[0].texts or () for word in text.lower().split() if word.isalpha()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}".strip(), special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)  # fmt: skip
    with seeded(0):
        model(len(vocabulary)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: Any) -> str:
    def model(vocab_size: int) -> Any:
        return BertModel(
            BertConfig(
                vocab_size=vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                max_position_embeddings=512, pad_token_id=0,
            )
        )  # fmt: skip

    return save_checkpoint(tmp_path_factory.mktemp("bert"), model, "[CLS]", "[SEP]")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: Any) -> str:
    def model(vocab_size: int) -> Any:
        return OPTModel(
            OPTConfig(
                vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64,
                word_embed_proj_dim=32, max_position_embeddings=2048, pad_token_id=0, bos_token_id=2, eos_token_id=3,
            )
        )  # fmt: skip

    return save_checkpoint(tmp_path_factory.mktemp("opt"), model, "[CLS]", "")


def tensors(*columns: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(column) for column in columns)


def quick(model: str, head: Head, **changes: Any) -> Encoder:
    given = {"max_tokens": 16, "learning_rate": 3e-3, "batch_size": 16, "num_epochs": 5, **changes}
    return Encoder(model, head, **given)


# --- the nodes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_encoder_node_keeps_the_contract(name: str, bert: str, opt: str, tmp_path: Path) -> None:
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    settings["model"] = opt if name == "ltr_ranker" else bert
    predictor = instantiate(settings)
    assert isinstance(predictor, Encoder) and predictor.name == name
    again = type(predictor)(**predictor.settings())  # what an artefact keeps makes the same predictor
    assert again.settings() == predictor.settings() and type(again.head) is type(predictor.head)
    # Few epochs and short prompts: the contract asks for no skill.
    settings |= {"num_epochs": 2, "max_tokens": 24, "freeze_after": settings["freeze_after"] and 1}
    check_predictor(lambda: instantiate(settings), tmp_path / "artefact", new_process=name == "ssjf")
    ranks = name in ("ltr_ranker", "pars")
    out = artefact.load(tmp_path / "artefact").predict_columns(synthetic_rows(5)[0])
    assert (out.survival is None) == ranks and out.point is None


def test_published_settings_are_those_of_the_released_code() -> None:
    """papers: SSJF's latency_prediction.py, LTR's trainer.py."""
    found: dict[str, Any] = {name: OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")) for name in PUBLISHED}
    ssjf, ltr = found["ssjf"], found["ltr_ranker"]
    assert ssjf["head"]["levels"] == [0.25, 0.5, 0.75, 0.99] and ssjf["truncation_side"] == "left" and ssjf["max_tokens"] == 512
    assert (ssjf["learning_rate"], ssjf["batch_size"], ssjf["num_epochs"], ssjf["freeze_after"]) == (1e-5, 16, 6, 3)
    assert (ltr["learning_rate"], ltr["batch_size"], ltr["num_epochs"], ltr["weight_decay"]) == (2e-5, 32, 5, 0.01)
    assert ltr["head"]["group"] == 10 and ltr["head"]["most"] == 8192 and ltr["max_tokens"] == 2048 and not ltr["decay"]
    bounds = found["s3"]["head"]["bounds"]
    assert len(bounds) == 9 and np.abs(np.array(bounds) - 204.8 * np.arange(1, 10)).max() < 1


# --- training -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", HEADS)
def test_training_reduces_the_loss_and_learns_the_order(make: Any, bert: str) -> None:
    predictor = quick(bert, make(), num_epochs=10)
    predictor.fit(*synthetic_rows(300))
    assert len(predictor.losses) == 10 and predictor.losses[-1] < 0.9 * predictor.losses[0]
    prompts, lengths, _ = synthetic_rows(150, seed=1)
    assert kendall_tau(predictor.predict_columns(prompts).score, lengths) > 0.4  # type: ignore[operator]


def test_fitting_leaves_the_programs_random_numbers_alone(bert: str) -> None:
    prompts, lengths, cut = synthetic_rows(40)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    predictor = quick(bert, ListMLE(), num_epochs=1)
    predictor.fit(prompts, lengths, cut)
    predictor.unit = "t"
    assert torch.equal(before, torch.get_rng_state()) and np.array_equal(numpy_before, np.random.get_state()[1])  # type: ignore[arg-type]
    other = quick(bert, ListMLE(), num_epochs=1, seed=1)
    other.fit(prompts, lengths, cut)
    assert not np.array_equal(other.predict_columns(prompts).score, predictor.predict_columns(prompts).score)  # seeds matter


def test_a_frozen_encoder_stays_as_the_checkpoint_has_it(bert: str) -> None:
    rows = synthetic_rows(60)
    stored = load_file(Path(bert) / "model.safetensors")
    for freeze_after, moved in ((0, False), (None, True)):
        predictor = quick(bert, Bucket(levels=DECILES), num_epochs=1, freeze_after=freeze_after, hidden=[8])
        predictor.fit(*rows)
        weights = predictor.state().arrays
        name = "encoder.layer.0.attention.self.query.weight"
        assert (not np.array_equal(weights[f"weight/bert.{name}"], stored[name].numpy())) == moved
        assert weights["weight/classifier.0.weight"].shape == (8, 32)


def test_an_artefact_is_whole_without_its_checkpoint_and_holds_no_pickle(bert: str, tmp_path: Path) -> None:
    predictor = quick(bert, Calibrated(Regression()), num_epochs=1)
    prompts, lengths, cut = synthetic_rows(60)
    predictor.fit(prompts, lengths, cut)
    predictor.unit = "t"
    predictor.model = "a folder that is gone"
    for name in ("one", "two"):
        predictor.save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["arrays.npz", "artefact.json", "config.txt", "tokenizer.txt"]
    for file in files:
        raw = (tmp_path / "one" / file).read_bytes()
        assert raw == (tmp_path / "two" / file).read_bytes() and b"pickle" not in raw
    before = torch.get_rng_state()
    loaded = Encoder.load(tmp_path / "one")
    assert torch.equal(before, torch.get_rng_state()) and loaded.losses == predictor.losses
    a, b = loaded.predict_columns(prompts), predictor.predict_columns(prompts)
    assert np.array_equal(np.asarray(a.survival), np.asarray(b.survival))


def test_more_rows_at_once_differ_in_the_last_bits_only(bert: str) -> None:
    predictor = quick(bert, ListMLE(), num_epochs=1)
    predictor.fit(*synthetic_rows(60))
    prompts, _, _ = synthetic_rows(33, seed=1)
    alone = predictor.predict_columns(prompts).score
    predictor.rows_at_once = 8
    assert_allclose(predictor.predict_columns(prompts).score, alone, rtol=1e-4, atol=1e-5)


def test_long_prompts_keep_the_stated_end(bert: str) -> None:
    shape: dict[str, Any] = {"hidden": [], "device": "cpu", "max_tokens": 6}
    text = "please write a poem about rain with detail"
    kept = {}
    for side in ("left", "right"):
        network = EncoderNetwork.from_checkpoint(bert, 1, truncation_side=side, **shape)
        (ids,) = network.token_ids([text])
        kept[side] = [network.tokenizer.id_to_token(i) for i in ids]
    assert kept["left"] == ["[CLS]", "about", "rain", "with", "detail", "[SEP]"]
    assert kept["right"] == ["[CLS]", "please", "write", "a", "poem", "[SEP]"]


def test_odd_prompts_get_finite_predictions(bert: str, opt: str) -> None:
    odd = ["", " \n", "\ud83d lone", "x" * 50_000, "\x00", "写一首诗"]
    for model, head in ((bert, Bucket(levels=DECILES)), (opt, ListMLE())):
        predictor = quick(model, head, num_epochs=1)
        predictor.fit(*synthetic_rows(40))
        assert np.all(np.isfinite(predictor.predict_columns(Prompts(np.ones(6), odd)).score))


def test_what_cannot_be_trained_is_refused_at_the_door(bert: str, tmp_path: Path) -> None:
    rows = synthetic_rows(40)
    with pytest.raises(ValueError, match="nowhere' cannot be read"):
        quick(str(tmp_path / "nowhere"), ListMLE()).fit(*rows)
    with pytest.raises(ValueError, match="max_tokens=513: BertForSequenceClassification has positions for 512"):
        quick(bert, ListMLE(), max_tokens=513).fit(*rows)
    with pytest.raises(ValueError, match="truncation_side='middle'"):
        quick(bert, ListMLE(), truncation_side="middle")
    with pytest.raises(ValueError, match="learning_rate=0"):
        quick(bert, ListMLE(), learning_rate=0)
    with pytest.raises(ValueError, match="num_epochs=0"):
        quick(bert, ListMLE(), num_epochs=0)
    with pytest.raises(ValueError, match="9 outputs, one can be calibrated"):
        quick(bert, Calibrated(Ordinal(levels=DECILES))).fit(*rows)
    with pytest.raises(ValueError, match="needs prompt text"):
        quick(bert, ListMLE()).fit(Prompts(np.ones(40)), *rows[1:])
    for node in ({"_target_": "os.system"}, {"_target_": "lengthwise.predictors.constant.Constant"}, {}):
        with pytest.raises(ValueError, match="is not a head"):
            made(node)


def test_a_checkpoint_that_lacks_weights_is_refused(bert: str, tmp_path: Path) -> None:
    for file in Path(bert).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(Path(bert) / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for bert\.encoder\.layer\.0\.output\.dense\.weight"):
        quick(str(tmp_path), ListMLE()).fit(*synthetic_rows(40))


# --- ListMLE ------------------------------------------------------------------------------------------------------------


def chance_of(order: Any, strength: Any) -> float:
    """Of drawing rows in this order, each with a chance proportional to exp(strength) among those left."""
    left, out = list(order), 1.0
    while left:
        weights = [math.exp(strength[i]) for i in left]
        out *= weights[0] / sum(weights)
        left.pop(0)
    return out


def test_listmle_is_the_chance_of_the_order_shortest_first() -> None:
    outputs = [0.3, -1.2, 2.0, 0.7]
    strength = [-x for x in outputs]
    total = 0.0
    for order in itertools.permutations(range(4)):
        lengths = [0.0] * 4
        for place, row in enumerate(order):
            lengths[row] = 10.0 * (place + 1)
        out, lens, cut = tensors([[x] for x in outputs], lengths, [False] * 4)
        chance = math.exp(-4 * float(ListMLE().loss(out, lens, cut)))
        assert chance == pytest.approx(chance_of(order, strength), rel=1e-5)
        total += chance
    assert total == pytest.approx(1.0, rel=1e-5)


def test_p3_a_censored_row_of_a_list_is_only_known_to_come_later() -> None:
    """Row 1 is cut at 20 tokens: the loss is that of all orders in which it comes after the row of 10 and the row of 20."""
    outputs, lengths, cut = [0.3, -1.2, 2.0, 0.7], [10.0, 20.0, 40.0, 20.0], [False, True, False, False]
    chance = sum(
        chance_of(order, [-x for x in outputs])
        for order in itertools.permutations(range(4))
        if [i for i in order if i != 1] == [0, 3, 2] and order.index(1) > order.index(3)
    )
    assert math.exp(-3 * float(ListMLE().loss(*tensors([[x] for x in outputs], lengths, cut)))) == pytest.approx(
        chance, rel=1e-5
    )
    all_cut = ListMLE().loss(*tensors([[x] for x in outputs], lengths, [True] * 4))
    assert float(all_cut) == 0.0


def test_p5_lengths_are_grouped_in_range() -> None:
    labels = ListMLE(group=64, most=8192).labels(torch.tensor([0.0, 10.0, 63.0, 64.0, 8192.0, 9000.0])).tolist()
    assert labels == [0, 0, 0, 1, 128, 128]
    assert ListMLE().labels(torch.tensor([9.0, 10.0, 1e9])).tolist() == [0, 1, 819]
    assert ListMLE().state().values["direction"] == "a higher score is a longer answer"
    with pytest.raises(ValueError, match="group=0"):
        ListMLE(group=0)


def test_ties_within_a_group_stand_in_the_batchs_order() -> None:
    out, lens, cut = tensors([[0.0], [1.0]], [11.0, 19.0], [False, False])
    turned = ListMLE().loss(out.flip(0), lens.flip(0), cut)
    assert float(turned) == pytest.approx(float(ListMLE().loss(out.flip(0), lens, cut)))  # lengths 11 and 19 are one group
    assert float(turned) != pytest.approx(float(ListMLE().loss(out, lens, cut)))


# --- pairwise, tau ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "cut", "value"),
    [
        ([0.0, 0.5, 3.0], [False] * 3, 0.0),  # 100 is ahead of 10 and of 11 by more than the margin; 10 and 11 are too near
        ([1.0, 0.5, 1.2], [False] * 3, (0.8 + 0.3) / 2),
        ([1.0, 0.5, 1.2], [True, False, False], 0.3),  # 10 or more is not known to be shorter than 100
        ([1.0, 0.5, 1.2], [False, False, True], (0.8 + 0.3) / 2),  # 100 or more is longer than both
        ([1.0, 0.5, 1.2], [True, True, False], 0.0),  # nothing to compare
    ],
)
def test_p3_pairwise_by_hand(outputs: list[float], cut: list[bool], value: float) -> None:
    out, lens, known = tensors([[x] for x in outputs], [10.0, 11.0, 100.0], cut)
    out.requires_grad_(True)
    loss = Pairwise(margin=1.0, min_difference=0.2).loss(out, lens, known)
    assert float(loss.detach()) == pytest.approx(value)
    loss.backward()
    assert out.grad is not None and (out.grad[2, 0] < 0) == (value > 0)


def test_tau_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 6, 40), rng.integers(0, 6, 40)
    a, b = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    tau_b = (a * b).sum() / math.sqrt((a**2).sum() * (b**2).sum())
    assert kendall_tau(x, y) == pytest.approx(tau_b)


# --- buckets, thresholds, regression, calibration ---------------------------------------------------------------------------


def seen(head: Any, lengths: Any, cut: Any = None) -> Any:
    lens = np.asarray(lengths, dtype=np.float64)
    head.learn_labels(lens, np.zeros(len(lens), dtype=bool) if cut is None else np.asarray(cut))
    return head


def test_p5_bucket_classes_are_in_range_for_every_length() -> None:
    head = seen(Bucket(bounds=list(range(64, 8193, 64))), np.arange(1, 300))
    lengths = [0.0, 10.0, 63.0, 64.0, 8192.0, 9000.0]
    assert head.num_outputs == 129 and head.buckets.classes(lengths).tolist() == [0, 0, 0, 0, 127, 128]
    out, lens, cut = tensors(np.zeros((6, 129)).tolist(), lengths, [False] * 6)
    assert float(head.loss(out, lens, cut)) == pytest.approx(math.log(129))
    assert head.state().values["direction"] == "a higher class is a longer answer"


def test_bucket_bounds_are_percentiles_of_the_training_lengths() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(1, 1001))
    head = seen(Bucket(levels=[0.25, 0.5, 0.75, 0.99]), lengths)
    assert_allclose(head.buckets.bounds, [250, 500, 750, 990], atol=2)


def test_bucket_loss_is_cross_entropy_weighted_and_censored() -> None:
    lengths = np.array([5] * 60 + [50] * 30 + [500] * 10)
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    classes, lens = torch.tensor([0, 1, 2, 1]), torch.tensor([9.0, 50.0, 500.0, 10.0])  # 9 ends the first
    exact = torch.zeros(4, dtype=torch.bool)
    plain = seen(Bucket(bounds=[9, 99]), lengths)
    assert float(plain.loss(outputs, lens, exact)) == pytest.approx(float(cross_entropy(outputs, classes)), rel=1e-5)
    even = seen(Bucket(bounds=[9, 99], balance=1.0), lengths)
    weights = torch.tensor([103 / (3 * n) for n in (61, 31, 11)])
    assert float(even.loss(outputs, lens, exact)) == pytest.approx(float(cross_entropy(outputs, classes, weights)), rel=1e-5)
    shares = torch.softmax(outputs, 1)
    cut = plain.loss(outputs[1:2], lens[1:2], ~exact[:1])
    assert float(cut) == pytest.approx(-math.log(float(shares[1, 1] + shares[1, 2])), rel=1e-5)
    assert float(plain.loss(outputs[:1], lens[:1], ~exact[:1])) == pytest.approx(0.0, abs=1e-6)  # at least 9: says nothing


def test_balanced_weights_are_divided_out_of_the_predictions() -> None:
    """Outputs that tell nothing under balanced weights are equal: what is predicted is the training lengths' distribution."""
    lengths = np.array([5] * 600 + [50] * 300 + [500] * 100)
    out = seen(Bucket(bounds=[9, 99], balance=1.0), lengths).predictions(np.zeros((1, 3)))
    survival = np.asarray(out.survival)[0]
    at = [int(np.searchsorted(EDGES, e)) for e in (10.0, 100.0)]
    assert_allclose(survival[at], [0.4, 0.1], atol=0.03)


def test_p3_ordinal_loss_by_hand_and_silent_beyond_a_bound() -> None:
    head = seen(Ordinal(bounds=[10, 100, 1000]), [5, 50, 500, 5000] * 20)
    out, lens, cut = tensors([[0.0, 0.0, 2.0]], [50.0], [False])
    assert head.num_outputs == 3
    softplus = math.log1p(math.exp(2.0))
    assert float(head.loss(out, lens, cut)) == pytest.approx((2 * math.log(2) + softplus) / 3)
    out.requires_grad_(True)
    loss = head.loss(out, lens, ~cut)  # at least 50: longer than 10, and nothing about 100 and 1000
    assert float(loss.detach()) == pytest.approx(math.log(2))
    loss.backward()
    assert out.grad is not None and out.grad[0, 0] < 0 and not out.grad[0, 1:].any()
    crossed = np.asarray(head.predictions(np.array([[-1.0, 3.0, 2.0]])).survival)[0]
    assert np.all(np.diff(crossed) <= 0) and crossed[np.searchsorted(EDGES, 100) - 1] <= 0.3


def test_p3_regression_errs_on_one_side_of_a_bound() -> None:
    head = seen(Regression(power=2.0), [10, 100, 1000] * 10)
    exact, cut = torch.tensor([False]), torch.tensor([True])
    right = (math.log(100 + head._offset) - head._middle) / head._width
    for output, wrong_exact, wrong_cut in ((right, 0.0, 0.0), (right + 2, 4.0, 0.0), (right - 2, 4.0, 4.0)):
        out = torch.tensor([[output]])
        assert float(head.loss(out, torch.tensor([100.0]), exact)) == pytest.approx(wrong_exact, abs=1e-5)
        assert float(head.loss(out, torch.tensor([100.0]), cut)) == pytest.approx(wrong_cut, abs=1e-5)
    assert head.predictions(np.array([[right], [-99.0], [1e9]])).score[:2] == pytest.approx([100.0, 1.0], rel=1e-5)
    assert np.isfinite(head.predictions(np.array([[1e9]])).score).all()


def test_calibration_makes_ranks_lengths_that_cover_what_they_say() -> None:
    rng = np.random.default_rng(0)
    outputs = rng.normal(0, 1, 2000)
    lengths = np.maximum(1, np.round(np.exp(5 + 0.8 * outputs + 0.5 * rng.normal(size=2000))))
    limit = np.quantile(lengths, 0.9)
    cut = lengths > limit
    head = seen(Calibrated(ListMLE()), lengths[:1000])
    with pytest.raises(ValueError, match="not calibrated"):
        head.predictions(outputs[:1, None])
    head.calibrate(outputs[:1000, None], np.minimum(lengths, limit)[:1000], cut[:1000])
    out = head.predictions(outputs[1000:, None])
    found = score(out, lengths[1000:])["coverage"]
    assert abs(found["50"] - 0.5) < 0.06 and abs(found["80"] - 0.8) < 0.06 and abs(found["below_0.9"] - 0.9) < 0.06
    assert kendall_tau(out.score, outputs[1000:]) == pytest.approx(1.0)  # the order stays
    head.calibrate(np.zeros((100, 1)), lengths[:100], np.zeros(100, dtype=bool))  # an output that says nothing
    flat = head.predictions(np.array([[0.0], [7.0]])).quantiles((0.5,))[:, 0]
    assert flat[0] == flat[1] == pytest.approx(np.median(lengths[:100]), rel=0.25)


def test_a_line_through_points() -> None:
    x = np.array([0.0, 1.0, 2.0])
    assert line_through(x, 3 * x - 1) == pytest.approx((3.0, -1.0))
    assert line_through(np.full(3, 0.1), x) == (0.0, 1.0)
