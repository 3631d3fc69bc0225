"""`executor=served`: every arm of a comparison on its own live server, and simulated twins beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from client_laws import laws
from fake_service import byte_tokenizer

import lengthwise
from lengthwise.engine.native.tiny import tiny_model
from lengthwise.experiments.bench.child import child
from lengthwise.experiments.cellhash import files
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.load_runs import load_runs
from lengthwise.experiments.reshape import unseen
from lengthwise.experiments.run import Run
from lengthwise.experiments.saved import load_workload
from lengthwise.experiments.served_stage import ServedStage
from lengthwise.experiments.workloads.saved import load
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.ridge import Ridge
from lengthwise.sched.policies import FCFS

COMMAND = "import sys; from lengthwise.cli import main; sys.exit(main(sys.argv[1:]))"
TINY = ("model=hf", "limits=cpu32", "limits.max_model_len=512", "limits.kv_pool_tokens=8192", "wandb=off")


def command(*overrides, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", COMMAND, *overrides], capture_output=True, text=True, cwd=cwd, env=env)


def texts(n):
    """Prompts of n different kinds, so that none is a near-duplicate of another."""
    words = ["".join(chr(97 + int(letter)) for letter in str(i * 7919 + 10**6)) for i in range(n)]
    return [f"{word} {word[::-1]} tell me" for word in words]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(folder to run in, the kept workload of a run whose model decided how long answers are)."""
    root = tmp_path_factory.mktemp("served")
    tiny_model(vocab_size=257, max_positions=2048, eos_token_id=256).save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    frame = [{"p": 30, "o": 10, "text": text} for text in texts(60)]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in frame))
    done = command(
        "run", *TINY, "model.source=model", "name=recorded", "executor=native", "executor.lengths=free",
        "executor.sampling={temperature: 1.0}", "executor.attention=torch", "workload=table", "workload.path=texts.jsonl",
        "workload.prompt_len=p", "workload.output_len=o", "workload.prompt=text", "workload.unit=words",
        "workload.max_new_tokens=150", "num_requests=60", "load=null", "rate=200", "keep_workload=true", cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (kept,) = (root / "runs" / "recorded").glob("*/workload")
    return root, kept


def test_answers_of_a_free_run_are_the_lengths_of_the_next(recorded):
    _, kept = recorded
    run, dataset = Run.load(kept.parent), load(str(kept), answered=True)
    assert dataset.output_len.tolist() == run.requests["output_len"].tolist()
    assert len(set(dataset.output_len.tolist())) > 5 and dataset.output_len.max() <= 150
    assert dataset.censored.tolist() == (run.requests["reason"] == "length").tolist() and dataset.censored.any()
    assert dataset.prompts == load_workload(kept).prompts
    stripped = kept.parent.parent / "alone" / "workload"
    stripped.mkdir(parents=True)
    for file in kept.iterdir():
        (stripped / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"holds no requests\.parquet"):
        load(str(stripped), answered=True)
    load(str(stripped))


def test_the_study_runs_every_arm_served_and_simulated(recorded):
    root, kept = recorded
    profiled = command(
        "profile", "model=hf", "model.source=model", "range={rows: 32, context_per_row: 128}",
        "states=30", "passes=1", "repeats=1", "out=profile.yaml", cwd=root,
    )  # fmt: skip
    assert profiled.returncode == 0, profiled.stdout + profiled.stderr
    learn(texts(160)[60:], root / "artefact")
    line = [
        "run", "-m", "study=served", *TINY, "model.source=model", "hardware.path=profile.yaml", f"workload.path={kept}",
        "artefact=artefact", "num_requests=40", "load=0.9", "seed=0", "saturation=20", "engine.compiled=false",
    ]  # fmt: skip
    done = command(*line, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    again = command(*line, cwd=root)
    assert "8 cells, 8 of them complete" in again.stderr
    runs = load_runs(root / "runs" / "served")
    served = runs[runs["executor"] == "served"].set_index(["policy", "predictor"])
    twins = runs[runs["executor"] != "served"].set_index(["policy", "predictor"])
    arms = [("fcfs", "none"), ("srpt", "constant"), ("srpt", "transferred"), ("srpt", "oracle")]
    assert set(served.index) == set(twins.index) == set(arms) and (runs["status"] == "ok").all()
    assert (runs["rate"] == 18.0).all()
    asked = [Run.load(folder).requests.head(40) for folder in runs["folder"]]
    for requests in asked:  # the same requests at the same times, with answers of the same length, in every arm
        assert (requests["status"] == "finished").all()
        for column in ("row", "arrival", "prompt_len", "output_len"):
            assert requests[column].tolist() == asked[0][column].tolist(), column
    for arm in arms:
        run = Run.load(served.loc[arm, "folder"])
        laws(run)
        provenance = run.summary["provenance"]
        assert provenance["server"]["stated"]["policy"] == arm[0] and provenance["kv_pool_tokens"] == 8192
        assert provenance["engine"]["compiled"] is False and not any("another engine" in mark for mark in provenance["marks"])
        assert (run.requests["prompt_count"] == run.requests["prompt_len"]).all()
    predicted = Run.load(served.loc[("srpt", "oracle"), "folder"]).requests["predicted"]
    assert predicted.head(40).tolist() == asked[0]["output_len"].tolist()


def learn(prompts, folder):
    """An artefact that has learned from these prompts, in a unit of its own."""
    rng, n = np.random.default_rng(0), len(prompts)
    predictor = Ridge()
    predictor.fit(Prompts(np.full(n, 20.0), prompts), rng.integers(2, 60, n).astype(float), np.zeros(n, dtype=bool))
    predictor.mark_seen(prompts)
    predictor.unit = "other tokens"
    predictor.save(folder)


def test_answers_of_no_model_are_refused(recorded):
    root, kept = recorded
    done = command("run", "name=forced", "num_requests=10", "load=0.5", "keep_workload=true", "wandb=off", cwd=root)
    assert done.returncode == 0, done.stderr
    (forced,) = (root / "runs" / "forced").glob("*/workload")
    with pytest.raises(ValueError, match="its lengths are simulated, not free"):
        load(str(forced), answered=True)
    hashes = files({"path": str(kept), "answered": True})
    results = kept.parent / "requests.parquet"
    before = results.read_bytes()
    results.write_bytes(before + b"changed")
    assert files({"path": str(kept), "answered": True}) != hashes
    results.write_bytes(before)


def test_an_engine_that_fails_leaves_no_cell(recorded, monkeypatch):
    root, kept = recorded
    (root / "failing.py").write_text("""
from lengthwise.engine.native.loading import load_model
def load(source, **options):
    model = load_model(source, **options)
    forward, calls = model.forward, []
    def fails(*args, **options):
        calls.append(1)
        if len(calls) > 260:
            raise RuntimeError("the card is on fire")
        return forward(*args, **options)
    object.__setattr__(model, "forward", fails)
    return model
""")
    monkeypatch.setenv("PYTHONPATH", str(root))
    line = ["run", *TINY, "name=failing", "executor=served", "+engine={attention: torch}", "workload=saved",
            f"workload.path={kept}", "workload.answered=true", "num_requests=40", "rate=20"]  # fmt: skip
    done = command(*line, "model._target_=failing.load", "model.source=model", cwd=root)
    assert done.returncode == 1 and "the engine failed while it served" in done.stderr, done.stderr
    assert not list((root / "runs" / "failing").rglob("summary.json"))


def test_an_artefact_is_asked_only_what_it_has_not_learned(recorded, tmp_path):
    _, kept = recorded
    dataset = load(str(kept), answered=True)
    learn(dataset.prompts[:40], tmp_path / "knows")
    rest = unseen(dataset, artefact=str(tmp_path / "knows"))
    assert rest.prompts == dataset.prompts[40:] and rest.notes["unseen"] == {"num_rows": 20, "of": 60}
    node = {"_target_": "lengthwise.predictors.artefact.load", "path": str(tmp_path / "knows"), "transfer": True}
    with pytest.raises(ValueError, match="learned from 40 of the 60 prompts"):  # before any server is started
        lengthwise.simulate("srpt", node, dataset, executor=ServedStage({}), num_requests=10, rate=1.0)
    learn(dataset.prompts, tmp_path / "all")
    with pytest.raises(ValueError, match="has learned from every prompt"):
        unseen(dataset, artefact=str(tmp_path / "all"))
    with pytest.raises(ValueError, match="no prompts"):
        unseen(Dataset("d", np.array([1]), np.array([1]), "t", "s", "l"), artefact=str(tmp_path / "all"))


@pytest.mark.parametrize(
    ("stage", "options", "says"),
    [
        ({"lengths": "forced"}, {}, "would tell the scheduler"),
        ({}, {"hardware": "llama31_8b_h100"}, "hardware=null, or the engine's profile"),
        ({"settings": {"drain": -1.0}}, {}, "server.drain=-1.0"),
        ({"settings": {"port": 80}}, {}, "executor.settings.port=80"),
        ({}, {"clip": True}, "limits.clip=true"),
        ({}, {"policy": "srpt", "predictor": "ridge"}, "predictor=ridge has learned nothing"),
        ({}, {"policy": FCFS()}, "policy is a FCFS: what another process"),
        ({}, {"policy": "srpt", "predictor": Constant()}, "predictor is a Constant: what another process"),
        ({"lengths": "free"}, {"predictor": "oracle"}, "no oracle can know"),
        ({}, {"policy": "none_such"}, "none_such"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_server_starts(stage, options, says):
    data = Dataset("d", np.array([3]), np.array([2]), "t", "s", "l", prompts=["a b c"])
    options = {"policy": "fcfs", "arrivals": "deterministic", "rate": 1.0, "num_requests": 1, **options}
    with pytest.raises(ValueError, match=says):
        lengthwise.simulate(workload=data, executor=ServedStage({}, **stage), **options)


def test_a_learned_arm_of_which_nothing_was_predicted_is_no_cell(recorded, monkeypatch):
    root, kept = recorded
    learn(texts(160)[60:], root / "artefact")
    (root / "blind.py").write_text("""
from lengthwise.predictors import artefact
def load(path, transfer):
    made, calls = artefact.load(path, transfer=transfer), []
    def predict(requests, predict=made.predict):
        calls.append(1)
        if len(calls) > 1:  # the server tries it when it starts
            raise RuntimeError("I see nothing")
        return predict(requests)
    made.predict = predict
    return made
""")
    monkeypatch.setenv("PYTHONPATH", str(root))
    done = command(
        "run", *TINY, "model.source=model", "name=blind", "executor=served", "+engine={attention: torch}",
        "workload=saved", f"workload.path={kept}", "workload.answered=true", "policy=srpt", "predictor=transferred",
        "predictor._target_=blind.load", "artefact=artefact", "num_requests=20", "rate=20", cwd=root,
    )  # fmt: skip
    assert done.returncode == 1
    assert "a constant stood in for 20 of 20 predictions (raised 20): nothing was predicted" in done.stderr, done.stderr


def test_a_server_that_does_not_come_up_says_why():
    broken = {"server": {"_target_": "no_such_module.X"}}
    with pytest.raises(ValueError, match=r"did not start: .*no_such_module"), child(broken):
        raise AssertionError("it has no URL")


def lives(pid):
    """Whether the process is there and has not ended: nobody may have asked how."""
    try:
        return re.search(r"^State:\s+(\S)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_leaves_with_its_parent(recorded):
    """However the parent ends: nothing is told, its pipe just closes."""
    root, _ = recorded
    code = f"""
import time
from lengthwise.experiments import served_stage as s
from contextlib import contextmanager
pids = []
@contextmanager
def noted(cfg, child=s.child):
    with child(cfg) as made:
        pids.append(made.pid)
        yield made
s.child = noted
model = {{"_target_": "lengthwise.engine.native.loading.load_model", "source": {str(root / "model")!r}}}
cfg = {{**s.FIRST_COME, "predictor": None, "limits": {{"max_num_seqs": 4, "token_budget": 64, "max_model_len": 256,
       "kv_pool_tokens": 2048}}}}
with s.ServedStage(model, engine={{"attention": "torch"}})._server(cfg, 10) as client:
    print(client.target, pids[0], flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    url, pid = parent.stdout.readline().split()
    assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+", url)
    assert lives(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(1500):
        if not lives(pid):
            return
        time.sleep(0.02)
    os.kill(int(pid), signal.SIGKILL)
    raise AssertionError("the server has outlived its parent")
