"""`study=quickstart_smollm2` on a file of made-up answers: the quickstart without a data package, and what predictors reach."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lengthwise.cli import main
from lengthwise.experiments.collected import Collected, prompt_sha, write
from lengthwise.experiments.load_runs import load_runs
from lengthwise.experiments.workloads.prompts import load

NUM, SAMPLES = 600, 4


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Answers to the first NUM prompts: as long as others of their template typically are, and what chance adds."""
    rows, rng = load(None), np.random.default_rng(0)
    template = np.unique(rows.columns["template"], return_inverse=True)[1]
    typical = 120.0 * np.exp(rng.standard_normal(template.max() + 1))[template[:NUM]]
    lengths = np.ceil(typical[:, None] * np.exp(0.4 * rng.standard_normal((NUM, SAMPLES)))).astype(np.int64)
    made = Collected(
        meta={"model": "m", "unit": "m tokens", "max_new_tokens": 1024, "workload": {"name": "prompts"}},
        prompt_id=np.arange(NUM), sha=[prompt_sha(text) for text in rows.prompts[:NUM]],
        prompt_len=rows.prompt_len[:NUM] // 4 + 1, lengths=np.minimum(lengths, 1024), stopped=lengths <= 1024,
    )  # fmt: skip
    write(made, tmp_path / "answers.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LENGTHWISE_DATA", raising=False)
    return "workload.answers=answers.parquet"


def test_the_study_runs_on_answers_and_says_how_to_have_them(answers, tmp_path, capsys):
    line = [
        "run", "-m", "study=quickstart_smollm2", "num_requests=200", "setting=slots64_gamma3", "load=2", "seed=0,1",
        "predictor=none,constant,prompt_length,oracle", "hydra/launcher=basic", "wandb=off",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        main([*line, "workload.answers=null"])
    assert "`lengthwise collect model=smollm2 workload=prompts workload.answers=null samples=4 kv=prefix`" in str(stop.value)
    assert main([*line, answers]) == 0
    runs = load_runs(tmp_path / "runs" / "quickstart_smollm2")
    assert len(runs) == 2 * 7 and (runs["status"] == "ok").all()
    mean = runs.groupby(["policy", "predictor"])["e2e_mean"].mean()
    assert mean["srpt", "oracle"] < mean["fcfs", "none"]
    assert "gap closed" in capsys.readouterr().out


def test_what_share_of_the_ceiling_is_reached_by_what_is_held_out(answers, tmp_path, capsys):
    line = ["train", "-m", "predictor=ridge", "workload=prompts", answers, "baselines=[]", "regret.num_requests=null"]
    assert main([*line, "workload.group=prompt,template,topic"]) == 0
    frame = pd.read_parquet(tmp_path / "runs" / "train" / "predictors.parquet")
    found = frame[frame["kind"] == "trained"].set_index("workload")
    assert list(found.index) == [f"prompts group={group}" for group in ("prompt", "template", "topic")]
    ceiling = frame[frame["kind"] == "ceiling"].set_index("workload")["kendall_tau"]
    assert (ceiling == ceiling.iloc[0]).all()  # of the same answers
    assert found["reached"].tolist() == pytest.approx((found["kendall_tau"] / ceiling).tolist())
    assert (
        found.loc["prompts group=prompt", "reached"] > 0.5 > found.loc["prompts group=template", "reached"]
    )  # a template tells
    assert "reached" in capsys.readouterr().out
