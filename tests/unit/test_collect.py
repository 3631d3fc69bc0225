"""Collecting answers: the same whoever else is answered and however often it was stopped; and what becomes of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fake_server import serving
from fake_service import byte_model
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from lengthwise.experiments import answerers, taken
from lengthwise.experiments.answerers import NativeAnswerer, own_sampling
from lengthwise.experiments.collect import Feed, collect, journal_of, seed_of
from lengthwise.experiments.collect_app import answerer_of
from lengthwise.experiments.collected import Collected, alone, join, prompt_sha, read, write
from lengthwise.experiments.composer import plain
from lengthwise.experiments.contract import check_workload
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.estimates import Estimates
from lengthwise.experiments.journal import Answered, Journal
from lengthwise.experiments.native_stage import NativeStage
from lengthwise.experiments.train_report import resample_ceiling
from lengthwise.experiments.workloads.collected import load
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.self_estimate import SelfEstimate, asking_latency, question, read_estimates
from lengthwise.sched import INF, Request

TINY = ("model=tiny", "model.vocab_size=16", "model.eos_token_id=3", "model.max_positions=256", "sampling.temperature=2")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def rows(n: int = 12, **given: Any) -> Dataset:
    lens = np.arange(4, 4 + n)
    texts = [f"question {i}" for i in range(n)]
    return Dataset("asked", lens, lens, "words", "here", "MIT", **{"prompts": texts, "group": np.arange(n) // 2, **given})


def answerer(*overrides: str) -> Any:
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        config = GlobalHydra.instance().hydra.compose_config("collect", list(overrides), run_mode=RunMode.RUN)
    return answerer_of(plain(config, config.hydra.runtime.choices))[0]


def ask(out: Path, dataset: Dataset | None = None, *overrides: str, **options: Any) -> Collected:
    options = {"samples": 3, "max_new_tokens": 24, **options}
    return collect(answerer(*TINY, *overrides), dataset or rows(), out, **options)


class Stopping:
    """An Answerer that is interrupted after `num` answers of `other`."""

    def __init__(self, other: Any, num: int) -> None:
        self.other, self.num = other, num

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)

    def answer(self, asking: Any, told: Any) -> None:
        def tell(*answer: Any) -> None:
            told(*answer)
            self.num -= 1
            if not self.num:
                raise KeyboardInterrupt

        self.other.answer(asking, tell)


# --- asking our engine ------------------------------------------------------------------------------------------------


def test_answers_hang_on_nothing_but_their_prompt_and_seed(tmp_path):
    """Not on how many are answered at once, on the cache, or on what else is asked."""
    whole = ask(tmp_path / "a.parquet")
    assert whole.lengths.shape == (12, 3) and len(np.unique(whole.lengths)) > 5
    assert 0 < whole.stopped.mean() < 1 and (whole.lengths[~whole.stopped] == 24).all()
    alone_ = ask(tmp_path / "b.parquet", None, "limits.max_num_seqs=1", "limits.token_budget=7")
    part = ask(tmp_path / "c.parquet", limit=5, samples=2)
    other = ask(tmp_path / "d.parquet", seed=1)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes() and len(alone_) == 12
    assert np.array_equal(part.lengths, whole.lengths[:5, :2])
    assert not np.array_equal(other.lengths, whole.lengths)
    assert (whole.lengths[:, 0] != whole.lengths[:, 1]).any()


@pytest.mark.parametrize("stops", [(1,), (7, 8, 9), (35,)])
def test_what_was_stopped_goes_on_and_ends_alike(tmp_path, stops):
    ask(tmp_path / "whole.parquet")
    out = tmp_path / "again.parquet"
    for n, num in enumerate(stops, 1):
        with pytest.raises(KeyboardInterrupt):
            collect(Stopping(answerer(*TINY), num), rows(), out, samples=3, max_new_tokens=24)
        assert not out.exists() and len(journal_of(out).read_text().splitlines()) == 1 + sum(stops[:n])
    ask(out)
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert out.with_suffix(".json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "again.parquet", "whole.json", "whole.parquet"]


def test_what_is_there_is_not_asked_for_again_and_more_can_be(tmp_path):
    out = tmp_path / "a.parquet"
    first = ask(out, samples=2, limit=6)
    before = out.stat().st_mtime_ns
    with_none = collect(Stopping(answerer(*TINY), 1), rows(), out, samples=2, max_new_tokens=24, limit=6)
    assert out.stat().st_mtime_ns == before and np.array_equal(with_none.lengths, first.lengths)
    asked = Counter[int]()
    more = answerer(*TINY)
    answer = more.answer
    more.answer = lambda asking, told: answer(asking, lambda rid, *rest: (asked.update([rid]), told(rid, *rest)))
    more = collect(more, rows(), out, samples=3, max_new_tokens=24)
    assert sum(asked.values()) == len(asked) == 36 - 12
    ask(tmp_path / "b.parquet")
    assert out.read_bytes() == (tmp_path / "b.parquet").read_bytes()
    with pytest.raises(ValueError, match="holds 12 prompts with 3 answers each, more than is asked for"):
        ask(out, samples=2)


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (("sampling.top_p=0.5",), {}, r"sampling \{.*'top_p': 1.0\}, now .*0.5"),
        ((), {"seed": 3}, "seed 0, now 3"),
        ((), {"max_new_tokens": 9}, "max_new_tokens 24, now 9"),
        (("model.family=qwen2",), {}, "model 'tiny-llama', now 'tiny-qwen2'"),
        ((), {"dataset": rows(prompts=[f"other {i}" for i in range(12)])}, r"row \d+ of the workload was another text"),
    ],
)
def test_answers_to_something_else_are_not_mixed_in(tmp_path, overrides, options, says):
    dataset = options.pop("dataset", None)
    out = tmp_path / "a.parquet"
    with pytest.raises(KeyboardInterrupt):
        collect(Stopping(answerer(*TINY), 5), rows(), out, samples=3, max_new_tokens=24)
    with pytest.raises(ValueError, match=says):
        ask(out, dataset, *overrides, **options)
    ask(out)
    with pytest.raises(ValueError, match=says):  # nor once it is whole
        ask(out, dataset, *overrides, **options)


def test_requests_are_made_when_there_is_room(tmp_path, monkeypatch):
    live: list[int] = []
    pop, finish = Feed.pop, Feed.on_finish
    monkeypatch.setattr(Feed, "pop", lambda self, now: [live.append(self._live) or event for event in pop(self, now)])
    ask(tmp_path / "a.parquet", None, "limits.max_num_seqs=5")
    assert len(live) == 36 and max(live) == 5 and finish is Feed.on_finish
    made = Feed(np.arange(9), lambda rid: Request(rid, 0.0, 1), 4)
    assert [event.request.rid for event in made.pop(0.0)] == [0, 1, 2, 3] and made.peek() == INF
    made.on_finish(None, 1.0)
    assert made.peek() == 0.0 and [event.request.rid for event in made.pop(1.0)] == [4]


def test_every_answer_has_a_seed_of_its_own():
    seeds = {seed_of(seed, row, sample) for seed in range(3) for row in range(50) for sample in range(10)}
    assert len(seeds) == 1500 and max(seeds) < 2**48 and seed_of(0, 1, 2) == seed_of(0, 1, 2)


def test_sampling_is_the_models_own_until_somebody_says_otherwise():
    made = answerer(*TINY, "sampling.temperature=null")
    made._engine.model.model.generation_config.temperature = 0.6
    made._engine.model.model.generation_config.top_k = 20
    try:
        assert own_sampling(made._engine.model) == {"temperature": 0.6, "top_k": 20}
        for given, temperature in (({"temperature": None, "top_p": 0.9}, 0.6), ({"temperature": 0.3, "top_p": 0.9}, 0.3)):
            said = NativeAnswerer(made._cfg, made._stage, given).asked(0, 9)["sampling"]
            assert (said["temperature"], said["top_p"], said["top_k"]) == (temperature, 0.9, 20)
    finally:
        made._engine.model.model.generation_config.temperature = None
        made._engine.model.model.generation_config.top_k = None
    assert NativeAnswerer(made._cfg, made._stage, {}).asked(0, 9)["sampling"]["temperature"] == 1.0
    with pytest.raises(ValueError, match=r"sampling\.heat: choose of temperature"):
        NativeAnswerer(made._cfg, made._stage, {"heat": 1.0})


def test_what_cannot_be_answered_is_left_out_and_counted(tmp_path):
    texts = ["a", "b", "a", "long", "c"]
    dataset = replace(rows(5, prompts=texts), prompt_len=np.array([5, 5, 5, 240, 5]))
    found = ask(tmp_path / "a.parquet", dataset)
    assert found.prompt_id.tolist() == [0, 1, 4] and found.meta["dropped"] == {
        "rows_prompt_again": 1, "rows_prompt_too_long": 1,
    }  # fmt: skip
    assert found.columns["group"].tolist() == [0, 0, 2] and found.prompt_len.tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match="no prompt of workload asked has its answers"):
        ask(tmp_path / "b.parquet", dataset, "limits.kv_pool_tokens=16")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 0}, "samples=0, the least is 1"),
        ({"seed": -1}, "seed=-1, the least is 0"),
        ({"limit": 0}, "limit=0"),
        ({"dataset": rows(prompts=None)}, "has no texts"),
        ({"overrides": ("sampling.temperature=0",)}, "the same answer each time"),
        ({"overrides": ("limits.clip=true",)}, "limits.clip"),
        ({"overrides": ("executor=simulated",)}, "no real engine"),
        ({"overrides": ("executor.sampling={top_p: 0.5}",)}, "executor.sampling"),
        ({"out": "a.json"}, "NAME.parquet is wanted"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, options, says):
    options = {"out": "a.parquet", "dataset": None, "overrides": (), **options}
    out, dataset, overrides = options.pop("out"), options.pop("dataset"), options.pop("overrides")
    with pytest.raises(ValueError, match=says):
        ask(tmp_path / out, dataset, *overrides, **options)
    assert not list(tmp_path.iterdir())


def test_progress_says_how_fast_it_is_and_how_long_it_takes(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(taken, "EVERY", 0.0)
    ask(tmp_path / "a.parquet", say=said.append)
    assert len(said) == 36 and said[-1].startswith("36 of 36 answers, ") and "tokens/s, about 0 s left" in said[-1]


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_journal_forgets_only_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "j.jsonl"
    answers = [Answered(i, 0, "ab", 3, 4, True) for i in range(3)]
    with Journal(path, {"seed": 0}) as journal:
        for answer in answers:
            journal.add(answer)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, {"seed": 0}) as journal:
            assert journal.found == answers[: max(whole[:cut].count(b"\n") - 1, 0)]
            journal.add(answers[2])
        with Journal(path, {"seed": 0}) as journal:
            assert journal.found[-1] == answers[2]


def test_a_journal_has_one_writer_and_is_what_it_says(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, {"seed": 0}), pytest.raises(ValueError, match="another run is writing"):
        Journal(path, {"seed": 0})
    with pytest.raises(ValueError, match="seed 0, now 1"):
        Journal(path, {"seed": 1})
    path.write_text('{"seed": 0}\nnonsense\n')
    with pytest.raises(ValueError, match="no journal of answers"):
        Journal(path, {"seed": 0})
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="does not say what was asked"):
        Journal(path, {"seed": 0})


# --- asking a server --------------------------------------------------------------------------------------------------


async def by_seed(stream, body):
    """As many tokens as the seed says; at most max_tokens."""
    n = body["seed"] % 20 + 1
    cut = n > body["max_tokens"]
    for _ in range(min(n, body["max_tokens"])):
        await stream.send(" w")
    await stream.send("", finish="length" if cut else "stop")
    await stream.usage(min(n, body["max_tokens"]), prompt=9)
    await stream.done()


def ask_server(out: Path, server: Any, dataset: Dataset | None = None, *overrides: str, **options: Any) -> Collected:
    made = answerer(f"target={server.url}/v1/", "endpoint.retries=0", *overrides)
    return collect(made, dataset or rows(), out, **{"samples": 3, "max_new_tokens": 16, **options})


def test_a_server_is_asked_for_each_answer_by_its_seed(tmp_path):
    with serving(by_seed) as server:
        found = ask_server(tmp_path / "a.parquet", server)
        other = ask_server(tmp_path / "b.parquet", server, None, "endpoint.concurrency=2", "sampling.temperature=0.5")
        ask_server(tmp_path / "c.parquet", server, None, "endpoint.route=completions", samples=1)
    want = np.array([[seed_of(0, row, sample) % 20 + 1 for sample in range(3)] for row in range(12)])
    assert np.array_equal(found.lengths, np.minimum(want, 16)) and np.array_equal(found.stopped, want <= 16)
    assert np.array_equal(other.lengths, found.lengths) and other.meta["sampling"] == {"temperature": 0.5}
    chats, warm, texts = server.bodies[:36], server.bodies[36:72], server.bodies[72:]
    assert {body["seed"] for body in chats} == {body["seed"] for body in warm} and len({body["seed"] for body in chats}) == 36
    assert all("temperature" not in body and body["max_tokens"] == 16 for body in chats)
    assert all(body["temperature"] == 0.5 for body in warm)
    assert Counter(body["messages"][0]["content"] for body in chats) == Counter(rows().prompts * 3)
    assert {body["prompt"] for body in texts} == {*rows().prompts}
    assert found.prompt_len.tolist() == [9] * 12 and found.meta["unit"] == "fake tokens" and found.meta["chat_template"]
    assert server.url not in (tmp_path / "a.json").read_text()


def test_a_server_that_fails_now_and_then_is_asked_again_for_what_is_lost(tmp_path):
    out = tmp_path / "a.parquet"
    said: list[str] = []
    with serving(by_seed) as server:
        server.statuses = [500, 429]
        with pytest.raises(ValueError, match=r"2 of 36 answers are lost, the last: .*; the same command asks for them again"):
            ask_server(out, server, say=said.append)
        assert not out.exists() and len(said) == 1 and "an answer to row 0 is lost: failed: HTTP" in said[0]
        before = len(server.bodies)
        ask_server(out, server)
        assert len(server.bodies) == before + 2
        ask_server(tmp_path / "b.parquet", server)
    assert out.read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_prompts_that_a_server_refuses_are_left_out_and_a_dead_one_is_given_up(tmp_path, monkeypatch):
    said: list[str] = []
    with serving(by_seed) as server:
        server.statuses = [400]
        found = ask_server(tmp_path / "a.parquet", server, None, "endpoint.concurrency=1", say=said.append)
    assert found.prompt_id.tolist() == [*range(1, 12)] and found.meta["dropped"] == {"rows_refused": 1}
    assert "row 0 is left out" in said[0] and "scripted 400" in said[0]

    async def silent(stream, body):
        await stream.send("w", finish="stop")
        await stream.done()

    monkeypatch.setattr(taken, "ALL_LOST", 5)
    with serving(silent) as server:
        with pytest.raises(ValueError, match=r"5 answers in a row are lost, the last: .*does not count tokens"):
            ask_server(tmp_path / "b.parquet", server, None, "endpoint.concurrency=1")
        assert len(server.bodies) <= 6
    with pytest.raises(ValueError, match="no answer from /v1/models"):
        ask_server(tmp_path / "c.parquet", server)


# --- what becomes of them ---------------------------------------------------------------------------------------------


def some(n: int = 200, k: int = 4, **given: Any) -> Collected:
    rng = np.random.default_rng(1)
    base = rng.integers(5, 90, n)
    lengths = np.minimum(base[:, None] + rng.integers(0, 20, (n, k)), 100)
    meta = {
        "model": "m", "unit": "m tokens", "max_new_tokens": 100, "dropped": {},
        "workload": {"name": "asked", "source": "here", "licence": "MIT"},
    }  # fmt: skip
    texts = [f"question {i}" for i in range(n)]
    columns = {"group": np.arange(n) // 2, "template": np.array([f"t{i % 7}" for i in range(n)]), "topic": np.arange(n) % 3}
    sha = [prompt_sha(text) for text in texts]
    return Collected(meta, np.arange(n), sha, np.arange(n) + 1, lengths, lengths < 100, columns, texts, **given)


@pytest.mark.parametrize("texts", [True, False])
def test_what_is_written_comes_back(tmp_path, texts):
    made = replace(some(), prompts=some().prompts if texts else None)
    write(made, tmp_path / "deep" / "a.parquet")
    write(made, tmp_path / "b.parquet")
    back = read(tmp_path / "b.parquet")
    for name in ("prompt_id", "prompt_len", "lengths", "stopped"):
        assert (
            np.array_equal(getattr(back, name), getattr(made, name)) and getattr(back, name).dtype == getattr(made, name).dtype
        )
    assert back.sha == made.sha and back.prompts == made.prompts
    assert back.meta == {**made.meta, "format": 1, "samples": 4} == json.loads((tmp_path / "b.json").read_text())
    assert {name: column.tolist() for name, column in back.columns.items()} == {n: c.tolist() for n, c in made.columns.items()}
    assert (tmp_path / "deep" / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    frame = pd.read_parquet(tmp_path / "b.parquet")  # anybody can read it
    assert frame["lengths"][3].tolist() == made.lengths[3].tolist() and set(frame["finish"][0]) <= {"stop", "length"}
    assert ("prompt" in frame) == texts


def test_what_is_no_collection_is_refused(tmp_path):
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no answers that `lengthwise collect`"):
        read(tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_text("no")
    with pytest.raises(ValueError, match="no Parquet file"):
        read(tmp_path / "y.parquet")


def test_answers_join_the_texts_that_were_asked(tmp_path):
    found = some(20)
    order = np.random.default_rng(0).permutation(20)
    texts = [*(found.prompts[i] for i in order), "nobody asked this", found.prompts[3]]
    lens = np.full(22, 7)
    columns = {"client": np.array([f"c{i}" for i in range(22)]), "max_new_tokens": np.full(22, 9)}
    base = Dataset("asked", lens, lens, "words", "here", "MIT", prompts=texts, columns=columns, dropped={"rows_odd": 2})
    got = join(base, found, sample=2)
    assert got.prompts == texts[:20] and got.columns["client"].tolist() == [f"c{i}" for i in range(20)]
    assert np.array_equal(got.samples, found.lengths[order]) and np.array_equal(got.output_len, found.lengths[order, 2])
    assert np.array_equal(got.prompt_len, found.prompt_len[order])
    assert np.array_equal(got.censored, found.lengths[order, 2] == 100)
    assert (got.unit, got.max_new_tokens, got.licence) == ("m tokens", 100, "MIT") and "max_new_tokens" not in got.columns
    assert got.dropped == {"rows_odd": 2, "rows_prompt_again": 1, "rows_without_answers": 1}
    for dataset, sample, says in (
        (replace(base, prompts=None), 0, "no texts to know the prompts by"),
        (replace(base, prompts=["x"] * 22), 0, "no prompt of workload asked is among the 20"),
        (base, 4, "sample 4 is not within 0 and 3"),
    ):
        with pytest.raises(ValueError, match=says):
            join(dataset, found, sample)


def test_the_node_reads_them_with_their_texts_or_takes_texts_from_the_workload(tmp_path):
    found = some()
    write(found, tmp_path / "texts.parquet")
    write(replace(found, prompts=None), tmp_path / "hashes.parquet")
    whole = check_workload(lambda: load(str(tmp_path / "texts.parquet"), sample=1))
    assert whole.prompts == found.prompts and np.array_equal(whole.output_len, found.lengths[:, 1])
    assert np.array_equal(whole.group, found.columns["group"]) and whole.columns["template"][8] == "t1"
    bare = check_workload(lambda: load(str(tmp_path / "hashes.parquet")))
    assert bare.prompts is None and np.array_equal(bare.censored, found.lengths[:, 0] == 100)
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps({"text": text, "n": 3}) + "\n" for text in reversed(found.prompts)))
    node = {
        "_target_": "lengthwise.experiments.workloads.table.load", "path": str(table), "prompt": "text", "prompt_len": "n",
        "output_len": "n", "unit": "words",
    }  # fmt: skip
    joined = check_workload(lambda: load(str(tmp_path / "hashes.parquet"), node))
    assert np.array_equal(joined.samples, found.lengths[::-1]) and joined.prompts == found.prompts[::-1]
    with pytest.raises(ValueError, match="base 'nowhere' is not one of"):
        load(str(tmp_path / "hashes.parquet"), "nowhere")
    with pytest.raises(ValueError, match="base gave a int"):
        load(str(tmp_path / "hashes.parquet"), 3)


def test_the_ceiling_is_what_the_other_samples_tell():
    found = alone(some())
    cut = np.asarray(found.censored)
    got = resample_ceiling(found, cut)
    assert got["n"] == got["prompts"] == int((~cut).sum()) < 200 and 0.6 < got["kendall_tau"] < 0.95
    same = replace(found, samples=np.repeat(found.output_len[:, None], 4, axis=1))
    assert resample_ceiling(same, cut)["kendall_tau"] == pytest.approx(1.0)
    noise = replace(found, output_len=np.random.default_rng(0).integers(1, 100, 200))
    noise = replace(noise, samples=np.column_stack([noise.output_len, np.random.default_rng(1).integers(1, 100, (200, 3))]))
    assert abs(resample_ceiling(noise, cut)["kendall_tau"]) < 0.15
    assert "one answer a prompt" in resample_ceiling(replace(found, samples=found.samples[:, :1]), cut)["reason"]
    assert "are not censored" in resample_ceiling(found, np.ones(200, np.bool_))["reason"]


def test_a_tokenizer_is_known_by_what_it_does():
    class Words:
        chat_template = None

        def get_vocab(self):
            return {"a": 0, "b": 1}

        def __len__(self):
            return 2

    one, other = Words(), Words()
    other.get_vocab = lambda: {"a": 1, "b": 0}
    assert answerers.tokenizer_facts(one) == answerers.tokenizer_facts(Words()) != answerers.tokenizer_facts(other)
    other = Words()
    other.chat_template = "x"
    assert answerers.tokenizer_facts(one) != answerers.tokenizer_facts(other)


# --- estimates --------------------------------------------------------------------------------------------------------


async def by_number(stream, body):
    """Says a number of words that is the prompt's own; nothing of use to question 3."""
    text = body["messages"][0]["content"]
    number = int(text.split()[1])
    await stream.send("none" if number == 3 else f"About {10 + number}", finish=None)
    await stream.send(" words.", finish="stop")
    await stream.usage(4, prompt=30)
    await stream.done()


def estimated(out: Path, server: Any, dataset: Dataset | None = None, *overrides: str, **more: Any) -> list[str]:
    made = answerer(f"target={server.url}/v1/", "endpoint.retries=0", *overrides)
    cfg = {"seed": 0, "limit": None, **more}
    return Estimates(num_alone=4)(made, dataset or rows(), out, cfg, "lengthwise collect ask=estimate", lambda text: None)


def test_a_model_is_asked_for_its_estimate_and_what_that_cost_is_charged(tmp_path):
    out = tmp_path / "e.jsonl"
    with serving(by_number) as server:
        said = estimated(out, server, None, "endpoint.concurrency=3")
        texts = [body["messages"][0]["content"] for body in server.bodies]
        assert {body["max_tokens"] for body in server.bodies} == {16} and sorted(texts) == sorted(map(question, rows().prompts))
        estimated(out, server, None, "endpoint.concurrency=3")
        assert len(server.bodies) == 12  # nothing is asked again
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["at_once"] for line in lines] == [1] * 4 + [3] * 8
    assert all(line["seconds"] > 0 and line["prompt_len"] == 30 and line["output_len"] == 4 for line in lines)
    want = {prompt_sha(f"question {i}"): 10.0 + i for i in range(12) if i != 3}
    assert read_estimates(out) == want
    told = json.loads(out.with_suffix(".json").read_text())
    assert told["num"] == 12 and told["num_without_number"] == 1 and told["tokens"] == {"prompt_len": 30.0, "output_len": 4.0}
    assert told["asked"]["model"] == "fake" and "12 estimates, 1 of them without a number" in said[0]
    latency = asking_latency(out)
    assert told["latency"] == latency.as_dict() and latency.max_batch == 3
    alone = np.median([line["seconds"] for line in lines[:4]])
    assert latency.per_batch + latency.per_request == pytest.approx(max(alone, latency.per_request))
    predictor = SelfEstimate(str(out))
    asked = rows(12).asked(np.tile([i for i in range(12) if i != 3], 3))
    none = np.zeros(33, dtype=bool)
    predictor.fit(asked, np.tile([2 * (10 + i) for i in range(12) if i != 3], 3) + np.arange(33) % 3 - 1, none)
    assert predictor.latency == latency and predictor.factor == pytest.approx(2.0, rel=0.1)
    stated = SelfEstimate(str(out), latency=LatencyModel(1.0, 0.0))
    stated.fit(asked, np.full(33, 20) + np.arange(33), none)
    assert stated.latency == LatencyModel(1.0, 0.0)


def test_asking_latency_is_a_line_through_one_alone_and_many(tmp_path):
    def file(*lines: dict[str, Any]) -> Path:
        path = tmp_path / "l.jsonl"
        path.write_text("".join(json.dumps({"prompt_sha": "ab", "answer": "9", **line}) + "\n" for line in lines))
        return path

    alone = [{"seconds": s, "at_once": 1} for s in (0.3, 0.4, 0.9)]
    found = asking_latency(file(*alone, {"seconds": 1.0, "at_once": 5}, {"seconds": 1.4, "at_once": 5}))
    assert (found.per_batch + found.per_request, found.per_batch + 5 * found.per_request) == pytest.approx((0.4, 1.2))
    assert asking_latency(file(*alone)) == LatencyModel(0.4, 0.0, max_batch=1)
    assert asking_latency(file({"seconds": 1.0, "at_once": 4})).per_request == pytest.approx(0.25)
    assert asking_latency(file({})) is None


def test_estimates_that_were_stopped_go_on_and_lost_ones_are_asked_for_again(tmp_path):
    out = tmp_path / "e.jsonl"
    with serving(by_number) as server:
        server.statuses = [500, 400]
        with pytest.raises(ValueError, match=r"1 of 12 estimates are lost, the last: failed: HTTP 500"):
            estimated(out, server)
        whole = out.read_bytes()
        assert whole.count(b"\n") == 10
        out.write_bytes(whole[:-5])  # its last line cut off
        before = len(server.bodies)
        assert "12 estimates" in estimated(out, server)[0] and len(server.bodies) == before + 3
        with pytest.raises(ValueError, match="holds answers to something else"):
            estimated(out, server, None, "sampling.temperature=0.5")
    assert len(read_estimates(out)) == 11


def test_our_engine_says_its_estimates_too(tmp_path):
    model = byte_model()
    stage = {"model": model, "lengths": "forced"}
    made = answerer(*TINY)
    made._stage, made._engine = NativeStage(**stage), NativeStage(**stage).loaded()
    out = tmp_path / "e.jsonl"
    said = Estimates(num_alone=2, max_new_tokens=5)(made, rows(), out, {"seed": 0, "limit": 6}, "", lambda text: None)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["at_once"] for line in lines] == [1, 1, 4, 4, 4, 4] and "6 estimates" in said[0]
    assert all(1 <= line["output_len"] <= 5 and isinstance(line["answer"], str) for line in lines)
    assert {line["prompt_len"] for line in lines} == {len(model.encode_chat(question("question 0")))}


@pytest.mark.parametrize(
    ("out", "dataset", "says"),
    [("a.parquet", rows(), "NAME.jsonl is wanted"), ("a.jsonl", rows(prompts=None), "has no texts")],
)
def test_what_cannot_be_estimated_is_refused(tmp_path, out, dataset, says):
    with pytest.raises(ValueError, match=says):
        Estimates()(answerer(*TINY), dataset, tmp_path / out, {"seed": 0, "limit": None}, "", lambda text: None)
    for options in ({"max_new_tokens": 0}, {"num_alone": 0}):
        with pytest.raises(ValueError, match="the least is 1"):
            Estimates(**options)
