"""Profile, validate and run on the real engine, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pandas as pd


def lengthwise(*arguments, folder):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "lengthwise.cli", *arguments], capture_output=True, text=True, cwd=folder, env=env
    )


def test_an_engine_is_profiled_validated_and_run(tmp_path):
    common = ["model=tiny", "num_requests=20", "policy=srpt", "predictor=oracle", "limits.max_num_seqs=8", "out=runs"]
    early = lengthwise("validate", *common, folder=tmp_path)
    assert early.returncode and "there is no profile profiles/tiny.yaml" in early.stderr and "loaded" not in early.stdout
    small = ["range.rows=8", "range.context_per_row=256", "range.prefill_tokens=512", "states=40", "passes=1", "repeats=2"]
    done = lengthwise("profile", "model=tiny", *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out states" in done.stdout and "hardware.path=profiles/tiny.yaml" in done.stdout
    done = lengthwise("validate", *common, "loads=[0.5]", "seeds=[0,1]", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ttft_p50" in done.stdout and "single steps" in done.stdout
    (found,) = (tmp_path / "runs" / "validate").iterdir()
    assert set(pd.read_csv(found / "validation.csv")["load"]) == {0.5}
    assert json.loads((found / "validation.json").read_text())["profile"]["profile"]["model"] == "tiny-llama"

    native = ["executor=native", *common, "hardware=profiled", "hardware.path=profiles/tiny.yaml", "wandb=off", "name=x"]
    done = lengthwise("run", *native, "workload=synthetic_short", "load=0.5", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (cell,) = (path for path in (tmp_path / "runs" / "x").iterdir() if path.is_dir())
    summary = json.loads((cell / "summary.json").read_text())
    assert summary["metrics"]["num_finished"] == 18 and summary["metrics"]["slowdown_mean"] > 0  # two warm the engine up
    assert any("simulated with the profile tiny" in mark for mark in summary["provenance"]["marks"])
    assert summary["cell"]["executor"] == "native" and summary["cell"]["load"] == 0.5
    again = lengthwise("run", *native, "workload=synthetic_short", "load=0.5", folder=tmp_path)
    assert again.returncode == 0 and "found: " in again.stdout


def test_a_probe_is_trained_read_on_the_engine_and_replayed(tmp_path):
    small = [
        "workload=synthetic_short",
        "num_requests=60",
        "layer=1",
        "every=4",
        "width=8",
        "bins.num=4",
        "executor.lengths=forced",
    ]
    done = lengthwise("probe", "model=tiny", *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "probes" / "tiny-synthetic_short"
    assert "probe, filtered" in done.stdout and "refine=replay" in done.stdout
    assert {"probe.json", "probe.npz", "traces.parquet"} <= {path.name for path in folder.iterdir()}

    common = ["policy=srpt", "predictor=constant", "workload=synthetic_short", "rate=20", "num_requests=30", "wandb=off"]
    native = [*common, "model=tiny", "executor=native", "refine=probe", f"refine.path={folder}", "name=read"]
    done = lengthwise("run", *native, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (summary,) = (json.loads(path.read_text()) for path in (tmp_path / "runs/read").rglob("summary.json"))
    assert summary["cell"]["refine"] == "probe" and summary["metrics"]["num_finished"] > 0
    assert any("the probe may have learned from these rows" in mark for mark in summary["provenance"]["marks"])

    refused = lengthwise("run", *common, "refine=probe", f"refine.path={folder}", "name=blind", folder=tmp_path)
    assert refused.returncode and "this executor gives none" in refused.stderr + refused.stdout
    wanting = lengthwise("run", *common, "refine=replay", "name=wanting", folder=tmp_path)
    assert wanting.returncode and "names no traces" in wanting.stderr + wanting.stdout
    short = lengthwise("probe", "model=tiny", "workload=synthetic_short", "num_requests=5", "layer=0", folder=tmp_path)
    assert short.returncode and "20 answers are needed" in short.stderr
