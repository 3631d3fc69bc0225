"""Reshaping keeps rows joined, says what it changed, and never lets parts meet that are not the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lengthwise
from lengthwise.experiments.arrivals.burst import Burst
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.arrivals.replay import Replay
from lengthwise.experiments.contract import request_fields
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.draw import draw
from lengthwise.experiments.prefixes import Shared, conversation
from lengthwise.experiments.reshape import between, clip, head, merge, scale, split, take


def data(prompt: Any, output: Any, **more: Any) -> Dataset:
    return Dataset("d", np.asarray(prompt), np.asarray(output), "t", "s", "l", **more)


def test_clip_never_takes_a_prompt_below_one() -> None:
    """T8: a row (100, 5000) under a cap of 4,096 keeps prompt >= 1, output >= 1 and their sum <= 4,096."""
    made = clip(data([100, 5000, 30], [5000, 10, 20]), max_total=4096)
    assert made.prompt_len.tolist() == [1, 4086, 30] and made.output_len.tolist() == [4095, 10, 20]
    assert made.notes["clip"]["num_prompts_changed"] == 2 and made.notes["clip"]["prompts_changed"] == [0, 1]
    assert made.notes["clip"]["num_outputs_changed"] == 1 and made.notes["clip"]["outputs_changed"] == [0]
    assert made.censored is not None and made.censored.tolist() == [True, False, False]  # a cut answer is no label


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999)), min_size=1, max_size=20), st.integers(2, 5000))
def test_clip_holds_its_limit_and_changes_only_what_is_over(rows: list[tuple[int, int]], limit: int) -> None:
    before = data(*zip(*rows, strict=True))
    after = clip(before, max_total=limit)
    assert (after.prompt_len >= 1).all() and (after.output_len >= 1).all()
    assert (after.prompt_len + after.output_len <= limit).all()
    over = before.prompt_len + before.output_len > limit
    changed = (after.prompt_len != before.prompt_len) | (after.output_len != before.output_len)
    assert np.array_equal(over, changed)


def test_resampled_rows_keep_prompt_and_output_together() -> None:
    """T9: 1,000 rows with output = 2 x prompt; the rank correlation of what is drawn is 1, one seed gives one draw."""
    prompt = np.random.default_rng(0).permutation(np.arange(1, 1001))
    load = draw(data(prompt, 2 * prompt), Poisson(), 3000, 1.0, 5, resample=True)
    assert np.array_equal(load.output_len, 2 * load.prompt_len)
    again, other = (draw(data(prompt, 2 * prompt), Poisson(), 3000, 1.0, seed, resample=True) for seed in (5, 6))
    assert again.rows.tobytes() == load.rows.tobytes() and other.rows.tobytes() != load.rows.tobytes()


def test_take_carries_everything() -> None:
    full = data(
        [16, 32, 48], [1, 2, 3], censored=np.array([True, False, False]), group=np.array([0, 1, 1]), prompts=["a", "b", "c"],
        arrival=np.array([0.0, 1.5, 4.0]), columns={"client": np.array(["x", "y", "z"], dtype=object)},
        block_hashes=[[1], [1, 2], [1, 2, 3]], hash_tokens=16, samples=np.array([[1, 1], [2, 2], [3, 4]]),
    )  # fmt: skip
    made = take(full, np.array([False, True, True]))
    assert made.prompt_len.tolist() == [32, 48] and made.prompts == ["b", "c"] and made.arrival is not None
    assert made.arrival.tolist() == [0.0, 2.5] and made.columns["client"].tolist() == ["y", "z"]
    assert made.block_hashes == [[1, 2], [1, 2, 3]] and made.samples is not None and made.samples.tolist() == [[2, 2], [3, 4]]
    assert head(full, num_rows=1).notes["head"] == {"num_rows": 1, "of": 3}
    cut = between(full, start=1.0, end=3.0)
    assert len(cut) == 1 and cut.notes["between"]["num_rows"] == 1
    with pytest.raises(ValueError, match="num_rows 4 must be from 1 to the 3"):
        head(full, num_rows=4)
    with pytest.raises(ValueError, match=r"no row of d arrives in \[9"):
        between(full, start=9, end=10)


def test_answers_before_go_with_their_rows_and_with_lengths_that_are_kept() -> None:
    turns = data([16, 32, 48], [1, 9, 3], answers_before=[[], [1], [1, 9]])
    assert take(turns, [2, 0]).answers_before == [[1, 9], []]
    assert merge([turns, turns]).answers_before == [[], [1], [1, 9]] * 2
    assert clip(turns, max_prompt_len=40).answers_before == turns.answers_before
    assert clip(turns, max_output_len=5).answers_before is None and scale(turns, output=0.5).answers_before is None
    with pytest.raises(ValueError, match="only some parts have answers_before"):
        merge([turns, data([1], [1])])


def test_clipped_prompts_keep_only_whole_pieces() -> None:
    made = clip(data([48, 40], [5, 5], block_hashes=[[1, 2, 3], [1, 2, 9]], hash_tokens=16), max_prompt_len=40)
    assert made.block_hashes == [[1, 2], [1, 2, 9]]


def test_scale_says_what_it_did_and_refuses_shared_prefixes() -> None:
    made = scale(data([10, 1], [7, 100]), prompt=0.3, output=2.0)
    assert made.prompt_len.tolist() == [3, 1] and made.output_len.tolist() == [14, 200]
    assert made.notes["scale"] == {"prompt": 0.3, "output": 2.0, "num_raised_to_1": 1}
    half = scale(data([1, 2, 3], [4, 4, 4]), prompt=0.5)
    assert half.prompt_len.tolist() == [1, 1, 2] and half.notes["scale"]["num_raised_to_1"] == 1  # 0.5 is rounded to 0
    with pytest.raises(ValueError, match="prefix hashes"):
        scale(data([16], [1], block_hashes=[[1]], hash_tokens=16), prompt=2.0)
    with pytest.raises(ValueError, match="output=0"):
        scale(data([16], [1]), output=0)


def test_a_reshaped_conversation_never_finds_what_was_not_said() -> None:
    """What follows a clipped prompt is not what the conversation has there; a longer answer would be taken for a question."""
    talk = data([64, 160], [48, 16], block_hashes=[conversation(0), conversation(0)], hash_tokens=16,
                columns={"session": np.array(["a", "a"]), "turn": np.array([0, 1])})  # fmt: skip
    made = clip(talk, max_total=96)  # (48, 48), then (80, 16): 32 of the 80 would be the answer
    assert made.prompt_len.tolist() == [48, 80] and made.block_hashes is not None
    assert [list(names) for names in made.block_hashes] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    run = lengthwise.simulate(workload=made, arrivals="sessions", kv="prefix", rate=1.0, num_requests=2, check=True)
    assert run.requests["cached"].tolist() == [0, 48]
    assert scale(talk, output=0.5).block_hashes == talk.block_hashes
    with pytest.raises(ValueError, match="hold its answers, so these cannot grow by 2"):
        scale(talk, output=2.0)


def test_sessions_without_groups_are_not_split() -> None:
    session = np.repeat(np.arange(40), 5)
    parts = split(data(np.arange(1, 201), np.arange(1, 201), columns={"session": session}), shares=[0.5, 0.5])
    assert [len(part) for part in parts] == [100, 100]
    assert not set(parts[0].columns["session"]) & set(parts[1].columns["session"])


def test_rows_of_a_saved_workload_wait_for_the_same_ones_wherever_they_are() -> None:
    after = np.array([-1, -1, 0, 1, 2])
    saved = data([1, 2, 3, 4, 5], [1] * 5, arrival=np.array([0.0, 1.0, 2.0, 3.0, 4.0]), notes={"saved": True},
                 columns={"after": after, "gap": np.array([0.0, 0.0, 2.0, 2.0, 2.0])})  # fmt: skip
    made = take(saved, [0, 2, 3, 4])  # row 1 is gone, so row 3 waits for nobody
    assert made.columns["after"].tolist() == [-1, 0, -1, 1] and made.notes["num_predecessors_left_out"] == 1
    load = draw(made, Replay(), None, None, 0)
    assert load.after is not None and load.after.tolist() == [-1, 0, -1, 1] and load.arrival.tolist() == [0.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="requests of a wait for answers"):
        merge({"a": saved, "b": saved})
    with pytest.raises(ValueError, match="requests of loop wait for answers"):
        merge({"plain": data([1], [1]), "loop": data([1], [1], notes={"users": 4})})


def test_merged_columns_keep_their_kinds() -> None:
    a = data([1, 2], [1, 1], columns={"class": np.array(["x", "y"]), "priority": np.array([1, 2])})
    b = data([3], [1], columns={"max_new_tokens": np.array([7])})
    made = merge({"a": a, "b": b})
    assert made.columns["class"].tolist()[:2] == ["x", "y"] and made.columns["class"][2] != "nan"
    assert made.columns["max_new_tokens"].tolist() == [2048, 2048, 7] and made.columns["priority"][:2].tolist() == [1.0, 2.0]
    requests = request_fields(draw(made, Burst(), None, None, 0))
    assert sorted(r["max_new_tokens"] for r in requests) == [7, 2048, 2048]


def test_split_keeps_groups_whole_and_loses_no_row() -> None:
    group = np.repeat(np.arange(60), 5)
    whole = data(np.arange(1, 301), np.arange(1, 301), group=group)
    parts = split(whole, shares=[0.5, 0.3, 0.2], seed=1)
    assert sorted(np.concatenate([p.prompt_len for p in parts]).tolist()) == list(range(1, 301))
    groups = [set(p.group.tolist()) for p in parts if p.group is not None]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    assert [len(p) for p in parts] == [150, 90, 60]
    assert [len(p) for p in split(whole, shares=[0.5, 0.3, 0.2], seed=1)] == [150, 90, 60]
    with pytest.raises(ValueError, match="add up to 1"):
        split(whole, shares=[0.5, 0.4])


def test_merged_parts_never_share_names() -> None:
    a = data([16, 32], [1, 2], arrival=np.array([0.0, 2.0]), columns={"client": np.array(["u", "v"], dtype=object)},
             group=np.array([0, 0]), block_hashes=[[5], [5, 6]], hash_tokens=16)  # fmt: skip
    b = data([48], [3], arrival=np.array([0.0]), block_hashes=[conversation(0)], hash_tokens=16)
    made = merge({"a": a, "b": b})
    assert made.arrival is not None and made.arrival.tolist() == [0.0, 0.0, 2.0] and made.prompt_len.tolist() == [16, 48, 32]
    assert made.columns["part"].tolist() == ["a", "b", "a"] and made.columns["client"].tolist() == ["a/u", None, "a/v"]
    assert made.group is not None and made.group[0] == made.group[2] != made.group[1]
    assert made.block_hashes is not None and list(made.block_hashes[2]) == [5, 6] and made.block_hashes[1][0] > 6
    with pytest.raises(ValueError, match="differ in unit"):
        merge([a, Dataset("c", np.array([1]), np.array([1]), "words", "s", "l")])
    with pytest.raises(ValueError, match="only some parts have arrival"):
        merge([a, data([1], [1], hash_tokens=16)])


def test_a_reshape_node_changes_what_a_cell_sees() -> None:
    node = {"_target_": "lengthwise.experiments.reshape.clip", "_partial_": True, "max_total": 120}
    run = lengthwise.simulate(reshape=node, num_requests=200, load=0.5)
    assert (run.requests["prompt_len"] + run.requests["output_len"]).max() <= 120
    assert run.summary["provenance"]["workload"]["clip"]["num_outputs_changed"] > 0
    assert run.summary["metrics"]["num_censored"] > 0


def test_shared_names() -> None:
    names = Shared(range(0, 100), 3, range(1000, 1100))
    assert list(names[:5]) == [0, 1, 2, 1003, 1004] and names[1] == 1 and names[4] == 1004 and list(names[1:3]) == [1, 2]
    assert list(names[4:6]) == [1004, 1005] and isinstance(names[4:6], range)
