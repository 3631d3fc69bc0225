"""The bench client against scripted servers: times, counts, failures, and the cell that comes of them."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pandas as pd
import pytest
from aiohttp import web
from client_laws import laws, rows
from fake_server import serving, words

import lengthwise
from lengthwise.experiments.bench.sender import Sender
from lengthwise.experiments.latencies import samples
from lengthwise.experiments.remote_stage import RemoteStage
from lengthwise.experiments.run import Run
from lengthwise.sched import Event, EventKind, Request
from lengthwise.sched.rehearsal import Script

N = 12


def bench(server, data=None, *, stage=None, **options) -> Run:
    data = rows() if data is None else data
    options = {"arrivals": "deterministic", "rate": 200.0, "num_requests": len(data), **options}
    return lengthwise.simulate(workload=data, executor=RemoteStage(server.url, **{"backoff": 0.01, **(stage or {})}), **options)


def test_a_cell_of_a_server_is_a_cell_like_any_other(tmp_path):
    async def paced(stream, body):
        await words(stream, body, gap=0.004)

    with serving(paced) as server:
        run = bench(server, rows(output_len=np.arange(1, N + 1)), stage={"server": {"policy": "fcfs", "engine": "fake"}})
    laws(run)
    requests = run.requests
    assert (requests["status"] == "finished").all() and requests["output_len"].tolist() == run.workload.output_len.tolist()
    asked = sorted(body["max_tokens"] for body in server.bodies)
    assert asked == list(range(1, N + 1)) and all(body["ignore_eos"] for body in server.bodies)
    assert run.metrics["ttft_mean"] > 0 and run.metrics["tpot_undefined"] == 1 and run.metrics["itl_n"] == sum(range(N))
    assert run.metrics["itl_mean"] > 0.003
    # what the server alone knows is not made up
    assert requests["first_scheduled"].isna().all() and "num_preemptions" not in requests and len(run.steps) == 0
    for name in ("max_wait", "wait_mean", "wait_share", "overtaking_max", "preemptions", "prefix_hit_tokens", "busy_share"):
        assert run.metrics[name] is None and run.summary["flags"][name], name
    cell, provenance = run.summary["cell"], run.summary["provenance"]
    assert (cell["policy"], cell["kv"], cell["predictor"]) == ("fcfs", "unknown", "unknown")
    assert (cell["executor"], cell["model"]) == ("remote", "fake")
    assert provenance["server"]["told"]["models"][0]["max_model_len"] == 4096 and provenance["server"]["stated"]["engine"]
    assert provenance["counting"] == {"by_usage": N, "miscounted": 0}
    run.save(tmp_path)
    again = Run.load(tmp_path)
    pd.testing.assert_frame_equal(again.requests, requests, check_dtype=False)
    pd.testing.assert_frame_equal(again.tokens, run.tokens)


def test_the_first_token_is_of_any_channel():  # M6, a tenth as long
    async def thinks(stream, body):
        await stream.send("", role="assistant")
        await asyncio.sleep(0.1)
        await stream.send(reasoning_content="hm")
        await asyncio.sleep(0.2)
        await stream.send("yes", finish="length")
        await stream.usage(2)
        await stream.done()

    with serving(thinks) as server:
        run = bench(server, rows(2, prompts=["one", "two"]), stage={"route": "chat"})
    laws(run)
    assert server.bodies[0]["messages"][0]["content"] in ("one", "two")
    ttft, content = run.metrics["ttft_mean"], run.metrics["first_content_mean"]
    assert 0.09 < ttft < content - 0.05
    assert run.metrics["ttft_sent_mean"] <= ttft


def test_fifteen_spaces_are_fifteen_tokens():  # M7
    async def spaces(stream, body):
        for _ in range(15):
            await stream.send(" ")
        await stream.send("", finish="length")
        if stream.number % 2:  # half of the servers of this world say nothing
            await stream.usage(15)
        await stream.done()

    with serving(spaces) as server:
        run = bench(server, rows(4, output_len=15))
    laws(run)
    assert run.requests["output_len"].tolist() == [15] * 4 and run.metrics["num_miscounted"] == 0
    assert run.summary["provenance"]["counting"]["by_usage"] == 2
    assert any("2 of 4 requests are counted by events" in mark for mark in run.summary["provenance"]["marks"])


def test_events_of_several_tokens_have_as_many_gaps():  # M5
    async def clumps(stream, body):
        for i, n in enumerate((4, 8, 12)):
            await stream.send("x y", usage={"completion_tokens": n}, finish="length" if i == 2 else None)
            await asyncio.sleep(0.02)
        await stream.usage(12)
        await stream.done()

    with serving(clumps) as server:
        run = bench(server, rows(3, output_len=12), stage={"continuous_usage": True})
    laws(run)
    assert server.bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert run.metrics["itl_n"] == 3 * 8 and run.requests["num_first"].tolist() == [4] * 3
    span = (run.requests["finish"] - run.requests["first_token"]).to_numpy()
    assert run.metrics["tpot_mean"] == pytest.approx((span / 8).mean())
    assert run.metrics["itl_mean"] == pytest.approx(span.sum() / 24)


def test_answers_that_nobody_saw_coming_have_no_first_token():
    async def silent(stream, body):
        await stream.send("", finish="length")
        await stream.usage(5)
        await stream.done()

    with serving(silent) as server:
        run = bench(server, rows(3))
    assert (run.requests["status"] == "finished").all() and run.requests["output_len"].tolist() == [5] * 3
    assert run.requests["first_token"].isna().all() and run.metrics["e2e_mean"] > 0
    for name in ("ttft_mean", "tpot_mean", "wait_mean", "max_wait", "attainment"):
        assert run.metrics[name] is None, name
    assert any("3 answers came without text" in mark for mark in run.summary["provenance"]["marks"])


def test_less_than_asked_for_is_what_is_counted():  # M8
    async def short(stream, body):
        await words(stream, {"max_tokens": 2})

    with serving(short) as server:
        run = bench(server, rows(3, output_len=9))
    laws(run)
    assert run.requests["output_len"].tolist() == [2] * 3 and (run.requests["reason"] == "length").all()
    assert run.metrics["output_tokens_per_s"] == pytest.approx(6 / run.summary["window"]["seconds"])


def test_one_request_that_always_fails_is_tried_a_few_times_and_counts():  # X11
    async def script(stream, body):
        if body["max_tokens"] == 9:
            raise web.HTTPInternalServerError(text="error")
        await words(stream, body)

    lens = np.full(N, 3)
    lens[4] = 9
    with serving(script) as server:
        run = bench(server, rows(output_len=lens), stage={"retries": 3}, slo={"ttft": 10.0, "tpot": None, "e2e": None})
    laws(run)
    failed = run.requests[run.requests["status"] == "failed"]
    assert len(failed) == 1 and failed["num_retries"].tolist() == [3] and len(server.bodies) == N + 3
    assert "HTTP 500" in failed["reason"].iloc[0] and failed["output_len"].iloc[0] == 0
    assert run.metrics["attainment"] == pytest.approx((N - 1) / N) and run.metrics["attainment_n"] == N
    assert run.metrics["ttft_mean"] is None and run.metrics["num_retries"] == 3  # a bound is no mean


def test_a_request_that_came_through_at_the_second_try_is_counted_from_when_it_was_due():  # X11
    with serving() as server:
        server.statuses = [503, 500]
        run = bench(server, rows(1), stage={"backoff": 0.05})
    laws(run)
    assert run.requests["status"].tolist() == ["finished"] and run.requests["num_retries"].tolist() == [2]
    assert run.metrics["ttft_mean"] > 0.15 < run.metrics["ttft_sent_mean"]


def test_refusals_are_rejections_and_are_not_tried_again():
    with serving() as server:
        server.statuses = [429, 400, 404]
        run = bench(server, rows(4), rate=20.0)
    laws(run)
    assert run.requests["status"].tolist() == ["rejected", "rejected", "failed", "finished"] and len(server.bodies) == 4
    assert "scripted 429" in run.requests["reason"].iloc[0]


def test_a_cut_stream_has_failed_and_keeps_its_tokens():
    async def cut(stream, body):
        if stream.number == 1:
            await stream.send("a")
            await stream.send("b")
            await asyncio.sleep(0.02)
            stream.cut()
            return
        await words(stream, body)

    with serving(cut) as server:
        run = bench(server, rows(3), rate=20.0)
    laws(run)
    row = run.requests.iloc[1]
    assert row["status"] == "failed" and "cut" in row["reason"] and row["output_len"] == 2 and row["num_retries"] == 0
    assert len(server.bodies) == 3


def test_where_nobody_is_served_the_reason_is_told():
    async def closed(stream, body):
        raise web.HTTPForbidden(text="go away")

    with serving(closed) as server:
        with pytest.raises(ValueError, match="0 of 3 requests finished, most of them: failed: HTTP 403: go away"):
            bench(server, rows(3))
        stage = {"measure_saturation": True, "burst": {"num_requests": 9, "concurrency": 3}}
        with pytest.raises(ValueError, match=r"only 0 of 9 requests of the burst were served.*go away"):
            bench(server, rows(9), rate=None, load=0.5, stage=stage)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (['{"error": {"message": "out of memory"}}'], "out of memory"),
        (["{no json"], "cannot be read"),
        (["[1, 2]"], "cannot be read"),
        (["[DONE]"], "without a finish_reason"),
        (['{"choices": [{"text": "a", "finish_reason": "moon"}]}', "[DONE]"], "'moon'"),
    ],
)
def test_streams_that_make_no_sense_fail_and_harm_nobody(events, says):
    async def script(stream, body):
        if stream.number == 0:
            for event in events:
                await stream.event(event)
            return
        await words(stream, body)

    with serving(script) as server:
        run = bench(server, rows(2), rate=20.0)
    laws(run)
    assert run.requests["status"].tolist() == ["failed", "finished"] and says in run.requests["reason"].iloc[0]


def test_silence_is_given_up_and_an_impatient_client_too():
    async def slow(stream, body):
        await stream.send("a")
        await asyncio.sleep(0.1 if stream.number == 1 else 1.0)
        await stream.send("b", finish="length")
        await stream.done()

    with serving(slow) as server:
        run = bench(server, rows(2), rate=50.0, stage={"stall": 0.5})
        timeout = np.array([0.3, 30.0])
        gone = bench(server, rows(2, columns={"timeout": timeout}), rate=50.0)
    laws(run)
    laws(gone)
    assert run.requests["status"].tolist() == ["timeout", "finished"] and "no byte" in run.requests["reason"].iloc[0]
    by_patience = gone.requests.sort_values("row")
    assert by_patience["status"].tolist() == ["timeout", "finished"] and by_patience["output_len"].tolist() == [1, 2]
    assert (by_patience["ended"] - by_patience["arrival"]).iloc[0] >= 0.3


def test_the_cap_stops_a_run_and_who_is_there_is_unfinished():
    async def endless(stream, body):
        for _ in range(1000):
            await stream.send("a")
            await asyncio.sleep(0.01)

    with serving(endless) as server:
        run = bench(server, rows(3), rate=100.0, window={"cap": 0.3})
    laws(run)
    assert (run.requests["status"] == "unfinished").all() and (run.requests["output_len"] >= 1).all()
    assert run.summary["window"]["run_end"] >= 0.3


def test_a_cap_on_concurrency_sends_in_clumps_and_says_so():  # A3, smaller
    waiting = []

    async def clumps(stream, body):  # lets eight go at once
        event = asyncio.Event()
        waiting.append(event)
        if len(waiting) == 8:
            await asyncio.sleep(0.05)
            for one in waiting:
                one.set()
            waiting.clear()
        await event.wait()
        await words(stream, body)

    with serving(clumps) as server:
        run = bench(server, rows(64), rate=500.0, stage={"concurrency": 8})
    laws(run)
    metrics, marks = run.metrics, run.summary["provenance"]["marks"]
    assert metrics["arrival_rps"] == pytest.approx(500) and metrics["arrival_cv"] == pytest.approx(0, abs=1e-6)
    assert metrics["sent_rps"] < 250 and metrics["sent_cv"] > 1.0
    assert any("not sent as they were due: 500/s" in mark for mark in marks)
    assert (run.requests["sent"] - run.requests["arrival"]).max() == pytest.approx(metrics["max_lateness"])
    assert metrics["ttft_mean"] > metrics["ttft_sent_mean"] + 0.05  # counted from when it was due: the wait is in it


def test_sends_do_not_wait_for_answers_and_keep_their_times():  # A2 in small: the whole of it is in e2e
    async def slow(stream, body):
        await asyncio.sleep(0.3)
        await words(stream, body)

    with serving(slow) as server:
        run = bench(server, rows(60, output_len=1), rate=200.0)
    laws(run)
    assert (run.requests["sent"] >= run.requests["arrival"]).all()
    assert (run.requests["sent"] < run.requests["first_token"].min()).sum() > 20


def test_sessions_wait_for_answers():
    with serving() as server:
        run = bench(server, rows(9, output_len=3), arrivals="closed_loop", rate=None, load=None)
    laws(run)
    assert (run.requests["status"] == "finished").all()


# --- what is sent -------------------------------------------------------------------------------------------------------


def test_lengths_by_replay_and_extensions_go_to_our_server_alone():
    columns = {"client": np.array(["a", "b"] * (N // 2)), "priority": np.arange(N, dtype=float)}
    with serving() as server:
        stage = {"lengths": "replay", "extensions": True, "body": {"temperature": 0.5}}
        run = bench(server, rows(columns=columns), stage=stage, predictor="oracle")
        bench(server, rows(columns=columns))
    ours, theirs = server.bodies[:N], server.bodies[N:]
    for body in ours:
        assert (body["answer_len"], body["max_tokens"], body["predicted_len"]) == (5, 50, 5.0) and "ignore_eos" not in body
        assert body["client"] in "ab" and body["slo"] == {"ttft": 2.0, "tpot": 0.1} and body["temperature"] == 0.5
    for body in theirs:
        assert not {"answer_len", "predicted_len", "client", "slo", "priority"} & set(body)
    assert run.summary["cell"]["predictor"] == "oracle" and run.requests["predicted"].tolist() == [5.0] * N
    assert run.summary["provenance"]["predictor"]["oracle"]


def test_free_lengths_leave_the_end_to_the_model():
    async def two(stream, body):
        await stream.send("a")
        await stream.send("", finish="stop")
        await stream.usage(2, prompt_tokens_details={"cached_tokens": 3})
        await stream.done()

    with serving(two) as server:
        run = bench(server, rows(3, censored=np.array([True, False, False])), stage={"lengths": "free"})
    laws(run)
    assert server.bodies[0]["max_tokens"] == 50 and "ignore_eos" not in server.bodies[0]
    assert (run.requests["reason"] == "stop").all() and run.requests["output_len"].tolist() == [2] * 3
    assert not run.requests["censored"].any() and run.requests["cached"].tolist() == [3] * 3
    assert run.metrics["prefix_hit_share"] == pytest.approx(3 / 7)


def test_prompts_are_texts_or_ids_made_by_the_seed():
    with serving() as server:
        bench(server, rows(2, prompts=["one", "two"]))
        names = [[1, 2], [1, 3]]
        for seed in (0, 0, 1):
            bench(server, rows(2, block_hashes=names, hash_tokens=3), stage={"seed": seed})
    texts, first, again, other = (server.bodies[i : i + 2] for i in (0, 2, 4, 6))
    assert {body["prompt"] for body in texts} == {"one", "two"}
    ids = [[body["prompt"] for body in part] for part in (first, again, other)]
    assert ids[0] == ids[1] != ids[2] and all(len(x) == 7 and 32 <= min(x) <= max(x) < 128 for x in ids[0])
    assert ids[0][0][:3] == ids[0][1][:3] and ids[0][0][3:6] != ids[0][1][3:6]


def test_the_key_comes_from_the_environment_and_is_kept_nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_KEY", "sesame-open")
    with serving() as server:
        run = bench(server, rows(2), stage={"api_key_env": "BENCH_KEY"})
    run.save(tmp_path)
    assert server.headers[0]["Authorization"] == "Bearer sesame-open"
    assert not any(b"sesame-open" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("stage", "options", "says"),
    [
        ({"target": None}, {}, "give the server's URL"),
        ({"target": "http://me:secret@here"}, {}, "a key is read from"),
        ({"route": "mail"}, {}, "completions or chat"),
        ({"route": "chat"}, {}, "no texts to chat with"),
        ({"lengths": "long"}, {}, "forced or replay or free"),
        ({"retries": -1}, {}, "the least is 0"),
        ({"concurrency": 0}, {}, "the least is 1"),
        ({"api_key_env": "NOBODY_HAS_SET_THIS"}, {}, "no such environment variable"),
        ({}, {"load": 0.9, "rate": None}, "a share of a rate that nobody has told"),
        ({}, {"predictor": "oracle"}, "executor.extensions=true"),
        ({"extensions": True}, {"predictor": "constant"}, "a learned one works in the server"),
        ({"extensions": True, "lengths": "free"}, {"predictor": "oracle"}, "no oracle can know"),
        ({"target": "http://127.0.0.1:9"}, {}, "no answer from /v1/models"),
    ],
)
def test_what_cannot_be_asked_is_refused(stage, options, says):
    node = {"_target_": "lengthwise.experiments.remote_stage.RemoteStage", "target": "http://127.0.0.1:1", **stage}
    options = {"arrivals": "deterministic", "rate": 9.0, **options}
    with pytest.raises(ValueError, match=says):
        lengthwise.simulate(workload=rows(), executor=node, num_requests=N, **options)


# --- load, waiting -------------------------------------------------------------------------------------------


def test_a_load_is_of_a_rate_stated_or_measured_by_a_burst():
    async def slow(stream, body):
        await asyncio.sleep(0.1)
        await words(stream, body)

    with serving(slow) as server:
        stated = bench(server, rate=None, load=0.5, saturation=300.0)
        stage = {"measure_saturation": True, "burst": {"num_requests": 40, "concurrency": 4}}
        measured = bench(server, rate=None, load=0.5, stage=stage)
    assert stated.summary["cell"]["rate"] == 150.0
    assert 0 < measured.summary["cell"]["rate"] <= 20.5  # half of four every 0.1 s


def test_waiting_is_unknown_only_where_the_server_does_not_tell():
    frame = pd.DataFrame({
        "arrival": [0.0, 1.0], "first_scheduled": [np.nan, np.nan], "first_token": [1.0, np.nan], "prompt_len": 5,
        "output_len": [3, 0], "max_new_tokens": 9, "finish": [2.0, np.nan], "ended": [2.0, 3.0],
        "status": ["finished", "failed"],
    })  # fmt: skip
    assert len(samples(frame, 3.0)["wait"].values) == 0
    assert len(samples(frame.assign(first_token=np.nan), 3.0)["wait"].values) == 0
    told = samples(frame.assign(first_scheduled=[0.5, np.nan]), 3.0)["wait"]
    assert told.values.tolist() == [0.5, 2.0] and told.open.tolist() == [False, True]


def test_a_timeout_that_is_due_with_its_arrival_is_told_once():
    with serving() as server:
        run = bench(server, rows(3, columns={"timeout": np.array([0.0, 30.0, 30.0])}), rate=50.0)
    assert run.requests.sort_values("row")["status"].tolist() == ["timeout", "finished", "finished"]


def test_counts_that_are_none_fail_their_request_alone():
    async def odd(stream, body):
        await stream.send(" w", finish="length")
        await stream.usage("12" if stream.number == 1 else 1)
        await stream.done()

    with serving(odd) as server:
        run = bench(server, rows(3, output_len=[1, 1, 1]), rate=20.0)
    assert run.requests["status"].tolist() == ["finished", "failed", "finished"]


def test_a_refusal_in_no_known_encoding_fails_its_request_alone():
    async def latin(stream, body):
        if stream.number:
            return await words(stream, body)
        stream.response = web.Response(status=400, body=b"caf\xe9", content_type="text/html")

    with serving(latin) as server:
        run = bench(server, rows(2), rate=20.0)
    assert run.requests["status"].tolist() == ["rejected", "finished"]


def test_what_cannot_be_kept_ends_the_run():
    def full(*_):
        raise OSError("no space left")

    async def ask(request, answer):
        return "stop"

    source = Script([Event(0.0, EventKind.ARRIVAL, Request(0, 0.0, 1))])
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(asyncio.wait_for(Sender(ask, full, time.monotonic).run(source), 20))
