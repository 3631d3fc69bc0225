"""The service: streams, keys, the bound, aborts and timeouts in every phase, failures, the end, and a soak."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time

import numpy as np
import pytest
import torch
from native import Spoiling, served
from serving import Gate, plain_engine, read, run, until, writer

from lengthwise.engine.native.generate import generate
from lengthwise.engine.native.sampling import SamplingParams
from lengthwise.engine.server.health import Down, Full
from lengthwise.engine.server.service import Service
from lengthwise.sched import Phase, recompute, swap
from lengthwise.sched.admission import MaxTokens, Quantile
from lengthwise.sched.batching import Chunked, PrefillFirst
from lengthwise.sched.kv import Paged, Prefix
from lengthwise.sched.policies import FCFS, SJF
from lengthwise.sched.victims import LeastComputed

torch.set_num_threads(1)

PROMPT = [9, 8, 7]


def alone(num: int) -> list[int]:
    """What PROMPT is answered when nobody else is there."""
    return generate(plain_engine(), [PROMPT], num)[0].token_ids


# --- streams --------------------------------------------------------------------------------------------------------------


def test_twenty_streams_at_once_say_what_generate_says():
    engine, rng = writer(), np.random.default_rng(0)
    prompts = [rng.integers(0, 128, int(n)).tolist() for n in rng.integers(1, 90, 20)]
    whole = generate(engine, prompts, 40, texts=True)
    kinds = [
        lambda i: SamplingParams(),
        lambda i: SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=2),
        lambda i: SamplingParams(stop=("zzz", whole[i].text[20:27])),  # begins within one token and ends within another
        lambda i: SamplingParams(stop=(whole[i].text[-3:] + "#",)),  # is held back when the answer ends
        lambda i: SamplingParams(logprobs=0, min_new_tokens=3, stop_token_ids=(whole[i].token_ids[8],)),
    ]
    params = [kinds[i % 5](i) for i in range(20)]
    expected = generate(engine, prompts, 40, params, texts=True)
    assert {a.reason for a in expected} == {"stop", "length"}

    async def main(service):
        streams = [await service.submit(str(i), p, 40, params[i]) for i, p in enumerate(prompts)]
        return await asyncio.gather(*map(read, streams))

    for got, answer in zip(run(main, engine), expected, strict=True):
        assert (got.token_ids, got.text, got.reason) == (answer.token_ids, answer.text, answer.reason)
        assert [e.token_id for e in got.logprobs] == [e.token_id for e in answer.logprobs]
        assert [e.logprob for e in got.logprobs] == pytest.approx([e.logprob for e in answer.logprobs], abs=1e-4)
        assert [len(e.top) for e in got.logprobs] == [len(e.top) for e in answer.logprobs]
        times = [d.time for d in got.deltas]
        assert times == sorted(times) and all(d.token_ids or d.reason for d in got.deltas)


def test_a_model_without_a_tokenizer_gives_tokens_alone():
    async def main(service):
        return await read(await service.submit("x", PROMPT, 12))

    got = run(main)
    assert got.token_ids == alone(12) and got.text == "" and got.logprobs == []


def test_a_reader_that_never_reads_costs_its_answer_and_no_more():  # V4
    async def main(service):
        silent = await service.submit("silent", PROMPT, 300)
        other = await read(await service.submit("other", PROMPT, 300))
        await until(lambda: not service._live.streams)
        assert len(silent._token_ids) == 300 and not service._executor.generations
        delta = await silent.next()
        assert delta.token_ids == other.token_ids and delta.reason == "length" and delta.time <= other.deltas[0].time
        with pytest.raises(RuntimeError, match="'silent' has ended"):
            await silent.next()

    run(main)


def test_a_reader_may_give_up_waiting_and_come_back():
    async def main(service):
        gate = Gate(service)
        stream = await service.submit("x", PROMPT, 20)
        await gate.shut()
        so_far = []
        for _ in range(3):
            with pytest.raises(TimeoutError):
                while True:
                    so_far += (await asyncio.wait_for(stream.next(), 0.01)).token_ids
            await gate.step()
        gate.open()
        return so_far + (await read(stream)).token_ids

    assert run(main) == alone(20)


def test_cached_tokens_are_known_from_the_first_token_on():
    async def main(service):
        first, prompt = [], list(range(50))
        for key in "ab":
            stream = await service.submit(key, prompt, 5)
            answer = await read(stream)
            first.append((stream.num_cached, answer.token_ids))
        return first

    (cold, tokens), (warm, same) = run(main, kv=Prefix(1024, 16, 0.0))
    assert (cold, warm) == (0, 48) and tokens == same


# --- keys and values ------------------------------------------------------------------------------------------------------


def test_a_key_names_one_live_request_and_is_free_once_its_end_is_read():  # S17
    async def main(service):
        first = await service.submit("x", PROMPT, 60)
        with pytest.raises(ValueError, match="'x' is in use"):
            await service.submit("x", [1], 5)
        answers = [await read(first)]
        for i in range(60):  # at once, before anybody could clean up later
            answers.append(await read(await service.submit("x", PROMPT, 1 + i % 3)))
        return answers

    first, *others = run(main)
    tokens = alone(60)
    assert first.token_ids == tokens
    assert [a.token_ids for a in others] == [tokens[: 1 + i % 3] for i in range(60)]


@pytest.mark.parametrize(
    ("prompt", "num", "params", "fields", "message"),
    [
        ([], 5, {}, {}, "empty prompt"),
        ([128], 5, {}, {}, "token id 128; the vocabulary has 128"),
        ([1.5], 5, {}, {}, "no whole numbers"),
        ([1], 0, {}, {}, "asks for 0 new tokens"),
        ([1], 2.5, {}, {}, "asks for 2.5 new tokens"),
        ([1], None, {}, {}, "asks for None new tokens"),
        ([1], 5, {"stop": ("x",)}, {}, "no tokenizer"),
        ([1], 5, {}, {"priority": float("nan")}, "priority nan"),
        ([1], 5, {}, {"timeout": 0}, "timeout 0: seconds above 0"),
        ([1], 5, {}, {"timeout": float("nan")}, "timeout nan"),
        ([1], 5, {}, {"predicted_len": float("nan")}, "predicted length nan"),
        ([1], 5, {}, {"predicted_len": -1}, "predicted length -1"),
        ([1], 5, {}, {"predicted_len": float("inf")}, "predicted length inf"),
        ([1], 5, {}, {"answer_len": 3}, "only replay takes"),
        ([1] * 200, 2000, {}, {}, "prompt 200 . max_new_tokens 2000 = 2200 tokens, max_model_len is 2048"),  # V6
        ([1] * 1000, 500, {}, {}, "needs 94 KV blocks, the pool has 64"),
    ],
)
def test_a_bad_value_is_refused_and_changes_nothing(prompt, num, params, fields, message):  # S18
    async def main(service):
        other = await service.submit("other", PROMPT, 40)
        with pytest.raises(ValueError, match=message):
            await service.submit("bad", prompt, num, SamplingParams(**params), **fields)
        assert list(service._live.streams.values()) == [other] and service._inbox.num_live == 1
        assert not service._inbox._timed and service._scheduler.counts["rejected"] == 0
        answers = await read(other), await read(await service.submit("bad", PROMPT, 40))
        assert answers[0].token_ids == answers[1].token_ids and service._tally.num_invalid == 1

    run(main, kv=Paged(1024, 16, 0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 2049}, "max_model_len 2049: from 2 to the 2048 positions of tiny-llama"),
        ({"max_waiting": 0}, "max_waiting 0, the least is 1"),
        ({"prediction_deadline": float("nan")}, "prediction_deadline nan"),
        ({"max_num_seqs": 65}, "max_num_seqs 65 must be from 1 to token_budget 64"),
        ({"predictor": object()}, "needs fallback_len"),
        ({"predictor": object(), "fallback_len": -1.0}, "predicted length -1"),
    ],
)
def test_limits_are_checked_before_anything_is_made(options, message, monkeypatch):
    monkeypatch.setattr("lengthwise.engine.server.service.warm_up", None)
    options = {"max_num_seqs": 8, "token_budget": 64, "max_model_len": 2048, **options}
    with pytest.raises(ValueError, match=message):
        Service(plain_engine(), Paged(1024, 16, 0.0), FCFS(), Chunked(), recompute(), **options)


def test_a_replay_forces_lengths_and_tells_the_scheduler_nothing():
    async def main(service):
        forced = await service.submit("x", PROMPT, 100, SamplingParams(stop_token_ids=(end,)), answer_len=70)
        free = await service.submit("y", PROMPT, 100, SamplingParams(stop_token_ids=(end,)))
        assert forced.request.max_new_tokens == free.request.max_new_tokens == 100 and forced.request.prediction is None
        with pytest.raises(ValueError, match="asks for 0 tokens as its answer"):
            await service.submit("z", PROMPT, 100, answer_len=0)
        answers = await asyncio.gather(read(forced), read(free))
        assert not service._inbox.answer_lens
        return answers

    tokens = alone(70)
    end = tokens[9]
    forced, free = run(main, replay=True)
    assert forced.token_ids == tokens and forced.reason == "stop"
    assert free.token_ids == tokens[: tokens.index(end) + 1] and free.reason == "stop"


# --- the bound ------------------------------------------------------------------------------------------------------------


def test_at_most_so_many_wait_and_those_finish():  # V3
    async def main(service):
        gate, streams, full = Gate(service), [], []
        gate.shut_at_next()
        for i in range(100):
            try:
                streams.append(await service.submit(str(i), PROMPT, 10))
            except Full as error:
                full.append(error)
            assert service.num_waiting <= 8
            if i == 1:
                await until(lambda: gate.held)  # one runs, or both
        await until(lambda: gate.held)
        assert len(streams) + len(full) == 100 and 8 < len(streams) <= 10 and service.num_waiting <= 8
        assert all(e.retry_after == 1.0 for e in full) and "8 requests wait, the most is 8" in str(full[0])
        assert service._tally.num_full == len(full)
        gate.open()
        answers = await asyncio.gather(*map(read, streams))
        assert {tuple(a.token_ids) for a in answers} == {tuple(tokens)}
        return await read(await service.submit("later", PROMPT, 10))

    tokens = alone(10)
    assert run(main, max_num_seqs=2, max_waiting=8).token_ids == tokens


def test_who_is_refused_is_told_when_to_come_back_by_the_rate_of_late():
    async def main(service):
        service._live._ends.extend([0.0, 2.0, 4.0])
        service._clock._start -= 100 - service.now
        retry = [service._live.retry_after(n, 10.0) for n in (1, 8, 1000)]
        assert retry == [5.0, 40.0, 60.0]  # 2 ends in 10 s

    run(main)


# --- aborts and timeouts --------------------------------------------------------------------------------------------------


class Stuck:
    """A predictor that says nothing until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def predict(self, requests):
        assert self.go.wait(60)
        raise RuntimeError("nobody waits any more")


@pytest.mark.parametrize("how", ["abort", "timeout"])
@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.WAITING, Phase.PREFILLING, Phase.DECODING])
def test_who_is_stopped_in_any_phase_frees_everything_within_a_step(phase, how):
    predictor = Stuck()

    async def main(service):
        gate, limit = Gate(service), {"timeout": 50.0} if how == "timeout" else {}
        kept = await service.submit("kept", PROMPT, 60, predicted_len=1)
        await gate.shut()
        prompt = list(range(100)) if phase == Phase.PREFILLING else [3, 3]
        said = {} if phase == Phase.PENDING else {"predicted_len": 500}
        gone = await service.submit("gone", prompt, 500, **limit, **said)
        while gone.request.phase != phase or (phase == Phase.DECODING and service._scheduler.generated(gone.request) < 5):
            await gate.step()
        await gate.step()
        held = service._scheduler.kv.in_use
        if how == "abort":
            service.abort(gone)
        else:
            service._clock._start -= 100.0  # a long time passes
        await gate.step()
        there = service._scheduler.generated(kept.request) + kept.request.prompt_len
        assert service._scheduler.kv.in_use == -(-there // 16) <= held
        assert (held > service._scheduler.kv.in_use) == (phase > Phase.WAITING)
        ended = await read(gone)
        assert ended.reason == {"abort": "aborted", "timeout": "timeout"}[how]
        assert (len(ended.token_ids) >= 5) == (phase == Phase.DECODING)
        assert "gone" not in service._inbox._live
        gate.open()
        predictor.go.set()
        return await read(kept)

    options = {"max_num_seqs": 1 if phase == Phase.WAITING else 8, "token_budget": 16, "policy": SJF()}
    if phase == Phase.PENDING:
        options |= {"predictor": predictor, "fallback_len": 10, "prediction_deadline": 1000.0}
    kept = run(main, **options)
    assert kept.token_ids == alone(60) and kept.reason == "length"


def test_an_abort_is_of_a_request_and_never_meets_another_of_its_key():  # S17
    """The first has ended in the step loop and the event loop has not heard of it: its key is free, and taken again."""

    async def main(service):
        first = await service.submit("x", PROMPT, 5)
        while service._inbox.num_live:
            time.sleep(1e-3)
        second = await service.submit("x", PROMPT, 30)
        assert first._reason is None and "x" in service._inbox._live
        service.abort(first)
        return await read(second)

    answer = run(main)
    assert answer.reason == "length" and answer.token_ids == alone(30)


def test_an_idle_engine_notices_a_timeout():
    """Nothing is planned while all wait for predictions: the time itself has to wake the loop."""
    predictor = Stuck()

    async def main(service):
        answer = await read(await service.submit("x", PROMPT, 5, timeout=0.02))
        assert answer.reason == "timeout" and not answer.token_ids
        assert service._tally.reasons["timeout"] == 1
        predictor.go.set()

    run(main, policy=SJF(), predictor=predictor, fallback_len=10, prediction_deadline=1000.0)


def test_a_timeout_that_is_not_reached_does_nothing():
    async def main(service):
        answers = [await read(await service.submit(str(i), PROMPT, 10, timeout=1000.0)) for i in range(3)]
        await until(lambda: service._inbox.peek() > 0 and not service._inbox._timed)
        return answers

    assert [a.token_ids for a in run(main)] == [alone(10)] * 3


def test_a_text_that_is_cut_by_an_abort_has_all_that_came():
    engine = writer()
    whole = generate(engine, [PROMPT], 40, texts=True)[0]

    async def main(service):
        gate = Gate(service)
        stream = await service.submit("x", PROMPT, 400, SamplingParams(stop=(whole.text[10:14] + "#",)))
        await until(lambda: len(stream._token_ids) > 20)
        service.abort(stream)
        gate.open()
        return await read(stream)

    got = run(main, engine)
    assert got.reason == "aborted" and got.text == engine.model.tokenizer.decode(got.token_ids)


# --- failures -------------------------------------------------------------------------------------------------------------


def test_a_request_without_finite_logits_fails_alone():  # V7
    async def main(service):
        service._executor._sampler = Spoiling(128, lambda row: row.request.prompt_len == 2 and row.num_output == 7)
        kept, bad = await service.submit("kept", PROMPT, 60), await service.submit("bad", [3, 3], 60)
        answers = await asyncio.gather(read(kept), read(bad))
        assert service.health().ok and (await read(await service.submit("bad", PROMPT, 60))).token_ids == tokens
        return answers

    tokens = alone(60)
    kept, bad = run(main)
    assert kept.token_ids == tokens
    assert bad.reason == "failed: its greatest logit is nan, no token can be chosen" and len(bad.token_ids) == 7


def test_a_step_that_raises_ends_everybody_and_turns_health_red(caplog):  # V7
    async def main(service):
        inner, steps = service._executor.submit, []

        def submit(plan):
            steps.append(plan)
            if len(steps) == 20:
                raise RuntimeError("the device is gone")
            return inner(plan)

        service._executor.submit = submit
        assert service.health().ok
        streams = [await service.submit(str(i), PROMPT, 200) for i in range(12)]
        answers = await asyncio.gather(*map(read, streams))
        assert {a.reason for a in answers} == {"failed: the engine has failed (RuntimeError: the device is gone)"}
        assert answers[0].token_ids == tokens[:19] and answers[-1].token_ids == []
        health = service.health()
        assert not health.ok and health.error == "RuntimeError: the device is gone" and health.last_step_age == 0
        assert service._tally.reasons == {"abort": 0, "error": 12, "length": 0, "stop": 0, "timeout": 0}
        assert service._tally.wait.num == 12 and service._tally.e2e.num == 0
        with pytest.raises(Down, match="the device is gone"):
            await service.submit("late", PROMPT, 5)
        service.abort(streams[0])
        assert await service.drain(10.0) == 0

    tokens = alone(19)
    run(main, max_num_seqs=8)
    assert "the step loop has failed" in caplog.text


def test_a_stuck_step_shows_in_its_age():  # V7
    async def main(service):
        gate = Gate(service)
        assert service.health().last_step_age == 0
        stream = await service.submit("x", PROMPT, 30)
        await gate.shut()
        service._clock._start -= 100.0
        assert 100 <= service.health().last_step_age < 160
        gate.open()
        await read(stream)
        await until(lambda: service.health().last_step_age == 0)

    run(main)


def test_a_request_that_comes_while_the_loop_dies_is_told():
    async def main(service):
        def submit(plan):
            raise RuntimeError("gone")

        service._executor.submit = submit
        first = await service.submit("a", PROMPT, 5)
        service._thread.join(10)  # the event loop has not heard of it yet
        with pytest.raises(Down, match=r"gone|ended"):
            await service.submit("b", PROMPT, 5)
        assert (await read(first)).reason.startswith("failed: ")

    run(main)


# --- the end --------------------------------------------------------------------------------------------------------------


def test_a_drain_waits_for_who_lives_and_takes_nobody_in():
    async def main(service):
        stream = await service.submit("x", PROMPT, 100)
        draining = asyncio.create_task(service.drain(30.0))
        await asyncio.sleep(0)
        assert service.health().draining and service.health().ok
        with pytest.raises(Down, match="nothing more"):
            await service.submit("y", PROMPT, 5)
        answer = await read(stream)
        assert await draining == 0
        return answer

    assert run(main).token_ids == alone(100)


def test_a_drain_aborts_who_takes_too_long():
    async def main(service):
        gate = Gate(service)
        streams = [await service.submit(str(i), PROMPT, 2000) for i in range(3)]
        await gate.shut()
        draining = asyncio.create_task(service.drain(0.01))
        await asyncio.sleep(0.05)
        assert not draining.done()
        gate.open()
        assert await draining == 3
        assert {a.reason for a in [await read(s) for s in streams]} == {"aborted"}
        assert await service.drain(0.0) == 0

    run(main)


def test_a_close_ends_who_lives():
    streams = []

    async def main(service):
        streams.append(await service.submit("x", PROMPT, 2000))
        streams.append(await service.submit("y", PROMPT, 2000))

    run(main, max_num_seqs=1)
    assert [s._reason for s in streams] == ["aborted", "aborted"]


def test_a_service_starts_once_and_takes_nothing_before():
    service = Service(
        plain_engine(), Paged(1024, 16, 0.0), FCFS(), Chunked(), recompute(), max_num_seqs=8, token_budget=64, max_model_len=99
    )

    async def body():
        with pytest.raises(Down, match="has not started"):
            await service.submit("x", PROMPT, 5)
        assert service.health().ok
        await service.close()
        service.start(asyncio.get_running_loop())
        with pytest.raises(ValueError, match="starts once"):
            service.start(asyncio.get_running_loop())
        await service.close()

    asyncio.run(asyncio.wait_for(body(), 30))


# --- what nobody may read -------------------------------------------------------------------------------------------------


def test_neither_prompts_nor_outputs_are_logged(caplog):
    """One line for each that ends, whatever the end; the prompts' and answers' texts and ids in none."""
    caplog.set_level(logging.DEBUG)
    engine = writer()
    prompt = [101, 102, 103, 104]

    async def main(service):
        good = await service.submit("good", prompt, 20, prompt="the secret of the house")
        await read(good)
        long = await service.submit("long\nrequest 'x' ended by stop", prompt, 2000, prompt="the secret of the house")
        await until(lambda: long._come)
        service.abort(long)
        await read(long)
        with pytest.raises(ValueError):
            await service.submit("bad", prompt, 3000, prompt="the secret of the house")

        def fail(plan):
            raise RuntimeError("no")

        service._executor.submit = fail
        last = await read(await service.submit("last", prompt, 20, prompt="the secret of the house"))
        assert last.reason.startswith("failed")

    run(main, engine)
    answer = generate(engine, [prompt], 20, texts=True)[0]
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("server.live")]
    assert len(lines) == 3 and all(r.levelno == logging.INFO for r in caplog.records if r.name.endswith("server.live"))  # V8
    assert lines[0].startswith("request 'good' ended by length: 4 + 20 tokens, ") and "first token after" in lines[0]
    assert lines[1].startswith(r"request 'long\nrequest \'x\'" if "\\'" in lines[1] else 'request "long\\nrequest')
    for secret in ("secret", answer.text[:12], str(prompt)[1:-1], str(answer.token_ids[:3])[1:-1]):
        assert secret not in caplog.text


# --- the rules beside the policy ------------------------------------------------------------------------------------------


def crowded(**rules):
    """Six answers of 60 tokens at once in a pool for two: (preemptions, rid of whom the first hit, answers)."""

    async def main(service):
        gate = Gate(service)
        gate.shut_at_next()
        streams = [await service.submit(str(i), [i] * (40 if i == 0 else 4), 60) for i in range(6)]
        await until(lambda: service._inbox.num_live == 6)
        gate.open()
        answers = [(await read(stream)).token_ids for stream in streams]
        hit = [s.request for s in streams if s.request._num_preemptions]
        first = min(hit, key=lambda r: r._resumes[0]).rid if hit else None
        return service._scheduler.num_preemptions, first, answers

    return run(main, kv=Paged(200, 1, 0.0), **rules)


def test_an_admission_and_a_victim_rule_reach_the_scheduler():
    num, first, answers = crowded()
    assert num > 0 and first != 0 and {len(a) for a in answers} == {60}
    assert crowded(admission=MaxTokens())[0] == 0

    class MostComputed(LeastComputed):
        def cost(self, req, ledger):
            return -super().cost(req, ledger)

    num, first, others = crowded(victim=MostComputed())
    assert num > 0 and first == 0 and others == answers


def test_an_admission_that_needs_lengths_is_heeded_as_a_policy_is():
    async def main(service):
        with pytest.raises(ValueError, match="has no predicted_len"):
            await service.submit("x", PROMPT, 9)
        return await read(await service.submit("y", PROMPT, 9, predicted_len=9))

    assert len(run(main, admission=Quantile(0.9)).token_ids) == 9


# --- soak -----------------------------------------------------------------------------------------------------------------


def kinds():
    prefix = Prefix(640, 16, 0.0)
    return {
        "paged": {"kv": Paged(640, 16, 0.0)},
        "prefill_first": {"kv": Paged(640, 16, 0.0), "batching": PrefillFirst()},
        "prefix_swap": {"kv": prefix, "preemption": swap(cpu=320, disk=160)},
    }


@pytest.mark.parametrize("kind", ["paged", "prefill_first", "prefix_swap"])
def test_a_soak_of_300_requests(kind):
    rng, engine = np.random.default_rng(1), writer()
    prefixes = [rng.integers(0, 128, 48).tolist() for _ in range(5)]

    async def one(service, i, done):
        cut = prefixes[rng.integers(5)][: int(rng.integers(0, 48))]
        prompt = [*cut, *rng.integers(0, 128, int(rng.integers(1, 15))).tolist()]
        params = (
            SamplingParams(temperature=1.0, seed=i, top_k=int(rng.integers(0, 9))) if rng.random() < 0.4 else SamplingParams()
        )
        timeout = float(rng.uniform(0.001, 0.3)) if rng.random() < 0.2 else None
        num = int(rng.integers(1, 40))
        stream = await service.submit(str(i), prompt, num, params, timeout=timeout)
        if rng.random() < 0.25:
            await asyncio.sleep(float(rng.uniform(0, 0.05)))
            service.abort(stream)
        answer = await read(stream)
        assert len(answer.token_ids) <= num and (answer.reason != "length" or len(answer.token_ids) == num)
        assert answer.text == engine.model.tokenizer.decode(answer.token_ids)
        done.append(answer.reason)

    async def main(service):
        done: list[str] = []
        tasks = []
        for i in range(300):
            await until(lambda: len(service._live.streams) < 60)
            tasks.append(asyncio.create_task(one(service, i, done)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        service.idle_check()
        return done

    done = run(main, engine, max_num_seqs=16, check=False, **kinds()[kind])
    assert len(done) == 300 and set(done) == {"length", "aborted", "timeout"}
    assert done.count("length") > 100 and done.count("aborted") > 5


def test_garbage_is_not_looked_for_in_what_was_loaded_while_somebody_may_wait():
    async def main(service):
        return gc.get_freeze_count()

    assert run(main) > 1000 and gc.get_freeze_count() == 0


def test_the_same_engine_is_served_again():
    """A service leaves nothing behind in the model."""
    engine = plain_engine()

    async def main(service):
        return (await read(await service.submit("x", PROMPT, 30))).token_ids

    assert run(main, engine) == run(main, engine) == alone(30)
    assert served() is engine.model
