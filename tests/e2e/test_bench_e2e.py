"""`lengthwise bench` as a command: a cell on disk, a figure of it, a sweep, an interrupt; and the rate it is asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from client_laws import laws, rows
from fake_server import serving

import lengthwise
from lengthwise.experiments.load_runs import with_latencies
from lengthwise.experiments.remote_stage import RemoteStage
from lengthwise.experiments.run import Run


def command(*overrides, cwd):
    code = "import sys; from lengthwise.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, *overrides]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd)


def test_the_command_writes_a_cell_and_a_figure_is_drawn_from_it(tmp_path):
    with serving() as server:
        line = ["bench", f"target={server.url}/v1/", "workload=synthetic_short", "rate=300", "num_requests=60", "wandb=off",
                "arrivals=deterministic", "window.warm_up=0.5", "+executor.server.policy=srpt"]  # fmt: skip
        done = command(*line, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        again = command(*line, cwd=tmp_path)
    assert again.returncode == 1 and "nothing was sent" in again.stderr
    assert "lateness" in done.stdout and "by usage for 60 answers" in done.stdout and "note: measured over HTTP" in done.stdout
    study = tmp_path / "runs" / "bench"
    (cell,) = [path for path in study.iterdir() if path.is_dir()]
    names = {path.name for path in cell.iterdir()}
    assert names == {"requests.parquet", "steps.parquet", "preemptions.parquet", "tokens.parquet", "summary.json", ".hydra"}
    assert not list(study.glob("*.raw.jsonl"))
    run = Run.load(cell)
    laws(run)
    assert run.metrics["num_counted"] == 30
    stored = with_latencies(run.requests, run.summary["window"]["run_end"])
    counted = stored[stored["arrival"] >= run.summary["window"]["begin"]]
    assert run.metrics["ttft_p50"] == pytest.approx(np.quantile(counted["ttft"], 0.5))
    figure = command("figure", "figure=ecdf", "figure.latency=ttft", f"runs={study}", cwd=tmp_path)
    assert figure.returncode == 0, figure.stderr
    table = pd.read_csv(next(study.glob("*.csv")), comment="#")
    assert len(table)


def test_a_sweep_of_a_server_goes_on_where_it_was(tmp_path):
    with serving() as server:
        line = ["bench", "-m", f"target={server.url}", "workload=synthetic_short", "num_requests=20", "name=two", "wandb=off"]
        first = command(*line, "rate=200", "seed=0", cwd=tmp_path)
        second = command(*line, "rate=200", "seed=0,1", cwd=tmp_path)
        refused = command(*line, "rate=200", "policy=fcfs", cwd=tmp_path)
    assert first.returncode == 0 == second.returncode, first.stderr + second.stderr
    assert "2 cells, 1 of them complete" in second.stderr and len(server.bodies) == 40
    assert refused.returncode and "a remote server decides that" in refused.stderr


def test_a_stopped_run_leaves_no_cell_but_its_answers(tmp_path):
    code = f"""
import asyncio, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fake_server import serving, words
from lengthwise.cli import main
async def script(stream, body):
    if stream.number == 5:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    await words(stream, body)
with serving(script) as server:
    main(["bench", f"target={{server.url}}", "workload=synthetic_short", "rate=50", "num_requests=20", "wandb=off"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    (num,) = re.findall("stopped: ([0-9]+) of 20 requests have ended", done.stdout)
    (raw,) = (tmp_path / "runs" / "bench").glob("*.raw.jsonl")
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert len(lines) == int(num) >= 1 and all(line["reason"] == "length" for line in lines)
    assert all(line["arrival"] <= line["sent"] <= line["times"][0] <= line["ended"] for line in lines)
    assert not list((tmp_path / "runs").rglob("summary.json"))


@pytest.mark.slow
def test_two_hundred_a_second_are_two_hundred_a_second():  # A2
    here = Path(__file__).parents[1] / "fake_server.py"
    child = subprocess.Popen([sys.executable, str(here)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = child.stdout.readline().strip()
        data = rows(10_000, output_len=2)
        run = lengthwise.simulate(workload=data, executor=RemoteStage(url), arrivals="deterministic", rate=200.0,
                                  num_requests=10_000)  # fmt: skip
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait(20)
    laws(run)
    sent = run.requests["sent"].to_numpy()
    assert 199 <= (len(sent) - 1) / (sent.max() - sent.min()) <= 201 and 199 <= run.metrics["sent_rps"] <= 201
    assert (run.requests["status"] == "finished").all()
