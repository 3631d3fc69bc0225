"""The native engine in service: the inbox's door, texts and stop strings, sampling under batching, and a long soak."""

from __future__ import annotations

import gc
import resource
import threading
import time

import numpy as np
import pytest
import torch
from native import assert_clean, served

from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import Answers, generate
from lengthwise.engine.native.inbox import Inbox
from lengthwise.engine.native.sampling import SamplingParams
from lengthwise.engine.native.tiny import tiny
from lengthwise.sched import Scheduler, recompute, serve, swap
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged, Prefix
from lengthwise.sched.policies import FCFS


class Letters:
    """A tokenizer: every id has two or three characters of its own."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"{chr(97 + i % 26)}{i // 26}{'!' if i % 7 == 0 else ''}" for i in ids)


class Engine:
    """A live engine on a thread of its own."""

    def __init__(self, model=None, kv=None, preemption=None, max_num_seqs=8, **limits):
        model = model or served()
        kv = kv or Paged(4096, 16, 0.0)
        wake = threading.Event()
        clock = WallClock(wake)
        self.inbox = Inbox(
            clock, model.vocab_size, hash_tokens=getattr(kv, "hash_tokens", 0), wake=wake, has_text=model.tokenizer is not None
        )
        self.scheduler = Scheduler(FCFS(), Chunked(), kv, preemption or recompute(), max_num_seqs=max_num_seqs, **limits)
        self.executor = NativeEngine(model, attention="torch").executor(
            kv, clock, sampling=self.inbox.sampling, max_num_seqs=max_num_seqs
        )
        self.answers = Answers(self.executor)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.error = None
        self.thread.start()

    def _run(self):
        try:
            serve(self.inbox, self.scheduler, self.executor, self.executor._clock, self.answers)
        except BaseException as error:
            self.error = error

    def wait_for(self, condition):
        while not condition():
            assert self.error is None, self.error
            time.sleep(1e-3)  # the engine needs the interpreter

    def close(self):
        self.inbox.close()
        self.thread.join(60)
        assert not self.thread.is_alive() and self.error is None, self.error
        assert_clean(self.executor, self.scheduler)
        return self.answers.by_rid


def test_s17_an_id_names_one_live_request():
    engine = Engine()
    first = engine.inbox.submit("x", [1, 2, 3], 200)
    with pytest.raises(ValueError, match="'x' is in use"):
        engine.inbox.submit("x", [1, 2, 3], 5)
    engine.wait_for(lambda: first.rid in engine.answers.by_rid)
    third = engine.inbox.submit("x", [1, 2, 3], 7)
    answers = engine.close()
    assert len(answers[first.rid].token_ids) == 200 and len(answers[third.rid].token_ids) == 7


@pytest.mark.parametrize(
    ("prompt", "most", "message"),
    [
        ([], 5, "empty prompt"),
        ([1, 128], 5, "token id 128; the vocabulary has 128"),
        ([1, -1], 5, "token id -1"),
        ([1], 0, "asks for 0 new tokens"),
        ([1], -3, "asks for -3 new tokens"),
        ([1], None, "asks for None new tokens"),
        ([1], 2.5, "asks for 2.5 new tokens"),
        ([1], True, "asks for True new tokens"),
    ],
)
def test_s18_what_cannot_be_served_is_refused_and_the_other_request_goes_on(prompt, most, message):
    engine = Engine()
    other = engine.inbox.submit("other", [5, 6], 60)
    with pytest.raises(ValueError, match=message):
        engine.inbox.submit("bad", prompt, most)
    answers = engine.close()
    assert [len(a.token_ids) for a in answers.values()] == [60] and list(answers) == [other.rid]


def test_an_aborted_request_frees_its_blocks_and_its_neighbours_do_not_notice():
    alone = generate(NativeEngine(served(), attention="torch"), [[9, 8, 7]], 120)[0].token_ids
    engine = Engine()
    kept, gone = engine.inbox.submit("kept", [9, 8, 7], 120), engine.inbox.submit("gone", [3, 3], 2000)
    engine.wait_for(lambda: engine.scheduler.generated(gone) >= 20)
    assert engine.inbox.abort(gone)
    answers = engine.close()
    assert answers[kept.rid].token_ids == alone
    assert answers[gone.rid].reason == "aborted" and 20 <= len(answers[gone.rid].token_ids) < 2000


# --- text -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def writer():
    model = tiny("qwen2")
    model.tokenizer = Letters()
    return NativeEngine(model, attention="torch")


def test_s19_a_stop_string_across_tokens_ends_the_answer_and_is_no_part_of_it(writer):
    whole = generate(writer, [[4, 5, 6]], 30, texts=True)[0]
    assert whole.reason == "length" and whole.text == Letters().decode(whole.token_ids)
    stop = whole.text[20:27]  # begins within one token and ends within another
    at = whole.text.index(stop)
    cut = generate(writer, [[4, 5, 6]], 30, SamplingParams(stop=("zzz", stop)))[0]
    assert cut.reason == "stop" and cut.text == whole.text[:at]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    late = generate(writer, [[4, 5, 6]], len(cut.token_ids), SamplingParams(stop=(stop,)))[0]
    assert late.reason == "stop"  # the last token allowed completes it: one declared reason


def test_an_end_token_stops_unless_it_is_to_be_ignored():
    free = generate(NativeEngine(served(), attention="torch"), [[4, 5, 6]], 40)[0].token_ids
    end = free[10]
    at = free.index(end)
    model = tiny("llama", eos_token_id=end)
    engine = NativeEngine(model, attention="torch")
    kinds = [SamplingParams(), SamplingParams(ignore_eos=True), SamplingParams(stop_token_ids=(free[2],))]
    stops = generate(engine, [[4, 5, 6]] * 3, 40, kinds)
    assert stops[0].token_ids == free[: at + 1] and stops[0].reason == "stop"
    assert stops[1].token_ids == free and stops[1].reason == "length"
    assert stops[2].token_ids == free[: free.index(free[2]) + 1] and stops[2].reason == "stop"
    forced = generate(engine, [[4, 5, 6]], 40, answer_lens=[at + 9])[0]
    assert len(forced.token_ids) == at + 9 and forced.reason == "stop"


def test_a_seeded_request_gets_the_same_tokens_in_any_company():
    engine = NativeEngine(served(), attention="torch")
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=2)
    (alone,) = generate(engine, [[4, 5, 6]], 30, params)
    rng = np.random.default_rng(0)
    others = [rng.integers(0, 128, n).tolist() for n in (30, 3, 55, 12)]
    crowd = [SamplingParams(temperature=0.7, seed=i) if i % 2 else SamplingParams() for i in range(4)]
    together = generate(
        engine, [*others, [4, 5, 6]], 30, [*crowd, params], kv=Paged(240, 8, 0.0), max_num_seqs=3, token_budget=16
    )
    assert together[-1].token_ids == alone.token_ids
    assert len(alone.logprobs) == 30
    other_seed = generate(engine, [[4, 5, 6]], 30, SamplingParams(temperature=1.0, top_p=0.95, seed=8))[0]
    assert other_seed.token_ids != alone.token_ids


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [128]], {}, "prompt 1 has the token id 128"),
        ([[1], []], {}, "prompt 1 has an empty prompt"),
        ([[1]], {"sampling": SamplingParams(stop=("x",))}, "prompt 0 has stop strings"),
        ([[1], [2]], {"answer_lens": [3]}, "2 prompts, 1 answer_lens"),
        ([[1], [2]], {"answer_lens": [3, 0]}, "request 1 is to have 0 tokens"),
        ([[1]], {"texts": True}, "has no tokenizer"),
    ],
)
def test_s18_generate_refuses_before_it_runs(prompts, options, message, monkeypatch):
    monkeypatch.setattr(type(served()), "forward", None)
    with pytest.raises(ValueError, match=message):
        generate(NativeEngine(served(), attention="torch"), prompts, 5, **options)


def test_no_prompts_no_answers():
    assert generate(NativeEngine(served(), attention="torch"), [], 5) == []


def test_a_length_that_is_given_holds_whatever_the_tokens_are(writer):
    """Neither a stop string, nor a stop token, nor an end token shortens a replay; its text has all of it."""
    free = generate(writer, [[4, 5, 6]], 12, texts=True)[0]
    stops = SamplingParams(stop=(free.text[4:8],), stop_token_ids=tuple(free.token_ids[2:4]))
    assert len(generate(writer, [[4, 5, 6]], 12, stops)[0].token_ids) < 12
    by_token = generate(writer, [[4, 5, 6]], 12, SamplingParams(stop_token_ids=(free.token_ids[5],)), texts=True)[0]
    assert by_token.text == Letters().decode(by_token.token_ids[:-1])  # what ends an answer is no part of its text
    forced = generate(writer, [[4, 5, 6]], 12, stops, answer_lens=[12], texts=True)[0]
    assert (forced.token_ids, forced.text, forced.reason) == (free.token_ids, free.text, "stop")


def test_s18_an_inbox_refuses_stop_strings_that_nobody_can_find():
    """In the engine they would end everybody's run."""
    engine = Engine()
    other = engine.inbox.submit("other", [5, 6], 20)
    with pytest.raises(ValueError, match="'bad' has stop strings"):
        engine.inbox.submit("bad", [1], 5, SamplingParams(stop=("x",)))
    assert list(engine.close()) == [other.rid]


def test_samples_of_one_prompt_are_forks_of_it():
    """n = 4: the first computes the prompt, which is the token budget; the others compute one token each, in a copy of its last
    block. Each draws what it draws alone."""
    prompt = np.random.default_rng(1).integers(0, 128, 64).tolist()
    params = [SamplingParams(temperature=1.0, seed=i) for i in range(4)]
    kv = Prefix(640, 16, 0.0, copy_on_write=True)
    kv.use_hashes(16)
    engine = Engine(kv=kv, token_budget=64)
    requests = [engine.inbox.submit(str(i), prompt, 20, p) for i, p in enumerate(params)]
    answers = [engine.close()[r.rid].token_ids for r in requests]
    assert sorted(r._cached for r in requests) == [0, 63, 63, 63] and engine.scheduler.cached_tokens == 3 * 63
    assert answers == [a.token_ids for a in generate(NativeEngine(served(), attention="torch"), [prompt] * 4, 20, params)]
    assert len({tuple(ids) for ids in answers}) == 4


# --- soak -----------------------------------------------------------------------------------------------------------------


def soak(num, kv, preemption):
    """`num` requests, about a quarter of them aborted or timed out at random; returns (reasons, bytes by the quarter)."""
    rng, engine = np.random.default_rng(0), Engine(kv=kv, preemption=preemption, max_num_seqs=16, token_budget=64)
    memory, requests = [], []
    prefixes = [rng.integers(0, 128, 48).tolist() for _ in range(5)]
    for i in range(num):
        prompt = [
            *prefixes[rng.integers(5)][: int(rng.integers(0, 48))],
            *rng.integers(0, 128, int(rng.integers(1, 40))).tolist(),
        ]
        requests.append(engine.inbox.submit(str(i), prompt, int(rng.integers(1, 40))))
        if rng.random() < 0.25:
            engine.inbox.abort(requests[max(i - int(rng.integers(0, 30)), 0)])
        engine.wait_for(lambda: i - len(engine.answers.by_rid) <= 60)  # noqa: B023
        if i % (num // 4) == num // 4 - 1:
            gc.collect()
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    answers = engine.close()
    assert len(answers) == num
    return [a.reason.split(":")[0] for a in answers.values()], memory


def kinds():
    prefix = Prefix(640, 16, 0.0)
    prefix.use_hashes(16)
    copying = Prefix(640, 4, 0.0, copy_on_write=True)
    copying.use_hashes(4)
    return {
        "paged": (Paged(640, 16, 0.0), recompute()), "prefix_swap": (prefix, swap(cpu=320, disk=160)),
        "copying_swap": (copying, swap(cpu=320, disk=160)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["paged", "prefix_swap", "copying_swap"])
def test_a_short_soak(kind):
    reasons, _ = soak(100, *kinds()[kind])
    assert reasons.count("length") > 50 and reasons.count("aborted") > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "prefix_swap", "copying_swap"])
def test_a_soak_of_2000_requests(kind):
    """All blocks come back, and memory stays flat after the first half."""
    torch.set_num_threads(1)
    reasons, memory = soak(2000, *kinds()[kind])
    assert set(reasons) == {"length", "aborted"} and reasons.count("aborted") > 100
    assert memory[-1] - memory[1] < 30_000  # KiB
