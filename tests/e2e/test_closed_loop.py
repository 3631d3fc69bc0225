"""`study=closed_loop`: a model's answers to some prompts teach predictors, which then order its answers to others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_service import byte_tokenizer

from lengthwise.engine.native.tiny import tiny_model
from lengthwise.experiments.load_runs import load_runs
from lengthwise.experiments.native_stage import OWN_LENGTHS
from lengthwise.experiments.run import Run

COMMAND = "import sys; from lengthwise.cli import main; sys.exit(main(sys.argv[1:]))"
TINY = ("model=hf", "model.source=model")
FITS = ("limits.max_model_len=2048", "limits.kv_pool_tokens=32768")
ARMS = [("fcfs", "none"), *(("srpt", name) for name in ("constant", "artefact_default", "artefact_best", "oracle"))]


def command(*overrides, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("LENGTHWISE_DATA", None)
    done = subprocess.run([sys.executable, "-c", COMMAND, *overrides], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_the_loop_is_closed_on_a_tiny_model(tmp_path):
    tiny_model(vocab_size=257, max_positions=2048, eos_token_id=256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command(
        "collect", *TINY, *FITS, "workload=prompts", "workload.answers=null", "samples=1", "max_new_tokens=100", "limit=450",
        "sampling.temperature=1", "kv=prefix", "out=answers.parquet", cwd=tmp_path,
    )  # fmt: skip
    answers = "workload.answers=answers.parquet"
    command(
        "train", "-m", "predictor=ridge,prompt_length", "workload=prompts", "workload.part=learn", answers, "baselines=[]",
        "regret.num_requests=null", cwd=tmp_path,
    )  # fmt: skip
    command(
        "profile", *TINY, "range={rows: 32, context_per_row: 128}", "states=30", "passes=1", "repeats=1", "out=profile.yaml",
        cwd=tmp_path,
    )  # fmt: skip
    line = [
        "run", "-m", "study=closed_loop", *TINY, *FITS, answers, "hardware.path=profile.yaml", "executor.compiled=false",
        "artefacts.default=runs/train/ridge-prompts/artefact", "artefacts.best=runs/train/prompt_length-prompts/artefact",
        "num_requests=40", "seed=0", "load=1.2", "saturation=30", "wandb=off",
    ]  # fmt: skip
    done = command(*line, cwd=tmp_path)
    again = command(*line, cwd=tmp_path)
    assert "6 cells, 6 of them complete" in again.stderr
    runs = load_runs(tmp_path / "runs" / "closed_loop")
    assert (runs["status"] == "ok").all()
    forced, free = runs[runs["executor"] == "native"], runs[runs["executor"] == "native_free"]
    assert sorted(zip(forced["policy"], forced["predictor"], strict=True)) == sorted(ARMS)
    assert set(zip(free["policy"], free["predictor"], strict=True)) == {("srpt", "artefact_best")}
    mine, own = [Run.load(folder) for folder in forced["folder"]], Run.load(*free["folder"])
    first = mine[0].requests
    for run in (*mine, own):  # the same prompts at the same times
        assert (run.requests["status"] == "finished").all()
        assert run.requests[["row", "arrival", "prompt_len"]].equals(first[["row", "arrival", "prompt_len"]])
    for run in mine:  # and answers of the same, recorded lengths
        assert run.requests["output_len"].equals(first["output_len"])
        notes = run.summary["provenance"]["workload"]
        assert notes["part"] == "held_out" and notes["collected"]["model"] == "model"
    assert not own.requests["output_len"].equals(first["output_len"])
    assert OWN_LENGTHS in own.summary["provenance"]["marks"]
    table = json.loads((tmp_path / "runs" / "closed_loop" / "study.json").read_text())["table"]
    told = {(row["executor"], row["policy"], row["predictor"]): row for row in table}
    assert len(told) == 6 and told["native_free", "srpt", "artefact_best"]["gap_note"] == "no FCFS"
    for row in table:  # of so few requests there is no P99
        assert all(row[key] > 0 for key in ("e2e_mean", "ttft_mean", "max_wait")) and row["wait_mean"] <= row["max_wait"]
        assert {"e2e_p99", "ttft_p99", "wait_p99", "gap_closed"} <= row.keys()
    assert "wait (s)" in done.stdout and "(b) native_free" in done.stdout and "answers are as long as the model" in done.stdout
