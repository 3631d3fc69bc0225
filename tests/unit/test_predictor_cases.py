"""Cases of people who train length predictors (group P): what a report, a split, a fallback and a comparison must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lengthwise.experiments.comparison import compare
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.learned import make_predictions
from lengthwise.experiments.load_runs import read_cells
from lengthwise.experiments.prepare import Prepared
from lengthwise.experiments.report import heading
from lengthwise.experiments.simulate import compose, simulate
from lengthwise.experiments.table import markdown, page
from lengthwise.experiments.train import groups_of, train
from lengthwise.experiments.train_report import table
from lengthwise.experiments.workloads.table import load as load_table
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.contract import synthetic_rows
from lengthwise.predictors.fallback import KINDS, Fallback, like_the_others
from lengthwise.predictors.gbdt import GBDT
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import score
from lengthwise.predictors.splits import SPLITS, named_split, out_of_fold, time_split
from lengthwise.sched import EDGES, LengthDistribution, Request

FREE = LatencyModel(0.0, 0.0)
ARTEFACT = "lengthwise.predictors.artefact.load"


def dataset(num_rows: int = 200, text: bool = True, **changes: Any) -> Dataset:
    asked, lengths, _ = synthetic_rows(num_rows)
    fields: dict[str, Any] = {
        "name": "made_up", "prompt_len": asked.prompt_len.astype(int), "output_len": lengths, "unit": "made-up tokens",
        "source": "a generator", "licence": "none", "prompts": asked.texts if text else None,
    }  # fmt: skip
    return Dataset(**{**fields, **changes})


def requests_of(prompts: Prompts) -> list[Request]:
    rows = zip(prompts.texts or (), prompts.prompt_len, strict=True)
    return [Request(i, 0.0, int(n), prompt=text) for i, (text, n) in enumerate(rows)]


def text_of(lines: Any) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


# --- P2, P3: the tail, and labels that are no lengths -----------------------------------------------------------------


def test_p2_the_tail_is_in_training_and_in_the_report() -> None:
    lengths = np.tile([10, 100, 511, 512, 3000], 40)
    report = train(dataset(output_len=lengths, dropped={"too_long": 3}), Constant, baselines=())
    assert report["labels"]["share_512_and_longer"] == pytest.approx(2 / 5) and report["labels"]["max"] == 3000
    assert report["labels"]["num_capped_for_training"] == 0 and report["num_rows"] == 200
    bands = {band["from"]: band for band in report["metrics"]["bands"]}
    assert bands[2048]["to"] is None and bands[2048]["n"] > 0 and bands[512]["n"] > 0
    assert bands[2048]["share"] == pytest.approx(1 / 5, abs=0.1)
    assert bands[2048]["mae"] == pytest.approx(3000 - 511, abs=1.0)  # a constant misses the tail by that much, and it is told
    assert report["baselines"]["oracle"]["bands"][-1]["mae"] == 0.0
    text = table(report)
    assert "2048+" in text and "too_long 3" in text


def test_p3_labels_at_the_limit_are_censored_and_never_exact(tmp_path: Path) -> None:
    rows = [{"p": 5 + i, "n": n, "cut": n == 1000} for i, n in enumerate([10, 20, 30, 40, 50, 60, 70, 1000, 1000, 1000])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_table(str(tmp_path / "rows.jsonl"), prompt_len="p", output_len="n", unit="t", censored="cut")
    assert loaded.censored is not None and loaded.censored.sum() == 3
    said = score(Predictions.from_points(np.full(10, 40.0)), loaded.output_len, loaded.censored)
    assert said["num_censored"] == 3 and said["n"] == 7 and said["mae"] == pytest.approx(np.mean([30, 20, 10, 0, 10, 20, 30]))

    lengths = np.tile(loaded.output_len, 20)
    cut = lengths == 1000
    report = train(dataset(output_len=lengths, censored=cut), PromptLength, baselines=())
    assert report["num_censored"] == 60 and report["labels"]["share_censored"] == pytest.approx(0.3)
    assert report["metrics"]["mae"] < 100.0  # as exact labels, three in ten misses of 900 tokens would be in it
    assert "60 censored (not scored)" in table(report)
    tail = PromptLength()
    tail.fit(Prompts(np.arange(200)), lengths, cut)
    assert tail.predict_columns(Prompts(np.arange(200))).quantiles([0.95]).min() > 70.0  # lower bounds: the tail goes on


# --- P6: batches of one and of none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Constant, PromptLength, Ridge, GBDT])
def test_p6_a_last_batch_of_one_row_and_an_empty_batch(make: type[LengthPredictor]) -> None:
    predictor = make()
    predictor.fit(*synthetic_rows(100))
    prompts, _, _ = synthetic_rows(65, seed=1)
    asked = requests_of(prompts)
    for predict in (predictor.predict, Fallback(predictor).predict):
        rows = [row for i in (0, 64) for row in predict(asked[i : i + 64])]
        assert len(rows) == 65 and all(isinstance(row, LengthDistribution) for row in rows)
        assert rows[64].score == predictor.predict_columns(prompts.take([64])).score[0]
        assert predict([]) == []
    empty = Fallback(predictor).predict_columns(prompts.take([]))
    assert len(empty) == 0 and empty.fallback is not None and empty.fallback.size == 0


def test_p6_the_server_takes_a_last_batch_of_one() -> None:
    ready = LatencyModel(1.0, 0.5, max_batch=64).ready_times(np.zeros(65))
    assert ready[:64].tolist() == [33.0] * 64 and ready[64] == 34.5
    assert LatencyModel(1.0, 0.5).ready_times([]).size == 0


# --- P7: predictions that are none ------------------------------------------------------------------------------------


class Faulty(LengthPredictor):
    """Says 2 x the prompt's length; a prompt of 13 tokens makes it raise, of 17 give NaN, of 19 -5, of 23 infinity."""

    name = "faulty"
    wrong = {17: np.nan, 19: -5.0, 23: np.inf}  # noqa: RUF012
    latency = FREE

    def __init__(self, always: bool = False, ranks: bool = False) -> None:
        self.always, self.ranks, self._fitted = always, ranks, False

    @property
    def fitted(self) -> bool:
        return self._fitted

    def learn(self, rows: Any) -> None:
        self._fitted = True

    def predict_columns(self, prompts: Prompts) -> Predictions:
        if self.always or np.any(prompts.prompt_len == 13):
            raise RuntimeError("cannot say")
        said = np.array([self.wrong.get(int(n), 2.0 * n) for n in prompts.prompt_len])
        return Predictions(said / 1000.0) if self.ranks else Predictions(said, said)

    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...


def faulty_rows(num_rows: int = 300) -> Dataset:
    return dataset(num_rows, text=False, prompt_len=np.arange(num_rows, dtype=np.int64) % 30 + 1)


def test_p7_rows_without_a_usable_prediction_get_the_median_and_are_counted_by_kind() -> None:
    rows = faulty_rows()
    predictions, fold, info = make_predictions(compose(policy="sjf", predictor=Faulty(), workload=rows))
    bad = np.isin(rows.prompt_len, [13, 17, 19, 23])
    assert info["fallback"] == {"raised": 10, "nan": 10, "infinite": 10, "negative": 10}
    assert predictions.fallback is not None and predictions.fallback.tolist() == bad.tolist()
    assert set(predictions.score[bad]) == {np.median(rows.output_len)} == {info["fallback_len"]}
    assert predictions.score[~bad].tolist() == (2.0 * rows.prompt_len[~bad]).tolist()  # the others are as they were
    assert fold.min() == 0 and any(mark.startswith("13.3% of the rows") for mark in info["marks"])


def test_p7_a_cell_tells_its_fallback_share() -> None:
    rows = faulty_rows()
    run = simulate("srpt", Faulty(), rows, rate=50.0, num_requests=300, max_num_seqs=4)
    bad = run.requests["prompt_len"].isin([13, 17, 19, 23])
    assert run.metrics["num_finished"] == 300
    assert (run.requests["predicted"][bad] == np.median(rows.output_len)).all()
    assert run.metrics["fallback_share"] == pytest.approx(bad.mean()) and 0 < bad.mean() < 1
    assert simulate("sjf", Constant(latency=FREE), rows, rate=50.0, num_requests=50).metrics["fallback_share"] == 0.0


def test_p7_the_mask_survives_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"_target_": f"{__name__}.Faulty"}
    made = Predictions(np.ones(3), np.ones(3), fallback=np.array([True, False, True])), np.zeros(3, dtype=np.int64), {"x": 1}
    monkeypatch.setattr("lengthwise.experiments.prepare.make_predictions", lambda cfg: made)
    monkeypatch.setattr("lengthwise.experiments.prepare.is_prepared", lambda cfg: True)
    stored = Prepared(tmp_path).predictions({"predictor": node, "workload": None, "rate": 1.0})
    assert stored is not None and stored[0].fallback is not None
    assert stored[0].fallback.tolist() == [True, False, True] and stored[0].take([2, 1]).fallback.tolist() == [True, False]  # type: ignore[union-attr]


def test_p7_a_predictor_that_always_raises_is_an_error_not_a_constant() -> None:
    with pytest.raises(ValueError, match=r"faulty gave no usable prediction for any of 300 rows \(raised 300\).*cannot say"):
        make_predictions(compose(policy="sjf", predictor=Faulty(always=True), workload=faulty_rows()))
    only_nan = dataset(100, text=False, prompt_len=np.full(100, 17))
    with pytest.raises(ValueError, match=r"any of 100 rows \(nan 100\)"):
        make_predictions(compose(policy="sjf", predictor=Faulty(), workload=only_nan))


def test_p7_a_rank_that_is_none_gets_the_middle_rank_not_a_length() -> None:
    predictor = Faulty(ranks=True)
    predictor.fit(Prompts(np.arange(1, 41)), np.arange(1, 41) * 50, np.zeros(40, dtype=bool))
    asked = np.array([1, 2, 17, 3, 4, 5, 13])
    guard = Fallback(predictor)
    out = guard.predict_columns(Prompts(asked))
    assert out.score.tolist() == [0.002, 0.004, 0.006, 0.006, 0.008, 0.010, 0.006] and out.point is None
    assert guard.counts == {**dict.fromkeys(KINDS, 0), "nan": 1, "raised": 1}
    rows = Fallback(predictor).predict([Request(i, 0.0, int(n)) for i, n in enumerate(asked[:-1])])
    assert [row.score for row in rows] == out.score[:-1].tolist() and rows[2].is_rank_only


def test_p7_a_fold_that_fails_as_a_whole_joins_the_others() -> None:
    lost = Predictions(np.full(2, 300.0), np.full(2, 300.0), fallback=np.ones(2, dtype=bool))
    curve = Predictions.from_survivals(np.exp(-EDGES / 50.0)[None, :])
    whole = Predictions.concatenate(like_the_others([lost, curve]))
    assert whole.survival is not None and whole.means()[:2] == pytest.approx([300.0, 300.0])
    assert whole.fallback is not None and whole.fallback.tolist() == [True, True, False]
    ranks = Predictions.concatenate(like_the_others([Predictions(np.array([1.0, 3.0])), lost]))
    assert ranks.score.tolist() == [1.0, 3.0, 2.0, 2.0] and ranks.point is None


# --- P10: nothing of the test side in training ------------------------------------------------------------------------


class Spy(Constant):
    """Learns nothing; notes the prompts it was given, and predicts the number of the fit that predicts."""

    name = "spy"
    per_row = True
    seen: list[set[str]] = []  # noqa: RUF012 - of the class: cells predict with copies

    def fit(self, prompts: Any, lengths: Any, censored: Any, *, group: Any = None) -> None:
        super().fit(prompts, lengths, censored, group=group)
        Spy.seen.append(set(prompts.texts))
        self._length = float(len(Spy.seen))


def conversations() -> tuple[np.ndarray, list[str]]:
    """100 conversations of 5 turns, and 20 prompts that come again in another conversation."""
    conversation = np.repeat(np.arange(100), 5)
    prompts = [f"turn {i} of its own" for i in range(500)]
    prompts[480:] = prompts[:20]
    return conversation, prompts


def test_p10_no_request_is_predicted_by_a_model_that_has_seen_its_group(tmp_path: Path) -> None:
    """On a real cell, read back from its file: its folds against the rows that each fold's model was given."""
    conversation, prompts = conversations()
    rng = np.random.default_rng(3)
    rows = dataset(500, prompts=prompts, group=conversation, output_len=rng.integers(1, 80, 500))
    Spy.seen.clear()
    simulate("sjf", Spy(latency=FREE), rows, rate=100.0, num_requests=500).save(tmp_path)
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    assert len(Spy.seen) == 5 and set(requests["fold"]) == {0, 1, 2, 3, 4}
    assert (requests.groupby("group")["fold"].nunique() == 1).all()  # a group is in one fold
    for request in requests.itertuples():
        texts = Spy.seen[request.fold]
        assert request.predicted == request.fold + 1  # the model of its fold predicted it
        assert rows.prompts is not None and rows.prompts[request.row] not in texts
        assert conversation[request.row] == request.group
    for fold, texts in enumerate(Spy.seen):  # whole conversations, told by their prompts
        tested = set(requests["group"][requests["fold"] == fold])
        learned = {int(conversation[i]) for i in range(480) if prompts[i] in texts}
        assert not tested & learned and len(tested | learned) >= 96


def test_p10_equal_prompts_of_two_conversations_stay_together() -> None:
    conversation, prompts = conversations()
    rows = dataset(500, prompts=prompts, group=conversation)
    group = groups_of(rows)
    assert group[480:].tolist() == group[:20].tolist() and len(set(group)) == 96
    for name in SPLITS:
        learn, test = named_split(name, group)
        assert not set(conversation[learn]) & set(conversation[test])
        assert not {prompts[i] for i in learn} & {prompts[i] for i in test}


def test_p10_a_length_column_that_is_the_answer_is_refused() -> None:
    rows = dataset(text=False, prompt_len=dataset().output_len)  # the wrong column of a table
    with pytest.raises(ValueError, match=r"'log_tokens' follows the label .*it leaks the answer"):
        train(rows, PromptLength, baselines=())
    with pytest.raises(ValueError, match="it leaks the answer"):
        make_predictions(compose(policy="sjf", predictor=GBDT(), workload=dataset(prompt_len=dataset().output_len)))


def test_p10_a_time_ordered_split_learns_from_the_past_only(tmp_path: Path) -> None:
    arrival = np.arange(100.0)[::-1]
    group = np.arange(100)
    group[5] = group[80]  # arrivals 94 and 19: the late turn of an early conversation is in neither
    learn, test = time_split(arrival, group)
    assert arrival[learn].max() < arrival[test].min() and len(learn) == 80
    assert sorted(test.tolist()) == [i for i in range(20) if i != 5]
    with pytest.raises(ValueError, match="cannot be split by time"):
        time_split(np.zeros(50), np.arange(50))

    rows = dataset(200, arrival=np.arange(200.0))
    report = train(rows, PromptLength, baselines=(), split="time", folder=tmp_path)
    held = report["held_out"]
    assert report["split"] == "time" and held["n"] == 40 and "held out by split time: 40 rows" in table(report)
    again = PromptLength()
    again.fit(rows.asked(range(160)), rows.output_len[:160], np.zeros(160, dtype=bool))
    assert held["mae"] == score(again.predict_columns(rows.asked(range(160, 200))), rows.output_len[160:])["mae"]
    with pytest.raises(ValueError, match="made_up has no arrival times"):
        train(dataset(), PromptLength, split="time")
    assert train(dataset(), Constant, baselines=())["held_out"] is None


def test_p10_an_object_given_to_simulate_is_left_unfitted() -> None:
    """Fitted by the first cell, it would be taken for an artefact by the second, and predict what it has learned from."""
    predictor = PromptLength(latency=FREE)
    runs = [simulate("sjf", predictor, dataset(), rate=50.0, num_requests=100) for _ in range(2)]
    assert not predictor.fitted
    assert runs[0].requests["predicted"].tolist() == runs[1].requests["predicted"].tolist()
    assert set(runs[1].requests["fold"]) == {0, 1, 2, 3, 4}


# --- P11: when does prediction help? ----------------------------------------------------------------------------------

SCHEDULES = (("fcfs", "none"), ("sjf", "constant"), ("sjf", "prompt_length"), ("sjf", "oracle"))
REGIMES = ((0.3, 256), (0.95, 4))


@pytest.fixture(scope="module")
def regimes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FCFS and SJF at a low load with many slots and at a high one with few, three seeds; prompts tell of their answers."""
    folder = tmp_path_factory.mktemp("regimes")
    lengths = "lengthwise.experiments.workloads.lengths.LogNormal"
    workload = {
        "_target_": "lengthwise.experiments.workloads.synthetic.load", "num_rows": 6000, "correlation": 0.8, "seed": 0,
        "prompt_len": {"_target_": lengths, "mean": 150, "cv": 1.5},
        "output_len": {"_target_": lengths, "mean": 100, "cv": 1.5},
    }  # fmt: skip
    for load, slots in REGIMES:
        for policy, predictor in SCHEDULES:
            for seed in range(3):
                options = {"load": load, "max_num_seqs": slots, "num_requests": 400, "seed": seed}
                run = simulate(policy, predictor, workload, **options)
                run.summary["cell"] |= {"limits": f"seqs{slots}", "workload": "synthetic"}
                run.save(folder / f"{policy}-{predictor}-{slots}-{seed}")
    return folder


def test_p11_a_gain_only_where_requests_wait(regimes: Path) -> None:
    frame = compare(read_cells(regimes)).set_index(["load", "policy", "predictor"])
    low, high = frame.loc[0.3], frame.loc[0.95]
    for schedule in SCHEDULES[1:]:
        assert abs(low.loc[schedule, "ratio"] - 1.0) < 0.001 and low.loc[schedule, "gap_note"] == "n/a"
    assert low.loc[("sjf", "oracle"), "ratio_low"] <= 1.0 <= low.loc[("sjf", "oracle"), "ratio_high"]
    assert high.loc[("sjf", "oracle"), "ratio_high"] < 1.0 and high.loc[("sjf", "oracle"), "ratio"] < 0.8
    closed = high["gap_closed"].loc["sjf"]
    assert closed["oracle"] == pytest.approx(1.0) and 0.5 < closed["prompt_length"] < 1.0 and abs(closed["constant"]) < 0.01
    assert low.loc[("fcfs", "none"), "wait_share"] < 0.01 and high.loc[("fcfs", "none"), "wait_share"] > 0.5


def test_p11_the_table_says_so(regimes: Path) -> None:
    cells = read_cells(regimes)
    frame = compare(cells)
    head = text_of(heading("regimes", cells, frame))
    assert "waiting, as a share of E2E under FCFS" in head and "load 0.3 0.5%" in head and "load 0.95 6" in head
    low, high = markdown(frame).split("load 0.95")
    assert low.count("| n/a |") == 3 and "| n/a |" not in high and text_of(page(frame)).count(" n/a ") >= 3
    for name in ("sjf constant", "sjf prompt_length", "sjf oracle*"):  # the policy, and what it sorts by
        assert name in low and name in high


def test_p11_a_training_report_always_has_its_floor_and_ceiling() -> None:
    report = train(dataset(text=False), PromptLength, baselines=())
    assert list(report["baselines"]) == ["constant", "oracle"]
    assert report["baselines"]["oracle"]["mae"] == 0.0 < report["metrics"]["mae"]
    assert list(train(dataset(), Constant, baselines=["ridge"])["baselines"]) == [
        "constant",
        "prompt_length",
        "ridge",
        "oracle",
    ]


def test_p11_every_summary_has_the_waiting_share(regimes: Path) -> None:
    for cell in read_cells(regimes):
        requests = pd.read_parquet(cell.folder / "requests.parquet")
        window = cell.summary["window"] if cell.summary else {}
        if not window["whole"]:
            requests = requests[(requests["arrival"] >= window["begin"]) & (requests["arrival"] < window["end"])]
        waited, total = requests["first_scheduled"] - requests["arrival"], requests["finish"] - requests["arrival"]
        assert cell.metrics["wait_share"] == pytest.approx(waited.sum() / total.sum())


# --- the unit rule ----------------------------------------------------------------------------------------------------


def other_rows(unit: str) -> Dataset:
    """Rows that the artefact has not seen, counted in `unit`."""
    asked, lengths, _ = synthetic_rows(200, seed=5)
    return dataset(
        unit=unit, prompts=[f"another {text}" for text in asked.texts or ()], prompt_len=asked.prompt_len.astype(int),
        output_len=lengths,
    )  # fmt: skip


def test_an_artefact_of_another_unit_is_refused_or_marked_in_summary_and_table(tmp_path: Path) -> None:
    train(dataset(), PromptLength, baselines=(), folder=tmp_path / "train")
    node = {"_target_": ARTEFACT, "path": str(tmp_path / "train" / "artefact"), "transfer": False}
    with pytest.raises(ValueError, match=r"as 'made-up tokens', the workload as 'words'; set predictor.transfer=true"):
        simulate("sjf", node, other_rows("words"), rate=50.0, num_requests=100)
    same = simulate("sjf", node, other_rows("made-up tokens"), rate=50.0, num_requests=100)
    assert not any("transfer" in mark for mark in same.summary["provenance"]["marks"])

    moved = simulate("sjf", {**node, "transfer": True}, other_rows("words"), rate=50.0, num_requests=100)
    (mark,) = [mark for mark in moved.summary["provenance"]["marks"] if mark.startswith("transfer:")]
    assert "'made-up tokens'" in mark and "'words'" in mark and set(moved.requests["fold"]) == {-1}
    assert moved.summary["provenance"]["predictor"]["unit"] == "made-up tokens"
    base = simulate("fcfs", "none", other_rows("words"), rate=50.0, num_requests=100)
    for name, run in (("base", base), ("moved", moved)):
        run.save(tmp_path / "cells" / name)
    frame = compare(read_cells(tmp_path / "cells"))
    assert mark in frame.set_index("policy")["marks"]["sjf"] and "transfer" not in frame.set_index("policy")["marks"]["fcfs"]
    flat = " ".join(text_of(page(frame)).split())
    assert mark in flat and mark in markdown(frame)


def test_an_artefact_does_not_predict_what_it_has_learned_from(tmp_path: Path) -> None:
    train(dataset(), GBDT, baselines=(), folder=tmp_path)
    node = {"_target_": ARTEFACT, "path": str(tmp_path / "artefact")}
    with pytest.raises(ValueError, match=r"has learned from 200 of the 200 prompts of made_up"):
        make_predictions(compose(policy="sjf", predictor=node, workload=dataset()))


def test_a_stated_constant_has_no_unit_to_mismatch() -> None:
    node = {"_target_": "lengthwise.predictors.constant.Constant", "length": 120}
    run = simulate("sjf", node, dataset(), rate=50.0, num_requests=100)
    assert set(run.requests["predicted"]) == {120.0}
    fitted = Constant()
    fitted.fit(*synthetic_rows(50))
    with pytest.raises(ValueError, match="counts lengths as None"):  # learned, and nobody said from what
        simulate("sjf", fitted, dataset(), rate=50.0, num_requests=100)


def test_a_guard_changes_nothing_of_a_sound_predictor() -> None:
    prompts, lengths, censored = synthetic_rows(200)
    plain, fold = out_of_fold(Ridge, prompts, lengths, censored, None)
    guarded, again = out_of_fold(Ridge, prompts, lengths, censored, None, guard=Fallback)
    assert fold.tolist() == again.tolist() and plain.fallback is None
    assert guarded.fallback is not None and not guarded.fallback.any()
    assert plain.survival is not None and guarded.survival is not None
    assert np.array_equal(plain.score, guarded.score) and np.array_equal(plain.survival, guarded.survival)
    assert Oracle().from_truth(lengths).fallback is None
