"""Several trainings in one table: resumed, with budgets of labels and transfers between workloads; the report they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lengthwise.cli import main as command
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.figures import reliability
from lengthwise.experiments.figures.contract import check_figure
from lengthwise.experiments.figures.main import main as figure
from lengthwise.experiments.label_budget import labels_of
from lengthwise.experiments.train import train
from lengthwise.experiments.train_report import table
from lengthwise.experiments.train_table import frame_of, read_reports, text_of, transfers_of
from lengthwise.predictors.confused_oracle import ConfusedOracle
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.contract import synthetic_rows
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import BANDS, RELIABILITY, errors_by_band, r2_log, score
from lengthwise.sched import EDGES


def dataset(num_rows: int = 300, seed: int = 0, **changes: Any) -> Dataset:
    asked, lengths, censored = synthetic_rows(num_rows, seed)
    fields: dict[str, Any] = {
        "name": f"made_up_{seed}", "prompt_len": asked.prompt_len.astype(int), "output_len": lengths, "unit": "made-up tokens",
        "source": "a generator", "licence": "none", "censored": censored,
        "prompts": [f"{text} {seed}" for text in asked.texts or ()],
    }  # fmt: skip
    return Dataset(**{**fields, **changes})


def answered(num_rows: int = 300, num_answers: int = 5, noise: float = 0.6) -> Dataset:
    """Several answers to each prompt, whose expected length the prompt's length tells."""
    rng = np.random.default_rng(1)
    asked = rng.integers(10, 1000, num_rows)
    samples = np.maximum(1, asked[:, None] * np.exp(noise * rng.standard_normal((num_rows, num_answers)))).astype(np.int64)
    return dataset(
        num_rows, prompt_len=asked, output_len=samples[:, 2].copy(), samples=samples, censored=None,
        prompts=[f"prompt number {i} of its own" for i in range(num_rows)],
    )  # fmt: skip


# --- the report -------------------------------------------------------------------------------------------------------


def test_reliability_is_the_share_at_or_below_each_level() -> None:
    rng = np.random.default_rng(0)
    mean = np.full(5000, 120.0)
    true = Predictions.from_survivals(np.exp(-EDGES[None, :] / mean[:, None]))
    lengths = rng.exponential(120.0, 5000) + 1e-3
    found = score(true, lengths)
    assert list(found["reliability"]) == [f"{q:g}" for q in RELIABILITY]
    for level, share in found["reliability"].items():
        assert share == pytest.approx(float(level), abs=0.025)
    assert found["coverage"]["95"] == pytest.approx(found["reliability"]["0.975"] - found["reliability"]["0.025"], abs=1e-9)
    short = score(Predictions.from_survivals(np.exp(-EDGES[None, :] / (mean[:, None] / 3))), lengths)
    assert all(short["reliability"][f"{q:g}"] < q for q in RELIABILITY)
    assert score(Predictions.from_points(mean), lengths)["reliability"] is None


def test_r2_on_log_length_by_hand() -> None:
    truth = np.array([1.0, np.e, np.e**2])
    assert r2_log(truth, truth) == 1.0 and r2_log(np.full(3, np.e), truth) == pytest.approx(0.0)
    assert r2_log(np.array([np.e, np.e, np.e]), truth[::-1]) == pytest.approx(0.0)
    assert r2_log(np.array([0.0, np.e, np.e**3]), truth) == pytest.approx(1 - 1 / 2)  # below a token counts as one
    assert r2_log(np.ones(2), [5.0, 5.0]) is None and r2_log(np.zeros(0), []) is None


def test_errors_by_band_are_quantiles_of_log_ratios() -> None:
    truth = np.concatenate((np.full(100, 8.0), np.full(100, 300.0), np.full(3, 5000.0)))
    found = errors_by_band(2.0 * truth, truth)
    by_band = {band["from"]: band for band in found["bands"]}
    assert [by_band[b]["n"] for b in BANDS] == [100, 0, 0, 100, 0, 0, 3]
    assert by_band[1]["log_ratio"] == [pytest.approx(np.log(2), abs=1e-4)] * 21 and by_band[2048]["log_ratio"] is None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("report")
    return train(
        dataset(), Ridge, folder=folder, others={"near": dataset(seed=1), "words": dataset(seed=2, unit="words")}
    ), folder


def test_the_report_tells_cost_calibration_and_errors(made: tuple[dict[str, Any], Path]) -> None:
    report, folder = made
    cost = report["volatile"]["latency"]
    assert cost["single"] <= cost["single_p90"] <= cost["single_p99"] and cost["batch"] <= cost["batch_p99"]
    size = sum(file.stat().st_size for file in (folder / "artefact").iterdir())
    assert report["volatile"]["artefact_bytes"] == size > 1000
    metrics = report["metrics"]
    assert 0.0 < metrics["r2_log"] < 1.0 and report["baselines"]["oracle"]["r2_log"] == 1.0
    assert set(metrics["coverage"]) >= {"50", "80", "95"} and metrics["coverage"]["50"] < metrics["coverage"]["95"]
    assert len(metrics["reliability"]) == len(RELIABILITY) and report["baselines"]["constant"]["reliability"] is None
    kept = sum(report["metrics"]["n_by_split"].values())
    assert sum(band["n"] for band in report["errors"]["bands"]) == kept  # test rows of all three splits, once each
    ConfusedOracle(folder / "report.json")
    text = table(report)
    for word in ("R2 log", "95%", "answers below", "p99", "kB"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 130


def test_transfers_leave_out_what_was_learned_and_mark_units(made: tuple[dict[str, Any], Path]) -> None:
    found = made[0]["transfer"]
    assert found["near"]["mark"] is None and found["near"]["kendall_tau"] > 0.4
    assert found["words"]["mark"] == "learned in made-up tokens, scored in words"
    same = train(dataset(600), Ridge, baselines=(), others={"itself": dataset(600)})
    moved, own = same["transfer"]["itself"], same["metrics"]
    assert moved["n_by_split"] == own["n_by_split"]  # of its own rows those that a split has not learned: its test rows
    assert moved["kendall_tau"] == pytest.approx(own["kendall_tau"])
    bare = train(dataset(), Ridge, baselines=(), others={"bare": dataset(prompts=None), "few": dataset(50, seed=4)})["transfer"]
    assert (
        bare["bare"]["skipped"] == "its rows have no prompt text"
        and "of its rows were not learned from" in bare["few"]["skipped"]
    )


# --- label budget -----------------------------------------------------------------------------------------------------


def test_labels_are_medians_of_answers_that_are_not_scored() -> None:
    rows = answered()
    assert rows.samples is not None
    labels, cut = labels_of(rows, 2)
    assert labels.tolist() == rows.samples[:, :2].mean(axis=1).tolist() and not cut.any()
    others = np.delete(rows.samples, 2, axis=1)
    for k in (1, 3, 4):
        assert labels_of(rows, k)[0].tolist() == np.median(others[:, :k], axis=1).tolist()
    limit = 400
    short = np.minimum(rows.samples, limit)
    limited = dataset(300, prompt_len=rows.prompt_len, samples=short, output_len=short[:, 2], censored=short[:, 2] >= limit)
    assert (labels_of(limited, 3)[1] == (np.median(others[:, :3], axis=1) >= limit)).all()
    assert (labels_of(limited, 2)[1] == (others[:, :2] >= limit).any(axis=1)).all()  # the median is half of one that was cut
    for num, message in ((5, "label_samples=5: workload made_up_0 has 4 further answers"), (0, "label_samples=0")):
        with pytest.raises(ValueError, match=message):
            labels_of(rows, num)
    with pytest.raises(ValueError, match="0 further answers"):
        labels_of(dataset(), 1)
    with pytest.raises(ValueError, match="none of its samples is output_len"):
        labels_of(dataset(300, samples=rows.samples), 1)


def test_more_answers_to_a_prompt_teach_more() -> None:
    rows = answered(400, 9, noise=1.2)
    found = {k: train(rows, PromptLength, baselines=(), label_samples=k)["metrics"] for k in (1, 8)}
    assert found[8]["r2_log"] > found[1]["r2_log"] and found[8]["kendall_tau"] > found[1]["kendall_tau"]


def test_a_budget_is_told_in_report_artefact_and_table(tmp_path: Path) -> None:
    report = train(answered(), Constant, baselines=(), label_samples=3, folder=tmp_path)
    assert report["label_samples"] == 3 and "median of 3 answers" in table(report)
    page = json.loads((tmp_path / "artefact" / "artefact.json").read_text())
    assert page["provenance"]["label_samples"] == 3


def test_the_share_of_the_ceiling_that_is_reached_is_told() -> None:
    reports = [train(answered(noise=0.8), make, baselines=("oracle",)) for make in (Constant, PromptLength)]
    frame = frame_of(reports).set_index("predictor")
    ceiling = frame.loc["another answer", "kendall_tau"]
    assert frame.loc["prompt_length", "reached"] == pytest.approx(frame.loc["prompt_length", "kendall_tau"] / ceiling)
    assert frame.loc["constant", "reached"] == 0.0 and 0.5 < frame.loc["prompt_length", "reached"] <= 1.1
    assert np.isnan(frame.loc["another answer", "reached"])
    assert f", of which prompt_length reaches {frame.loc['prompt_length', 'reached']:.0%}" in table(reports[1])
    assert "reached" in text_of(frame.reset_index(), transfers_of(reports))
    alone = frame_of([train(dataset(), Constant, baselines=())])
    assert "reached" not in alone and "reached" not in text_of(alone, transfers_of([]))


# --- the command ------------------------------------------------------------------------------------------------------


def write_rows(path: Path, seed: int = 0, num_rows: int = 150) -> None:
    rows = dataset(num_rows, seed)
    assert rows.prompts is not None
    told = zip(rows.prompts, rows.prompt_len.tolist(), rows.output_len.tolist(), strict=True)
    path.write_text("".join(json.dumps({"prompt": p, "prompt_len": n, "output_len": m}) + "\n" for p, n, m in told))


def sweep(folder: Path, *more: str) -> int:
    write_rows(folder / "a.jsonl")
    named = ["prompt=prompt", "prompt_len=prompt_len", "output_len=output_len", "unit=made-up", f"path={folder}/a.jsonl"]
    line = ["train", "-m", "workload=table", "regret.num_requests=null", f"out={folder}"]
    return command([*line, *(f"workload.{text}" for text in named), *more])


def test_a_sweep_is_one_table_and_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("predictor=constant,prompt_length", "baselines=[constant,oracle]")
    assert sweep(tmp_path, *arguments) == 0
    out = capsys.readouterr()
    assert "training 2/2: prompt_length on table" in out.err and "split 2" in out.err
    frame = pd.read_parquet(tmp_path / "train" / "predictors.parquet")
    assert list(frame["predictor"]) == ["constant", "prompt_length", "oracle"]
    assert list(frame["kind"]) == ["trained", "trained", "baseline"]
    assert frame["single_p99_ms"].iloc[1] > 0 and frame["artefact_bytes"].iloc[1] > 100 and np.isnan(frame["fit_s"].iloc[2])
    assert "tau-b" in out.out and "prompt_length" in out.out and str(tmp_path / "train" / "predictors.parquet") in out.out

    stamp = {path: path.stat().st_mtime_ns for path in (tmp_path / "train").rglob("report.json")}
    assert sweep(tmp_path, *arguments) == 0
    assert "split" not in capsys.readouterr().err  # nothing was fitted
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "train" / "predictors.parquet"), frame)
    assert sweep(tmp_path, "predictor=constant,prompt_length", "baselines=[oracle]", "predictor.latency=null", "split=1") == 0
    assert all(path.stat().st_mtime_ns > before for path, before in stamp.items())  # other rows to learn from: made anew
    assert {name for name in frame} == set(frame_of(read_reports(tmp_path)))


def test_a_sweep_names_what_it_varies_and_one_failure_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"(?s)1 of 3 trainings failed.*num_folds=1 on table: num_folds=1"):
        sweep(tmp_path, "predictor=prompt_length", "predictor.num_folds=1,2,3", "baselines=[]")
    out = capsys.readouterr().out
    assert "prompt_length num_folds=2" in out and (tmp_path / "train").is_dir()
    assert len(list((tmp_path / "train").rglob("report.json"))) == 2
    with pytest.raises(SystemExit, match=r"(?s)1 of 1 trainings failed.*nothing to train"):
        sweep(tmp_path, "predictor=none")


def test_a_sweep_over_workloads_scores_each_on_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "b.jsonl", 1)
    assert sweep(tmp_path, "predictor=ridge", f"workload.path={tmp_path}/a.jsonl,{tmp_path}/b.jsonl", "transfer=true") == 0
    frame = pd.read_parquet(tmp_path / "train" / "predictors-transfer.parquet")
    assert len(frame) == 4 and (frame["kendall_tau"] > 0.2).all() and set(frame["mark"]) == {""}
    assert frame["learned_on"].nunique() == frame["scored_on"].nunique() == 2
    assert "tau-b of ridge, learned on (down), scored on (across)" in capsys.readouterr().out


def test_transfers_to_another_unit_bear_a_star() -> None:
    reports = [
        train(dataset(), Constant, baselines=(), told={"rows_label": "a"}, others={"b": dataset(seed=1, unit="words")}),
        train(dataset(seed=1, unit="words"), Constant, baselines=(), told={"rows_label": "b"}, others={"a": dataset()}),
    ]
    moved = transfers_of(reports)
    assert (moved["mark"] != "").tolist() == [False, True, False, True]
    text = text_of(frame_of(reports), moved)
    assert text.count("0.000*") == 2 and "* lengths of another unit" in text and "\n  2 b " in text
    assert not len(transfers_of([{**report, "transfer": {}} for report in reports]))


def test_where_prompts_were_answered_again_the_ceiling_is_a_row() -> None:
    frame = frame_of([train(answered(), PromptLength, baselines=())])
    ceiling = frame[frame["kind"] == "ceiling"].iloc[0]
    assert 0.3 < ceiling["kendall_tau"] < 1.0 and np.isnan(ceiling["mae"])


# --- the figure -------------------------------------------------------------------------------------------------------


def test_reliability_is_drawn_from_reports_alone(made: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    report, folder = made
    for out in ("a", "b"):
        assert figure(["figure=reliability", f"runs={folder}", f"out={tmp_path}/{out}"]) == 0
    for suffix in ("csv", "png", "pdf"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    plotted = check_figure(reliability.draw, reliability.read(folder))
    assert set(plotted["predictor"]) == {"ridge", "prompt_length"}  # points say no quantiles
    own = plotted[plotted["predictor"] == "ridge"]
    assert own["share"].tolist() == pytest.approx(list(report["metrics"]["reliability"].values()))
    with pytest.raises(SystemExit, match=r"no report\.json in"):
        figure(["figure=reliability", f"runs={tmp_path}/nothing"])
    train(dataset(), Constant, baselines=(), folder=tmp_path / "points")
    page = json.loads((tmp_path / "points" / "report.json").read_text())
    (tmp_path / "points" / "report.json").write_text(json.dumps({**page, "baselines": {}}))
    with pytest.raises(ValueError, match="says quantiles"):
        reliability.read(tmp_path / "points")
