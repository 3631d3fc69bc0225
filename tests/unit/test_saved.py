"""A saved workload is the same workload: lengths, times, sessions, prefixes, units; and so is its run (T5)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lengthwise
from lengthwise.experiments.arrivals.closed_loop import ClosedLoop
from lengthwise.experiments.arrivals.pause import Pause
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.arrivals.replay import Replay
from lengthwise.experiments.arrivals.sessions import Sessions
from lengthwise.experiments.contract import request_fields
from lengthwise.experiments.dataset import Dataset, Workload
from lengthwise.experiments.draw import draw
from lengthwise.experiments.population import Population
from lengthwise.experiments.prefixes import SPAN, Shared, conversation
from lengthwise.experiments.run import Run
from lengthwise.experiments.saved import load_workload, save_workload
from lengthwise.experiments.workloads.conversations import load as conversations
from lengthwise.experiments.workloads.lengths import Constant, Exponential

WHO = Population(clients={"a": 0.5, "b": 0.5}, classes={"chat": {"share": 1.0, "ttft": 1.0}})


def chats() -> Dataset:
    return conversations(
        num_sessions=60, turns=Exponential(4), new_len=Exponential(50), output_len=Exponential(80), system_len=100, num_groups=2
    )


def plain() -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(
        "d", rng.integers(1, 99, 200), rng.integers(1, 99, 200), "test tokens", "s", "l", prompts=[f"p{i}" for i in range(200)],
        censored=rng.random(200) < 0.1, group=rng.integers(0, 50, 200), max_new_tokens=300,
        block_hashes=[[int(x) for x in rng.integers(0, 9, 3)] for _ in range(200)], hash_tokens=16, dropped={"rows_bad": 3},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "arrivals", "rate"),
    [
        (plain(), Poisson(), 5.0),
        (plain(), ClosedLoop(4, Pause(0.5)), None),
        (chats(), Sessions(think=Pause(2.0)), 5.0),
        (chats(), Poisson(), 5.0),
    ],
    ids=["open", "closed loop", "sessions", "endless names"],
)
def test_everything_comes_back(dataset: Dataset, arrivals: Any, rate: float | None, tmp_path: Path) -> None:
    load = draw(dataset, arrivals, 100, rate, 3, population=WHO)
    save_workload(load, tmp_path / "w")
    back = draw(load_workload(tmp_path / "w"), Replay(), None, None, 0)
    assert request_fields_of(back) == request_fields_of(load)
    assert back.output_len.tolist() == load.output_len.tolist() and back.users == load.users
    assert (back.dataset.unit, back.dataset.hash_tokens, dict(back.dataset.dropped)) == (
        dataset.unit, dataset.hash_tokens, dict(dataset.dropped),
    )  # fmt: skip
    for name in ("after", "gap"):
        a, b = getattr(load, name), getattr(back, name)
        assert (a is None and b is None) or a.tolist() == b.tolist()
    if dataset.censored is not None:
        assert back.dataset.censored is not None and np.array_equal(back.dataset.censored, dataset.censored[load.rows])
    save_workload(back, tmp_path / "again")
    assert (tmp_path / "w/requests.parquet").stat().st_size > 0
    assert request_fields_of(draw(load_workload(tmp_path / "again"), Replay(), None, None, 0)) == request_fields_of(load)


@pytest.mark.parametrize("arrivals", [Sessions(think=Pause(2.0)), ClosedLoop(4, Pause(0.5))], ids=["sessions", "closed loop"])
def test_a_saved_workload_drawn_anew_forgets_who_waited_for_whom(arrivals: Any, tmp_path: Path) -> None:
    save_workload(draw(chats(), arrivals, 60, None if arrivals.keeps_times else 5.0, 0), tmp_path / "first")
    anew = draw(load_workload(tmp_path / "first"), Poisson(), 60, 5.0, 1)
    save_workload(anew, tmp_path / "second")
    back = draw(load_workload(tmp_path / "second"), Replay(), None, None, 0)
    assert back.is_open and back.arrival.tolist() == anew.arrival.tolist()
    assert request_fields_of(back) == request_fields_of(anew)


def test_samples_and_names_of_several_kinds_come_back(tmp_path: Path) -> None:
    own = [(1, 2), conversation(3), Shared(range(0, SPAN), 1, range(SPAN, 2 * SPAN))]
    data = Dataset("d", np.full(3, 32), np.array([1, 2, 3]), "t", "s", "l", block_hashes=own, hash_tokens=16,
                   samples=np.arange(1, 7).reshape(3, 2), answers_before=[[], [4], [4, 5]])  # fmt: skip
    load = draw(data, Poisson(), 3, 1.0, 0)
    save_workload(load, tmp_path)
    back = load_workload(tmp_path)
    assert back.block_hashes is not None and back.samples is not None
    for i, row in enumerate(load.rows.tolist()):
        assert type(back.block_hashes[i]) is (list if row == 0 else type(own[row]))
        assert list(back.block_hashes[i][:2]) == list(own[row][:2])
    assert back.samples.tolist() == [[2 * row + 1, 2 * row + 2] for row in load.rows.tolist()]
    assert back.answers_before == [[4, 5][:row] for row in load.rows.tolist()]
    assert [field["answers_before"] for field in request_fields(load)] == back.answers_before


def request_fields_of(load: Workload) -> list[dict[str, Any]]:
    """Request fields, prefix names written out for as long as the prompt is."""
    opened = Workload(load.dataset, load.rows, load.arrival, load.notes, load.columns)
    fields = request_fields(opened)
    for field in fields:
        if field["block_hashes"] is not None:
            field["block_hashes"] = [int(x) for x in field["block_hashes"][: field["prompt_len"] // 16 + 3]]
    return fields


@pytest.mark.parametrize("arrivals", [{"arrivals": "sessions", "load": 0.7}, {"arrivals": "closed_loop"}])
def test_a_kept_run_replays_to_the_same_run(arrivals: dict[str, Any], tmp_path: Path) -> None:
    run = lengthwise.simulate(workload=chats(), num_requests=120, **arrivals)
    assert run.workload is not None
    save_workload(run.workload, tmp_path)
    again = lengthwise.simulate(workload=load_workload(tmp_path), arrivals="replay", num_requests=120)
    same = ["arrival", "first_token", "finish", "prompt_len", "output_len", "session", "turn"]
    assert run.requests[same].equals(again.requests[same])


def test_t5_a_replay_finds_the_same_prefixes_cached(tmp_path: Path) -> None:
    """T5: 8 requests of one group share 1,024 tokens (block 16) and have 64 of their own; one after another 7 x 1,024 hit."""
    names = [Shared(range(0, SPAN), 64, range((i + 1) * SPAN, (i + 2) * SPAN)) for i in range(8)]
    dataset = Dataset("t5", np.full(8, 1088), np.full(8, 4), "t", "s", "l", block_hashes=names, hash_tokens=16)
    run = lengthwise.simulate(workload=dataset, arrivals="deterministic", rate=0.5, num_requests=8, kv="prefix")
    assert run.requests["cached"].tolist() == [0] + [1024] * 7
    assert run.metrics["prefix_hit_tokens"] == 7 * 1024 and run.metrics["prefix_hit_share"] == 7 * 1024 / (8 * 1088)
    assert run.workload is not None
    save_workload(run.workload, tmp_path)
    again = lengthwise.simulate(workload=load_workload(tmp_path), arrivals="replay", num_requests=8, kv="prefix")
    assert again.requests["cached"].tolist() == run.requests["cached"].tolist()
    assert again.requests["finish"].tolist() == run.requests["finish"].tolist()
    without = lengthwise.simulate(workload=dataset, arrivals="deterministic", rate=0.5, num_requests=8)
    assert "cached" not in without.requests and without.metrics["prefix_hit_share"] == 0.0
    assert without.metrics["ttft_mean"] > run.metrics["ttft_mean"]  # type: ignore[operator]


@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
def test_turns_find_what_was_said_before(policy: str) -> None:
    """With room for everything, a turn computes only what is new: the question and the unfinished pieces at the border."""
    data = conversations(
        num_sessions=30, turns=Constant(4), new_len=Constant(64), output_len=Exponential(80), system_len=160, num_groups=1
    )
    run = lengthwise.simulate(
        policy=policy, predictor="constant" if policy == "srpt" else "none", workload=data, arrivals="sessions", load=0.3,
        num_requests=120, kv="prefix", check=True,
    )  # fmt: skip
    requests = run.requests.sort_values(["session", "turn"])
    before = requests.groupby("session")[["prompt_len", "output_len"]].shift()
    later = requests["turn"] > 0
    held = (before["prompt_len"] + before["output_len"] - 1)[later]  # the last token's KV is never computed
    assert (requests["cached"][later] == held // 16 * 16).all()
    assert (requests["cached"] < requests["prompt_len"]).all()
    assert (requests["cached"][~later].isin([0, 160])).all() and (requests["cached"][~later] == 160).any()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"requests\.parquet is missing"):
        load_workload(tmp_path)
    load = draw(chats(), Sessions(), 50, 5.0, 0)
    save_workload(load, tmp_path)
    with pytest.raises(ValueError, match="they cannot be sped up"):
        draw(load_workload(tmp_path), Replay(speedup=2.0), None, None, 0)


def test_t5_what_a_command_keeps_another_replays(tmp_path: Path) -> None:
    """T5, from the command line: run with keep_workload, then replay the folder; the same tokens are found cached."""

    def run(*overrides: str) -> Run:
        args = ["run", *overrides, "kv=prefix", "num_requests=60", f"out={tmp_path}"]
        call = f"import sys; from lengthwise.cli import main; sys.exit(main({args!r}))"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return Run.load(done.stdout.split("written: ")[1].splitlines()[0])

    talk = ("workload=conversations", "workload.num_sessions=50", "population=impatient")
    first = run(*talk, "arrivals=sessions", "load=0.5", "keep_workload=true")
    kept = next(tmp_path.glob("adhoc/*/workload"))
    again = run("workload=saved", f"workload.path={kept}", "arrivals=replay", "load=null")
    for name in ("arrival", "cached", "ended", "output_len", "session", "turn"):
        assert again.requests[name].tolist() == first.requests[name].tolist(), name
    assert first.requests["cached"].sum() > 0
