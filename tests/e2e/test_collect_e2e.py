"""`lengthwise collect` as a command: killed and run again it ends alike, and what it has collected is trained on and run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

NUM = 120
ASKED = (
    "model=tiny", "model.vocab_size=16", "model.eos_token_id=3", "sampling.temperature=2", "max_new_tokens=60", "samples=3",
    "limits.max_num_seqs=8", "workload=table", "workload.path=rows.jsonl", "workload.prompt=text", "workload.prompt_len=n",
    "workload.output_len=n", "workload.unit=words", "+workload.licence=CC0-1.0",
)  # fmt: skip


def begun(*arguments, folder):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "lengthwise.cli", *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=env)


def done(*arguments, folder):
    process = begun(*arguments, folder=folder)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture
def folder(tmp_path):
    rows = ({"text": f"question {i} of {'many' if i % 3 else 'few'}", "n": 5 + i % 9} for i in range(NUM))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def stopped(how, lines, folder):
    """A run that is sent a signal once its journal has so many lines; its exit code and last words."""
    process, journal = begun("collect", *ASKED, "out=a.parquet", folder=folder), folder / "a.part.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(how)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def test_a_run_that_was_stopped_goes_on_and_what_it_collects_is_of_use(folder):
    code, _ = stopped(signal.SIGKILL, 60, folder)
    kept = (folder / "a.part.jsonl").read_bytes().count(b"\n")
    assert code == -signal.SIGKILL and 60 <= kept < 3 * NUM and not (folder / "a.parquet").exists()
    code, said = stopped(signal.SIGINT, kept + 60, folder)
    assert code == 130 and "the same command goes on from there" in said and "Traceback" not in said
    code, out, said = done("collect", *ASKED, "out=a.parquet", folder=folder)
    assert code == 0, said
    assert f"{NUM} prompts with 3 answers each" in out and "workload=collected workload.path=" in out
    code, out, said = done("collect", *ASKED, folder=folder)  # undisturbed, to where it goes unless told
    assert code == 0, said
    whole = folder / "collected" / "tiny-table.parquet"
    assert whole.read_bytes() == (folder / "a.parquet").read_bytes() and not list(folder.rglob("*.part.jsonl"))
    meta = json.loads(whole.with_suffix(".json").read_text())
    assert meta["workload"]["licence"] == "CC0-1.0" and meta["command"].startswith("lengthwise collect model=tiny")
    assert meta["sampling"]["temperature"] == 2 and str(folder) not in json.dumps(meta)

    table = "_target_: lengthwise.experiments.workloads.table.load, path: rows.jsonl, prompt: text"
    base = f"workload.base={{{table}, prompt_len: n, output_len: n, unit: words}}"
    node = ["workload=collected", "workload.path=a.parquet", base]
    code, out, said = done("train", "predictor=ridge", *node, "baselines=[constant]", "regret.num_requests=null", folder=folder)
    assert code == 0, said
    (report,) = (folder / "runs" / "train").rglob("report.json")
    found = json.loads(report.read_text())
    assert found["unit"] == "tiny-llama tokens" and found["num_rows"] == NUM and found["num_censored"] > 0
    ceiling = found["resample_ceiling"]
    assert ceiling["n"] == NUM - found["num_censored"] if ceiling["kendall_tau"] is not None else "needed" in ceiling["reason"]
    code, out, said = done(
        "run", *node[:2], "policy=srpt", "predictor=oracle", "num_requests=50", "wandb=off", "name=x", folder=folder
    )
    assert code == 0, said
    (summary,) = (folder / "runs" / "x").rglob("summary.json")
    assert json.loads(summary.read_text())["provenance"]["workload"]["unit"] == "tiny-llama tokens"


def test_whoever_is_asked_for_what_there_is_not_is_told(folder):
    for arguments, words in (
        (("workload.path=nowhere.jsonl",), "no file 'nowhere.jsonl'"),
        (("target=http://127.0.0.1:9",), "no answer from /v1/models"),
        (("executor=simulated",), "executor=native, or target=URL"),
        (("ask=estimate",), "has no tokenizer"),
        (("ask=estimates",), "Did you mean 'estimate'"),
        (("sample=3",), "sample: no such key. Did you mean 'samples'"),
    ):
        code, _, said = done("collect", *ASKED, *arguments, folder=folder)
        assert code == 1 and words in said and "Traceback" not in said, said
