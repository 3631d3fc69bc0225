"""Trace loaders on hand-made rows: units, ties, censoring, failures, prefixes, sessions; and what is refused, by row."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lengthwise.experiments.arrivals.replay import Replay
from lengthwise.experiments.contract import check_workload
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.draw import draw
from lengthwise.experiments.trace_summary import prefix_hits, summarise, summary_frame
from lengthwise.experiments.workloads import (
    arena_hard,
    azure,
    bailian,
    burstgpt,
    castillo,
    gsm8k,
    lmcache,
    mooncake,
    sharegpt_turns,
    vidur_lengths,
)

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def text(folder: Path, content: str, name: str = "trace.csv") -> str:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_bytes(content.encode())
    return str(path)


def lines(folder: Path, rows: list[dict[str, Any]], name: str = "trace.jsonl") -> str:
    return text(folder, "".join(json.dumps(row) + "\n" for row in rows), name)


def arrivals(data: Dataset) -> list[float]:
    assert data.arrival is not None
    return data.arrival.tolist()


# --- Azure ------------------------------------------------------------------------------------------------------------

ROWS_2023 = (
    "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319601,3180,8\r\n2023-11-16 18:17:05.0000000,110,27\r\n"
)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_azure_2023_seven_digits_and_crlf(tmp_path: Path, name: str) -> None:
    data = azure.load("azure_code", text(tmp_path, HEAD + ROWS_2023, name))
    assert arrivals(data) == [0.0, 0.0520001, 1.02004]
    assert data.prompt_len.tolist() == [4808, 3180, 110] and data.output_len.tolist() == [10, 8, 27]
    assert data.notes["arrival_offset"] == "2023-11-16T18:17:03.979960" and data.censored is None
    assert str(tmp_path) not in data.source and "CC-BY" in data.licence


def test_azure_2024_zones_and_times_on_the_second(tmp_path: Path) -> None:
    """A time on the whole second is written without a fraction there, among others that have one."""
    rows = "2024-05-12 00:00:00.001163+00:00,76,15\n2024-05-12 00:00:01+00:00,2399,6\n2024-05-12 00:00:00.501163+00:00,5,1\n"
    data = azure.load("azure2024_code", text(tmp_path, HEAD.replace("\r", "") + rows))
    assert arrivals(data) == pytest.approx([0.0, 0.5, 0.998837], abs=1e-9)
    assert data.prompt_len.tolist() == [76, 5, 2399] and data.notes["num_out_of_order"] == 1


def test_p3_outputs_at_the_limit_are_censored(tmp_path: Path) -> None:
    """P3: 10 rows, three of them cut at 1,000; they are marked, and a limit that rows exceed is no limit."""
    outputs = [12, 1000, 700, 1000, 3, 999, 1000, 50, 60, 70]
    rows = "".join(f"2023-11-16 18:00:{i:02d}.0000000,5,{n}\r\n" for i, n in enumerate(outputs))
    file = text(tmp_path, HEAD + rows)
    data = azure.load("azure_conv", file, max_output=1000)
    assert data.censored is not None and np.flatnonzero(data.censored).tolist() == [1, 3, 6]
    assert data.notes["censored"] == 3 and len(data) == 10  # P2: none is left out
    assert azure.load("azure_conv", file).censored is None
    with pytest.raises(ValueError, match="4 outputs are longer than max_output=700, the longest 1000"):
        azure.load("azure_conv", file, max_output=700)


def test_azure_refuses_by_row_and_value(tmp_path: Path) -> None:
    bad = text(tmp_path, HEAD + ROWS_2023 + "yesterday,5,5\r\n")
    with pytest.raises(ValueError, match="TIMESTAMP of row 3 is 'yesterday'"):  # T12 b
        azure.load("azure_code", bad)
    zero = text(tmp_path, HEAD + ROWS_2023 + "2023-11-16 18:18:00.0000000,5,0\r\n", "zero.csv")
    with pytest.raises(ValueError, match="1 rows with zero GeneratedTokens, the first is row 3"):
        azure.load("azure_code", zero)
    assert azure.load("azure_code", zero, zero_len="drop").dropped == {"rows_zero_GeneratedTokens": 1}
    with pytest.raises(ValueError, match="trace 'azure_chat' is not one of azure_code"):
        azure.load("azure_chat", bad)
    with pytest.raises(ValueError, match=r"no column 'ContextTokens'; it has TIMESTAMP, In"):
        azure.load("azure_code", text(tmp_path, "TIMESTAMP,In\n", "other.csv"))


def test_t7_no_more_requests_than_a_trace_has(tmp_path: Path) -> None:
    data = azure.load("azure_code", text(tmp_path, HEAD + ROWS_2023))
    with pytest.raises(ValueError, match=r"3 rows, 4 requests.*replay"):
        draw(data, Replay(), 4, None, 0)


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    data = azure.load("azure_code", text(tmp_path, HEAD + ROWS_2023), max_prompt_len=4000)
    assert data.dropped == {"rows_prompt_over_4000": 1} and arrivals(data)[0] == 0.0  # A7: the first row kept is at 0
    assert data.notes["arrival_offset"] == "2023-11-16T18:17:04.031960100"


@pytest.mark.parametrize(
    "load",
    [
        lambda p: azure.load("azure_code", p), lambda p: burstgpt.load("burstgpt_1", p), lambda p: bailian.load("bailian_a", p),
        lambda p: mooncake.load("mooncake_synthetic", p), lambda p: vidur_lengths.load(p), lambda p: castillo.load(path=p),
        lambda p: lmcache.load("miniswe", p), lambda p: gsm8k.load(path=p), lambda p: arena_hard.load(path=p),
        sharegpt_turns.load,
    ],
)  # fmt: skip
def test_t12_a_misspelt_path_is_an_error_and_nothing_is_fetched(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """T12 a: the path is named, there is no network and no other data, also where the trace's own file is there."""

    def no_network(*_: Any, **__: Any) -> Any:
        raise AssertionError("a loader used the network")

    monkeypatch.setattr(socket, "socket", no_network)
    with pytest.raises(FileNotFoundError, match=r"no_such\.csv"):
        load("./no_such.csv")


def test_t12_a_trace_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"AzureLLMInferenceTrace_code\.csv.*lengthwise data"):
        azure.load("azure_code")
    text(tmp_path, HEAD + ROWS_2023, "AzureLLMInferenceTrace_code.csv.gz")
    assert len(azure.load("azure_code")) == 3


# --- BurstGPT ---------------------------------------------------------------------------------------------------------

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
FIVE = [
    (5, "ChatGPT", 472, 18, "Conversation log"),
    (45, "ChatGPT", 1087, 0, "Conversation log"),
    (118, "GPT-4", 417, 276, "API log"),
    (118, "ChatGPT", 20, 0, "API log"),
    (259.5, "ChatGPT", 30, 7, "API log"),
]


def burst(folder: Path, sessions: bool = False) -> str:
    if not sessions:
        return text(folder, BURST + "".join(f"{t},{m},{i},{o},{i + o},{kind}\n" for t, m, i, o, kind in FIVE))
    named = BURST.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,")
    who = ["a", "b", "", "", "a"]
    return text(
        folder,
        named + "".join(f"{t},{s},12,{m},{i},{o},{i + o},{k}\n" for (t, m, i, o, k), s in zip(FIVE, who, strict=True)),
        "new.csv",
    )


def test_t6_failed_calls_are_no_length_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T6: "2 rows with zero output", dropped or marked failed by an explicit option."""
    caplog.set_level(logging.INFO, "lengthwise.experiments.workloads.burstgpt")
    data = burstgpt.load("burstgpt_1", burst(tmp_path))
    assert "2 rows with zero output" in caplog.text
    assert data.dropped["rows_zero_output"] == 2 and data.output_len.tolist() == [18, 276, 7]
    assert arrivals(data) == [0.0, 113.0, 254.5] and data.notes["arrival_offset"] == 5.0  # s after midnight of day one
    marked = burstgpt.load("burstgpt_1", burst(tmp_path), failures="mark")
    assert len(marked) == 5 and "rows_zero_output" not in marked.dropped and marked.notes["num_failed"] == 2
    assert marked.columns["failed"].tolist() == [False, True, False, True, False]
    assert marked.censored is not None and (marked.censored == marked.columns["failed"]).all()  # so that it is no label
    assert marked.output_len.min() == 1
    with pytest.raises(ValueError, match=r"Response tokens of row 1 is 0: 2 rows with zero output"):
        burstgpt.load("burstgpt_1", burst(tmp_path), failures="error")
    with pytest.raises(ValueError, match="failures 'ignore'"):
        burstgpt.load("burstgpt_1", burst(tmp_path), failures="ignore")


def test_t6_elapsed_time_is_the_whole_answer(tmp_path: Path) -> None:
    """T6: Elapsed time (12 s) is never a time to first token; it only tells how long the user paused."""
    data = burstgpt.load("burstgpt_1", burst(tmp_path, sessions=True), failures="mark")
    assert data.columns["session"].tolist() == ["a", "b", "row 2", "row 3", "a"]
    assert data.columns["turn"].tolist() == [0, 0, 0, 0, 1]
    assert data.columns["gap"].tolist() == [0.0, 0.0, 0.0, 0.0, 259.5 - (5 + 12)]
    said = " ".join([*data.columns, *map(str, data.notes), *map(str, data.notes.values())]).lower()
    assert "ttft" not in said and "first token" not in said
    assert "session" not in burstgpt.load("burstgpt_1", burst(tmp_path)).columns


def test_burstgpt_one_model_or_kind(tmp_path: Path) -> None:
    file = burst(tmp_path)
    assert burstgpt.load("burstgpt_1", file, model="GPT-4").dropped == {
        "rows_other_models": 4, "rows_zero_output": 0, "rows_zero_prompt": 0,
    }  # fmt: skip
    api = burstgpt.load("burstgpt_1", file, kind="api")
    assert api.output_len.tolist() == [276, 7] and api.dropped["rows_zero_output"] == 1
    with pytest.raises(ValueError, match="kind 'chat'"):
        burstgpt.load("burstgpt_1", file, kind="chat")


# --- Mooncake ---------------------------------------------------------------------------------------------------------


def moon(timestamp: int, prompt: int, ids: list[int], output: int = 8) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": ids}


def test_t3_mooncake_milliseconds_and_ties(tmp_path: Path) -> None:
    """T3: arrivals 0, 0, 27.482 s, ties in file order, both admitted."""
    file = lines(tmp_path, [moon(0, 600, [0, 1]), moon(0, 20, [2]), moon(27482, 513, [0, 3])], "t.jsonl.gz")
    data = mooncake.load("mooncake_conversation", file)
    workload = draw(data, Replay(), None, None, 0)
    assert workload.arrival.tolist() == [0.0, 0.0, 27.482] and workload.prompt_len.tolist() == [600, 20, 513]
    assert data.notes["num_ties"] == 1 and data.notes["time_unit"] == "ms"  # T2
    assert data.block_hashes == [(0, 1), (2,), (0, 3)] and data.hash_tokens == 512


def test_t4_hash_ids_must_fit_the_block(tmp_path: Path) -> None:
    """T4: 20 tokens and two ids do not go together in blocks of 512; they do in blocks of 15."""
    file = lines(tmp_path, [moon(100, 512, [7]), moon(200, 20, [0, 1])])
    with pytest.raises(ValueError, match=r"hash_ids of row 1 has 2 ids.*not ceil\(20 / 512\) = 1"):
        mooncake.load("mooncake_conversation", file)
    small = lines(tmp_path, [moon(200, 20, [0, 1])], "small.jsonl")
    data = mooncake.load("mooncake_conversation", small, block=15)
    assert data.hash_tokens == 15 and data.block_hashes == [(0, 1)]
    for wrong, message in (([1.5], "whole numbers"), (["a"], "whole numbers"), (None, "list of hash ids")):
        odd = lines(tmp_path, [{**moon(0, 20, []), "hash_ids": wrong}], "odd.jsonl")
        with pytest.raises(ValueError, match=rf"hash_ids of row 0.*{message}"):
            mooncake.load("mooncake_conversation", odd)
    with pytest.raises(ValueError, match="block 0"):
        mooncake.load("mooncake_conversation", small, block=0)


def test_jitter_spreads_ties_and_keeps_the_order(tmp_path: Path) -> None:
    stamps = [0] * 50 + [3000] * 30 + [3500] * 20
    file = lines(tmp_path, [moon(t, i + 1, [i]) for i, t in enumerate(stamps)])
    a, b, c = (mooncake.load("mooncake_conversation", file, jitter=3.0, seed=seed) for seed in (0, 0, 1))
    assert arrivals(a) == arrivals(b) != arrivals(c)
    assert a.prompt_len.tolist() == list(range(1, 101)) and a.notes["jitter"] == 3.0
    recorded = np.asarray(arrivals(a)) + a.notes["arrival_offset"]  # on the trace's own clock
    assert arrivals(a)[0] == 0.0 and (np.diff(recorded) > 0).all()
    moved = recorded - np.array(stamps) / 1e3
    assert (moved >= 0).all() and (moved[:50] < 3.0).all() and (moved[50:80] < 0.5).all() and moved[80:].max() < 3.0
    assert moved[:50].mean() == pytest.approx(1.5, abs=0.5)
    assert a.notes["num_ties"] == 97 and mooncake.load("mooncake_conversation", file).notes["arrival_offset"] == 0.0
    with pytest.raises(ValueError, match="jitter -1"):
        mooncake.load("mooncake_conversation", file, jitter=-1.0)


# --- Qwen-Bailian -----------------------------------------------------------------------------------------------------


def call(chat: int, parent: int, t: float, prompt: int, turn: int, ids: list[int]) -> dict[str, Any]:
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": t, "input_length": prompt, "output_length": 9,
            "type": "text", "turn": turn, "hash_ids": ids}  # fmt: skip


def test_bailian_sessions_follow_parents(tmp_path: Path) -> None:
    rows = [
        call(159, 55, 61.114, 40, 2, [1, 2, 3]), call(55, -1, 1.5, 16, 1, [1]), call(7, -1, 2.0, 17, 1, [9, 8]),
        call(200, 159, 70.0, 48, 3, [1, 2, 4]), call(300, 999, 3.0, 5, 4, [5]), call(301, 999, 4.0, 5, 4, [5]),
    ]  # fmt: skip
    data = bailian.load("bailian_a", lines(tmp_path, rows))
    assert arrivals(data) == pytest.approx([0.0, 0.5, 1.5, 2.5, 59.614, 68.5])
    assert data.columns["session"].tolist() == ["55", "7", "999", "999", "55", "55"]
    assert data.columns["turn"].tolist() == [0, 0, 0, 1, 1, 2] and "gap" not in data.columns
    assert data.notes["num_side_calls"] == 1  # 300 and 301 continue the same one
    assert data.block_hashes is not None and list(data.block_hashes[4]) == [1, 2, 3] and data.hash_tokens == 16
    assert data.notes["num_parents_absent"] == 1 and data.notes["num_sessions"] == 3
    assert data.group is not None and data.group.tolist() == [55, 7, 999, 999, 55, 55]


def test_bailian_refuses(tmp_path: Path) -> None:
    for rows, message in (
        ([call(1, -1, 0, 20, 1, [1])], r"ceil\(20 / 16\) = 2"),  # T4
        ([call(1, -1, 0, 5, 1, [1]), call(1, -1, 1, 5, 1, [1])], "chat_id of row 1 is 1"),
        ([call(1, 2, 0, 5, 1, [1]), call(2, 1, 1, 5, 1, [1])], "circle"),
        ([call(1, -1, 0, 5, 0, [1])], "turn of row 0 is 0"),
        ([{**call(1, -1, 0, 5, 1, [1]), "parent_chat_id": None}], r"parent_chat_id of row 0 is NaN \(missing\)"),
        ([{**call(1, -1, 0, 5, 1, [1]), "chat_id": "a"}], "chat_id of row 0 is 'a': not a whole number"),
        ([call(1, -1, -1.0, 5, 1, [1])], "timestamp of row 0 is -1.0"),  # T12 b
    ):
        with pytest.raises(ValueError, match=message):
            bailian.load("bailian_a", lines(tmp_path, rows))


# --- LMCache ----------------------------------------------------------------------------------------------------------


def agent(session: str, turn: int, at: float, prompt: int, output: int, suite: str = "miniswe") -> dict[str, Any]:
    return {"suite": suite, "session_id": session, "turn": turn, "timestamp_us": int(1.76e15 + at * 1e6),
            "input_length": prompt, "output_length": output, "hash_ids": list(range(prompt // 16))}  # fmt: skip


CALLS = [
    agent("s2", 1, 110.0, 64, 10_000), agent("s2", 0, 100.0, 40, 200), agent("s1", 0, 0.0, 15, 100),
    agent("x", 0, 0.0, 9, 9, "magagent"), agent("s1", 1, 2.0, 0, 30), agent("s1", 2, 3.0, 80, 50), agent("s1", 3, 3.5, 90, 60),
]  # fmt: skip


def test_lmcache_sessions_in_time_order_with_their_gaps(tmp_path: Path) -> None:
    data = lmcache.load("miniswe", lines(tmp_path, CALLS))
    assert data.columns["session"].tolist() == ["s2", "s2", "s1", "s1", "s1"]
    assert data.columns["turn"].tolist() == [0, 1, 0, 2, 3]
    assert data.dropped == {"rows_zero_input_length": 1, "rows_other_suites": 2 - 1}
    assert data.arrival is None and data.group is not None and data.group.tolist() == [0, 0, 1, 1, 1]
    rate = 3.0 / 100  # s1's first answer of 100 tokens took at most 3 s, s2's of 200 at most 10
    assert data.notes["seconds_per_token"] == pytest.approx(rate)
    assert data.columns["gap"] == pytest.approx([0.0, 10.0 - 200 * rate, 0.0, 0.0, 0.0])
    whole = lmcache.load("miniswe", lines(tmp_path, CALLS), seconds_per_token=0.0)
    assert whole.columns["gap"] == pytest.approx([0.0, 10.0, 0.0, 3.0, 0.5])
    assert data.block_hashes is not None and [len(ids) for ids in data.block_hashes] == [2, 4, 0, 5, 5]  # whole pieces only
    assert data.hash_tokens == 16 and data.censored is not None and data.censored.tolist() == [False, True, False, False, False]


def test_lmcache_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 rows with zero input_length"):
        lmcache.load("miniswe", lines(tmp_path, CALLS), zero_len="error")
    with pytest.raises(ValueError, match="suite 'taubench' is not one of miniswe, magagent"):
        lmcache.load("taubench", lines(tmp_path, CALLS))
    with pytest.raises(ValueError, match="no rows of suite 'magagent'"):
        lmcache.load("magagent", lines(tmp_path, CALLS[:2]))
    with pytest.raises(ValueError, match=r"hash_ids of row 0 has 3 ids.*floor\(64 / 16\) = 4"):
        lmcache.load("miniswe", lines(tmp_path, [{**CALLS[0], "hash_ids": [1, 2, 3]}]))


# --- vidur, arena-hard, GSM8K, CASTILLO -------------------------------------------------------------------------------


def test_vidur_pairs(tmp_path: Path) -> None:
    file = text(
        tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.9\n2015,156,2171,12.9\n"
    )
    data = vidur_lengths.load(file)
    assert data.prompt_len.tolist() == [3772, 2015] and data.output_len.tolist() == [54, 156] and data.arrival is None
    with pytest.raises(ValueError, match="no arrival times"):
        draw(data, Replay(), None, None, 0)


def test_gsm8k_texts_and_lengths_alike(tmp_path: Path) -> None:
    pytest.importorskip("bpe_openai", reason="needs the `data` extra")
    texts = [
        {"question": "How many?\u2028", "175b_finetuning": {"solution": "one two three"}},
        {"question": "Why?", "175b_finetuning": {"solution": ""}},
    ]
    lens = [{"question": "How many?\u2028", "175b_finetuning": 3}, {"question": "Why?", "175b_finetuning": 0}]
    a, b = (gsm8k.load("175b_finetuning", lines(tmp_path, rows)) for rows in (texts, lens))
    assert a.output_len.tolist() == b.output_len.tolist() == [3] and a.prompts == ["How many?\u2028"]
    assert a.dropped == {"rows_empty": 1} and "cl100k" in a.unit
    with pytest.raises(ValueError, match="model 'gpt-5' is not one of 6b_finetuning"):
        gsm8k.load("gpt-5", lines(tmp_path, lens))
    with pytest.raises(ValueError, match=r"the answer of row 0 is '-1'"):
        gsm8k.load("175b_finetuning", lines(tmp_path, [{"question": "Q", "175b_finetuning": -1}]))
    with pytest.raises(ValueError, match="row 1 is not JSON"):
        gsm8k.load("175b_finetuning", text(tmp_path, json.dumps(lens[0]) + "\n{oops\n"))


def test_arena_hard_answers_and_lengths_alike(tmp_path: Path) -> None:
    pytest.importorskip("bpe_openai", reason="needs the `data` extra")
    said = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": {"answer": "one two"}}]
    answers = [{"model": "gpt-4-0314", "messages": said}, {"model": "gpt-4-0613", "messages": []}]
    lens = [
        {"prompt": "Tell me", "output_tokens_cl100k": {"gpt-4-0314": 2, "gpt-4-0613": 7}},
        {"prompt": "x", "output_tokens_cl100k": {}},
    ]
    for rows in (answers, lens):
        data = arena_hard.load("gpt-4-0314", lines(tmp_path, rows))
        assert data.prompts == ["Tell me"] and data.output_len.tolist() == [2] and data.prompt_len.tolist() == [2]
    with pytest.raises(ValueError, match=r"has no answers of gpt-3\.5"):
        arena_hard.load("gpt-3.5-turbo-0125", lines(tmp_path, lens))


def castillo_file(folder: Path) -> str:
    rows = [("p1", "Mbpp", "m1", 10, 5), ("p2", "Apps", "m1", 20, 15_001), ("p1", "Mbpp", "m2", 11, 7),
            ("p1", "Mbpp", "m1", 10, 9), ("p3", "Alpaca", "m1", 30, 8)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["prompt_id", "dataset", "model", "input_tokens", "out_0"])
    for i in range(1, 10):
        table[f"out_{i}"] = table["out_0"] if i % 2 else table["out_0"] // 2
    table["dataset"] = table["dataset"].astype("category")
    table.to_parquet(folder / "castillo.parquet")
    return str(folder / "castillo.parquet")


def test_castillo_samples_prompts_and_repeats(tmp_path: Path) -> None:
    file = castillo_file(tmp_path)
    prompts = pd.DataFrame({"dataset": ["Mbpp", "Apps"], "prompt_id": ["p1", "p2"], "prompt_text": ["Sort.", "Add."]})
    prompts.to_parquet(tmp_path / "prompts.parquet")
    texts = [str(tmp_path / "prompts.parquet")]
    data = castillo.load("m1", file, prompts=texts)
    assert (
        data.samples is not None and data.samples.shape == (3, 10) and data.samples[:, 0].tolist() == data.output_len.tolist()
    )
    assert data.output_len.tolist() == [5, 15_001, 8] and data.dropped["rows_prompt_asked_again"] == 1
    assert data.censored is not None and data.censored.tolist() == [False, True, False]
    assert data.notes["num_samples_censored"] == 6 and data.unit == "m1 tokens" and data.prompts is None  # Alpaca has no text
    some = castillo.load("m1", file, dataset=["Mbpp", "Apps"], sample=2, prompts=texts)
    assert some.prompts == ["Sort.", "Add."] and some.output_len.tolist() == [2, 7500]
    assert castillo.load("m1", file, dataset="Apps", prompts=texts).prompts == ["Add."]
    for wrong, message in (
        ({"model": "m9"}, "model 'm9' is not one of m1, m2"),
        ({"dataset": "Dolly"}, "dataset 'Dolly'"),
        ({"sample": 10}, "sample 10"),
    ):
        with pytest.raises(ValueError, match=message):
            castillo.load(**{"model": "m1", "path": file, **wrong})


# --- ShareGPT, all turns ----------------------------------------------------------------------------------------------


def entry(name: str, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": name, "conversations": [{"from": role, "value": text} for role, text in turns]}


def turns_of(folder: Path, entries: list[dict[str, Any]], **options: Any) -> Dataset:
    pytest.importorskip("bpe_openai", reason="needs the `data` extra")
    (folder / "talks.json").write_text(json.dumps(entries))
    return sharegpt_turns.load(str(folder / "talks.json"), **options)


def test_t11_every_turn_with_its_context(tmp_path: Path) -> None:
    """T11: (Q1 -> A1), (Q2 -> A2), Q2's prompt holds Q1 and A1; the leading assistant turn is no prompt."""
    one = entry(
        "x_0", ("gpt", "hi"), ("human", "one two"), ("gpt", "three four five"), ("human", "six"), ("gpt", "seven eight")
    )
    data = turns_of(tmp_path, [one])
    assert data.prompts == ["one two", "six"] and data.output_len.tolist() == [3, 2]
    assert data.prompt_len.tolist() == [1 + 2, 1 + 2 + 3 + 1]
    assert data.columns["session"].tolist() == ["x", "x"] and data.columns["turn"].tolist() == [0, 1]
    assert {k: n for k, n in data.dropped.items() if n} == {"turns_leading_assistant": 1}
    assert data.answers_before == [[], [3]] and data.asked([1]).answers_before == [[3]]


def test_t11_pieces_of_a_conversation_are_put_together(tmp_path: Path) -> None:
    data = turns_of(
        tmp_path,
        [
            entry("a_0", ("human", "one"), ("gpt", "two")),
            entry("a_1", ("gpt", "two"), ("human", "three"), ("gpt", "four")),  # repeats the last turn before it
            entry("a_4", ("human", "five"), ("gpt", "six")),
            entry("b_3", ("human", "seven"), ("gpt", "eight")),  # its beginning is not there
            entry("c_0", ("human", "one"), ("gpt", "two")),
            entry("c_1", ("gpt", "another two"), ("human", "three"), ("gpt", "four")),  # not what was said
            entry("d_0"),
        ],
    )
    assert data.prompts == ["one", "three", "five", "one"] and data.prompt_len.tolist() == [1, 3, 5, 1]
    assert data.columns["session"].tolist() == ["a", "a", "a", "c"] and data.columns["turn"].tolist() == [0, 1, 2, 0]
    assert data.dropped["entries_mid_conversation"] == 2 and data.dropped["entries_empty"] == 1
    assert data.notes["num_turns_repeated"] == 1
    assert data.group is not None and data.group.tolist() == [0, 0, 0, 0]  # a and c begin with the same question


def test_t11_what_is_left_out_stays_in_the_context(tmp_path: Path) -> None:
    data = turns_of(
        tmp_path,
        [
            entry("a_0", ("system", "one two"), ("user", "three"), ("human", "four"), ("chatgpt", "five"), ("gpt", "six"),
                  ("human", " "), ("gpt", "seven"), ("human", "eight"), ("gpt", ""), ("human", "nine"), ("robot", "ten"),
                  ("gpt", "ten"), ("human", "eleven")),
            entry("b_0", ("gpt", "hello")),
        ],
    )  # fmt: skip
    assert data.prompts == ["four"] and data.prompt_len.tolist() == [4] and data.output_len.tolist() == [1]
    assert {k: n for k, n in data.dropped.items() if n} == {
        "turns_system": 1, "turns_prompt_unanswered": 2, "turns_answer_unasked": 2, "turns_unknown_role": 1,
        "turns_leading_assistant": 1, "pairs_empty_prompt": 1, "pairs_empty_answer": 1, "conversations_no_pair": 1,
    }  # fmt: skip


def test_turns_share_their_conversation_as_a_prefix(tmp_path: Path) -> None:
    long = "word " * 40
    talks = [entry(f"{c}_0", ("human", long), ("gpt", long), ("human", "continue"), ("gpt", long)) for c in "ab"]
    data = turns_of(tmp_path, talks)
    assert data.block_hashes is not None and data.hash_tokens == 16
    assert data.block_hashes[0] == data.block_hashes[1] != data.block_hashes[2]
    assert data.block_hashes[0][10**6] not in data.block_hashes[2]
    hits = prefix_hits(data)
    cached = (data.prompt_len[0] + data.output_len[0] - 1) // 16 * 16  # the last token of an answer is in no cache
    assert hits is not None and hits["token_hit_share"] == pytest.approx(2 * cached / data.prompt_len.sum())
    assert data.censored is not None and data.censored.tolist() == [True, False, True, False]  # one was asked to go on
    short = turns_of(tmp_path, talks, max_prompt_len=60)
    assert len(short) == 2 and short.dropped["pairs_prompt_over_60"] == 2


def test_each_text_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(sharegpt_turns, "token_counter", lambda: lambda text: (counted.update([text]), len(text))[1])
    turns_of(tmp_path, [entry(f"{c}_0", *[("human", f"q{i}"), ("gpt", f"a{i}")] * 3) for c in "abc" for i in (1, 2)])
    assert set(counted.values()) == {1} and len(counted) == 4


# --- the contract, and the summary ------------------------------------------------------------------------------------


def test_contract_on_hand_made_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 60
    lens = rng.integers(1, 3000, (n, 2)).tolist()
    azure_rows = HEAD + "".join(
        f"2023-11-16 18:{i // 30:02d}:{i % 30 * 2:02d}.1234567,{a},{b}\r\n" for i, (a, b) in enumerate(lens)
    )
    moon_rows = [moon(3000 * (i // 4), a, list(range(-(-a // 512))), b) for i, (a, b) in enumerate(lens)]
    agent_rows = [agent(f"s{i % 7}", i // 7, float(i), a, b) for i, (a, b) in enumerate(lens)]
    chat_rows = [
        call(i + 1, i - 6 if i > 6 else -1, i / 2, a, 1 + i // 7, list(range(-(-a // 16)))) for i, (a, _) in enumerate(lens)
    ]
    file_a, file_m = text(tmp_path, azure_rows), lines(tmp_path, moon_rows, "m.jsonl")
    file_l, file_b = lines(tmp_path, agent_rows, "l.jsonl"), lines(tmp_path, chat_rows, "b.jsonl")
    for load in (
        lambda: azure.load("azure_conv", file_a, max_output=3000),
        lambda: mooncake.load("mooncake_conversation", file_m, jitter=3.0),
        lambda: lmcache.load("miniswe", file_l),
        lambda: bailian.load("bailian_a", file_b),
        lambda: burstgpt.load("burstgpt_1", burst(tmp_path, sessions=True)),
    ):
        check_workload(load)


def test_a8_a_summary_of_arrivals(tmp_path: Path) -> None:
    """A8: rate, CV of the gaps and the longest silence are said of every trace (of the real ones: test_real_traces.py)."""
    rows = "".join(
        f"2023-11-16 18:{m:02d}:00.0000000,{p},{o}\r\n" for m, p, o in ((0, 10, 1), (1, 20, 2), (2, 30, 3), (9, 40, 4))
    )
    data = azure.load("azure_code", text(tmp_path, HEAD + rows))
    said = summarise(data)
    gaps = np.array([60.0, 60.0, 420.0])
    assert said["rate"] == pytest.approx(3 / 540) and said["longest_gap"] == 420.0 and said["span"] == 540.0
    assert said["gap_cv"] == pytest.approx(gaps.std() / gaps.mean()) and said["num_ties"] == 0
    assert said["rank_correlation"] == said["linear_correlation"] == pytest.approx(1.0)
    assert said["prompt_p50"] == 25.0 and said["output_max"] == 4 and said["piece_hit_share"] is None
    frame = summary_frame([data])
    assert frame.loc["azure_code", "n"] == 4 and pd.isna(frame.loc["azure_code", "num_sessions"])


def test_summary_of_prefixes_and_sessions(tmp_path: Path) -> None:
    rows = [moon(0, 1024, [1, 2]), moon(1, 1100, [1, 2, 3]), moon(2, 600, [9, 2]), moon(3, 700, [1, 4])]
    data = mooncake.load("mooncake_synthetic", lines(tmp_path, rows))
    said = summarise(data)
    assert said["piece_hit_share"] == pytest.approx((2 + 1) / 9) and said["request_hit_share"] == 0.5
    assert said["token_hit_share"] == pytest.approx((1024 + 512) / (1024 + 1100 + 600 + 700))
    assert said["num_sessions"] is None
    said = summarise(lmcache.load("miniswe", lines(tmp_path, CALLS), seconds_per_token=0.0))
    assert (said["num_sessions"], said["turns_mean"], said["turns_max"]) == (2, 2.5, 3)
    assert said["gap_p50"] == 3.0 and said["rate"] is None and said["censored"] == 0.2


def test_a_misspelt_zero_len_drops_nothing(tmp_path: Path) -> None:
    zero = HEAD + ROWS_2023 + "2023-11-16 18:18:00.0000000,5,0\r\n"
    for load in (
        lambda: azure.load("azure_code", text(tmp_path, zero), zero_len="Drop"),
        lambda: mooncake.load("mooncake_synthetic", lines(tmp_path, [moon(0, 5, [1])]), zero_len="skip"),
    ):
        with pytest.raises(ValueError, match=r"zero_len '(Drop|skip)' must be error or drop"):
            load()


@pytest.mark.parametrize(("field", "value"), [("session_id", None), ("turn", None), ("turn", "x")])
def test_lmcache_refuses_calls_of_no_session_or_turn(field: str, value: Any, tmp_path: Path) -> None:
    good = {"suite": "miniswe", "session_id": "a", "turn": 0, "timestamp_us": 0, "input_length": 20, "output_length": 2,
            "hash_ids": [1]}  # fmt: skip
    with pytest.raises(ValueError, match=rf"{field} of row 1 is"):
        lmcache.load("miniswe", lines(tmp_path, [good, {**good, "turn": 1, field: value}]))
