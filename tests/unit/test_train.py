"""`lengthwise train`: the report is honest, complete and repeatable, and what cannot be trained is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.train import groups_of, train
from lengthwise.experiments.train_app import main
from lengthwise.experiments.train_report import resample_ceiling, table
from lengthwise.predictors.artefact import load
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.contract import synthetic_rows
from lengthwise.predictors.gbdt import GBDT
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.splits import SPLITS, named_split


def dataset(num_rows: int = 300, text: bool = True, **changes: Any) -> Dataset:
    asked, lengths, censored = synthetic_rows(num_rows)
    fields: dict[str, Any] = {
        "name": "made_up", "prompt_len": asked.prompt_len.astype(int), "output_len": lengths, "unit": "made-up tokens",
        "source": "a generator", "licence": "none", "censored": censored, "prompts": asked.texts if text else None,
        "dropped": {"empty": 3},
    }  # fmt: skip
    return Dataset(**{**fields, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("train")
    return train(dataset(), GBDT, folder=folder), folder


def test_p11_a_report_holds_scores_of_three_splits_and_all_baselines(made: tuple[dict[str, Any], Path]) -> None:
    report, folder = made
    assert json.loads((folder / "report.json").read_text()) == report
    metrics = report["metrics"]
    assert list(metrics["kendall_tau_by_split"]) == list(SPLITS) == report["splits"]
    assert metrics["kendall_tau"] == pytest.approx(np.mean(list(metrics["kendall_tau_by_split"].values())))
    assert set(metrics) >= {"spearman", "mae", "pinball", "crps", "coverage", "bands", "top_decile_recall"}
    base = report["baselines"]
    assert list(base) == ["constant", "prompt_length", "ridge", "oracle"]
    assert base["oracle"]["kendall_tau"] == 1.0 and base["oracle"]["mae"] == 0.0 and base["constant"]["kendall_tau"] == 0.0
    assert base["oracle"]["kendall_tau"] > metrics["kendall_tau"] > base["constant"]["kendall_tau"]
    assert base["oracle"]["crps"] < metrics["crps"] < base["constant"]["crps"]


def test_p3_a_report_counts_what_is_not_scored(made: tuple[dict[str, Any], Path]) -> None:
    report, _ = made
    rows = dataset()
    assert rows.censored is not None
    assert report["num_censored"] == rows.censored.sum() > 0 and report["dropped"] == {"empty": 3}
    for name in SPLITS:
        test = named_split(name, groups_of(rows))[1]
        assert report["metrics"]["num_censored_by_split"][name] == rows.censored[test].sum()
        assert report["metrics"]["n_by_split"][name] == np.count_nonzero(~rows.censored[test])
    shares = [band["share"] for band in report["metrics"]["bands"]]
    assert sum(shares) == pytest.approx(1.0) and report["metrics"]["bands"][-1]["to"] is None
    assert report["labels"]["max"] == rows.output_len.max() and report["labels"]["num_capped_for_training"] == 0
    assert report["resample_ceiling"]["kendall_tau"] is None and "one answer" in report["resample_ceiling"]["reason"]


def test_the_artefact_predicts_and_says_where_it_comes_from(made: tuple[dict[str, Any], Path]) -> None:
    report, folder = made
    loaded = load(report["artefact"], unit="made-up tokens")
    assert report["artefact"] == str(folder / "artefact") and isinstance(loaded, GBDT)
    told = loaded.provenance
    assert told["tokenizer"] == "made-up tokens" and told["split"] == "all" and told["data_hash"] == report["data_hash"]
    assert loaded.latency is not None and loaded.latency.as_dict() == report["volatile"]["latency"]["charged"]
    assert loaded.has_seen([dataset().prompts[0], "Never asked before"]).tolist() == [True, False]  # type: ignore[index]


def test_all_but_the_times_is_the_same_again(made: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    again = train(dataset(), GBDT, folder=tmp_path)
    for report in (made[0], again):
        assert report["volatile"]["latency"]["single"] > 0
    differ = {key for key in again if again[key] != made[0][key]}
    assert differ <= {"volatile", "artefact"}
    for name in ("arrays.npz", "location.txt", "scale.txt", "vocabulary.txt"):
        assert (tmp_path / "artefact" / name).read_bytes() == (made[1] / "artefact" / name).read_bytes()


def test_the_table_shows_each_row(made: tuple[dict[str, Any], Path]) -> None:
    text = table(made[0])
    for word in (
        "gbdt",
        "constant",
        "prompt_length",
        "ridge",
        "oracle",
        "tau-b",
        "split 2",
        "censored",
        "re-sample ceiling",
        "empty 3",
        "ms",
    ):
        assert word in text


def test_without_text_the_text_baseline_is_left_out_and_said() -> None:
    report = train(dataset(text=False), PromptLength)
    assert report["baselines"]["ridge"] == {"skipped": "the rows have no prompt text"}
    assert "left out: the rows have no prompt text" in table(report)
    assert "artefact" not in report


def test_an_artefact_of_one_split_learns_from_its_training_rows_only(tmp_path: Path) -> None:
    rows = dataset()
    report = train(rows, Constant, baselines=(), split="1", folder=tmp_path)
    learn, test = named_split("1", groups_of(rows))
    loaded = load(tmp_path / "artefact")
    assert report["split"] == loaded.provenance["split"] == "1" and loaded.provenance["num_rows"] == len(learn)
    assert loaded.training_median == np.median(rows.output_len[learn])
    assert rows.prompts is not None
    assert (
        loaded.has_seen([rows.prompts[i] for i in learn]).all() and not loaded.has_seen([rows.prompts[i] for i in test]).any()
    )


@pytest.mark.parametrize(
    ("rows", "make", "options", "message"),
    [
        (dataset(99), Constant, {}, "99 rows, at least 100"),
        (dataset(text=False), GBDT, {}, "workload made_up has none: choose constant"),
        (dataset(), Oracle, {}, "a Oracle cannot be trained"),
        (dataset(), Constant, {"baselines": ["constant", "bert"]}, "'bert' is not one of constant, prompt_length"),
        (dataset(), Constant, {"split": "3"}, "split='3'"),
        (dataset(group=np.zeros(300, dtype=np.int64)), Constant, {}, r"300 rows in 1 group\(s\) cannot be split"),
    ],
)
def test_what_cannot_be_trained_is_refused(rows: Dataset, make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(rows, make, **options)


def test_p10_near_duplicates_are_grouped_when_the_loader_has_not() -> None:
    rows = dataset()
    assert rows.prompts is not None
    twice = dataset(prompts=[*rows.prompts[:150], *rows.prompts[:150]], output_len=rows.output_len)
    assert groups_of(twice)[:150].tolist() == groups_of(twice)[150:].tolist()
    assert groups_of(dataset(text=False)).tolist() == list(range(300))


def test_the_ceiling_is_what_other_answers_to_the_same_prompt_tell() -> None:
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(100), 3)
    base = rng.integers(10, 1000, 100)
    same = dataset(output_len=base[prompt], columns={"prompt_id": prompt})
    none = np.zeros(300, dtype=bool)
    assert resample_ceiling(same, none)["kendall_tau"] == pytest.approx(1.0)
    noisy = dataset(output_len=np.maximum(1, base[prompt] + rng.integers(-400, 400, 300)), columns={"prompt_id": prompt})
    found = resample_ceiling(noisy, none)
    assert 0.2 < found["kendall_tau"] < 0.8 and found["n"] == 300 and found["prompts"] == 100
    assert "only 0 rows" in resample_ceiling(dataset(columns={"prompt_id": np.arange(300)}), none)["reason"]


def write_rows(folder: Path, num_rows: int = 200) -> Path:
    asked, lengths, _ = synthetic_rows(num_rows)
    path = folder / "rows.jsonl"
    rows = zip(asked.texts or (), asked.prompt_len.astype(int).tolist(), lengths.tolist(), strict=True)
    path.write_text("".join(json.dumps({"prompt": p, "prompt_len": n, "output_len": m}) + "\n" for p, n, m in rows))
    return path


def test_the_command_trains_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["predictor=prompt_length", "workload=synthetic", "baselines=[constant,oracle]", "regret.num_requests=100"]
    code = main([*line, f"out='{tmp_path}'"])
    out = capsys.readouterr().out
    folder = tmp_path / "train" / "prompt_length-synthetic"
    assert code == 0 and f"predictor=artefact predictor.path={folder / 'artefact'}" in out and "tau-b" in out
    assert "slots64_gamma3 at load 0.95, 3 x 100 requests" in out
    assert list(json.loads((folder / "report.json").read_text())["baselines"]) == ["constant", "oracle"]
    assert load(folder / "artefact").fitted


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["predictor=none", "workload=synthetic"], "nothing to train"),
        (["predictor=gbdt", "workload=synthetic"], "needs prompt text"),
        (["predictor=oracle", "workload=synthetic"], "cannot be trained"),
        (["predictor=gbdt", "predictor.num_folds=1", "workload=synthetic"], "num_folds=1"),
    ],
)
def test_the_command_says_in_one_line_why_not(argv: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^lengthwise train: .*{message}"):
        main([*argv, f"out='{tmp_path}'"])
    assert not list(tmp_path.rglob("report.json"))
