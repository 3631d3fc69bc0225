"""What the HTTP server answers: OpenAI's shapes, whole and in chunks, and what reaches the engine of what was asked."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fake_service import OPEN, Fake

from lengthwise.engine.server.app import make_app
from lengthwise.sched import SLO

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


def ask(path, body=None, service=None, settings=OPEN, headers=None, method=None, about=None):
    service = service or Fake()

    async def call():
        app = make_app(service, settings, about)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            return await client.request(method or ("GET" if body is None else "POST"), path, json=body, headers=headers)

    return asyncio.run(call())


def chunks(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_chat():
    response = ask(CHAT, HELLO)
    out = response.json()
    assert response.status_code == 200 and out["object"] == "chat.completion" and out["id"].startswith("chatcmpl-")
    (choice,) = out["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 5
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    num = len("user: hello\nassistant: ")
    assert out["usage"] == {
        "prompt_tokens": num, "completion_tokens": 5, "total_tokens": num + 5, "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


def test_a_completion_and_its_echo():
    out = ask(COMPLETION, {"prompt": "abc", "max_tokens": 4, "model": "tiny-bytes"}).json()
    assert out["object"] == "text_completion" and out["model"] == "tiny-bytes" and len(out["choices"][0]["text"]) == 4
    echoed = ask(COMPLETION, {"prompt": "abc", "max_tokens": 4, "echo": True}).json()
    assert echoed["choices"][0]["text"] == "abc" + out["choices"][0]["text"]
    assert len(ask(COMPLETION, {"prompt": "abc"}).json()["choices"][0]["text"]) == 16  # OpenAI's default


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stream_has_a_chunk_a_step_and_says_the_same(path):
    body = {**(HELLO if path == CHAT else {"prompt": "hello", "max_tokens": 5})}
    whole = ask(path, body).json()
    out = chunks(ask(path, {**body, "stream": True}, Fake(step=1e-3)))
    assert len(out) == 5 and len({(c["id"], c["created"], c["model"], c["object"]) for c in out}) == 1
    choices = [c["choices"][0] for c in out]
    if path == CHAT:
        text, want = "".join(c["delta"]["content"] for c in choices), whole["choices"][0]["message"]["content"]
        assert choices[0]["delta"]["role"] == "assistant" and choices[0]["delta"]["content"]  # M6: never before a token
        assert not any("role" in c["delta"] for c in choices[1:])
    else:
        text, want = "".join(c["text"] for c in choices), whole["choices"][0]["text"]
    assert text == want
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["length"]
    assert not any("usage" in c for c in out)


def test_tokens_that_come_together_make_one_chunk():
    out = chunks(ask(CHAT, {**HELLO, "stream": True, "max_tokens": 200}))  # a fake that never waits
    assert len(out) < 200 and sum(len(c["choices"][0]["delta"]["content"]) for c in out) == 200


def test_usage_comes_last_without_choices_and_in_every_chunk_where_that_is_asked():
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    out = chunks(ask(CHAT, body, Fake(step=1e-3)))
    assert [bool(c["choices"]) for c in out] == [True] * 5 + [False]
    assert out[-1]["usage"]["completion_tokens"] == 5 and not any("usage" in c for c in out[:-1])
    body["stream_options"]["continuous_usage_stats"] = True
    out = chunks(ask(CHAT, body, Fake(step=1e-3)))
    assert [c["usage"]["completion_tokens"] for c in out] == [1, 2, 3, 4, 5, 5]


def test_several_prompts_and_several_answers_are_requests_of_their_own():
    service = Fake()
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "seed": 10, "temperature": 0.5}
    out = ask(COMPLETION, body, service, headers={"x-request-id": "x"}).json()
    assert [c["index"] for c in out["choices"]] == [0, 1, 2, 3]
    assert [key for key, *_ in service.asked] == ["x-0", "x-1", "x-2", "x-3"]
    assert [params.seed for *_, params, _ in service.asked] == [10, 11, 10, 11]
    assert out["usage"]["prompt_tokens"] == 3 and out["usage"]["completion_tokens"] == 12
    assert out["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    streamed = chunks(ask(COMPLETION, {**body, "stream": True, "echo": True}, Fake(step=1e-3)))
    texts = {i: "".join(c["choices"][0]["text"] for c in streamed if c["choices"][0]["index"] == i) for i in range(4)}
    assert texts == {i: p + c["text"] for i, (p, c) in enumerate(zip(["ab", "ab", "c", "c"], out["choices"], strict=True))}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("ab", [[64, 65]]), (["ab", "b"], [[64, 65], [65]]), ([65, 66], [[65, 66]]), ([[65], [66, 67]], [[65], [66, 67]])],
)
def test_prompts_are_texts_or_ids(prompt, ids):
    service = Fake()
    assert ask(COMPLETION, {"prompt": prompt, "max_tokens": 1}, service).status_code == 200
    assert [asked[1] for asked in service.asked] == ids
    assert [asked[4]["prompt"] for asked in service.asked] == [service.model.decode(each) for each in ids]


def test_content_in_parts_and_the_text_that_predictors_see():
    service = Fake()
    turns = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    assert ask(CHAT, {"messages": turns, "max_completion_tokens": 7, "max_tokens": 9}, service).status_code == 200
    ((_, ids, cap, _, fields),) = service.asked
    assert service.model.decode(ids) == "system: be short\nuser: one\ntwo\nassistant: "
    assert cap == 7 and fields["prompt"] == "one\ntwo"


def test_a_chat_that_says_no_length_gets_what_is_left():
    service = Fake()
    ask(CHAT, {"messages": HELLO["messages"]}, service)
    assert service.asked[0][2] == 512 - len(service.asked[0][1])


def test_logprobs():
    out = ask(COMPLETION, {"prompt": "a", "max_tokens": 2, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert len(out["tokens"]) == 2 and out["token_logprobs"] == [-0.5, -0.5]
    assert set(out["top_logprobs"][0].values()) == {-0.5, -9999.0}  # JSON has no infinity
    body = {**HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    entries = ask(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 2 and entries[0]["logprob"] == -0.5 and entries[0]["bytes"] == list(entries[0]["token"].encode())
    assert len(entries[0]["top_logprobs"]) == 2
    assert "content" in chunks(ask(CHAT, {**body, "stream": True}))[0]["choices"][0]["logprobs"]
    assert ask(CHAT, {**HELLO, "logprobs": True}).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_what_is_asked_beside_openais_fields_reaches_the_engine():
    service = Fake()
    body = {
        **HELLO, "priority": -1.5, "session": "s", "timeout": 9, "predicted_len": 40, "slo": {"e2e": 2.0, "ttft": 0.5},
        "user": "u", "min_tokens": 2, "ignore_eos": True, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1,
        "stop_token_ids": [3], "stop": ["a", "b"], "temperature": 0, "presence_penalty": None, "best_of": 1, "store": True,
    }  # fmt: skip
    headers = {"x-slo-ttft-ms": "100", "x-slo-tpot-ms": "20", "x-request-id": "mine"}
    response = ask(CHAT, body, service, headers=headers)
    assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
    ((key, _, _, params, fields),) = service.asked
    assert key == "mine" and fields["client"] == "u" and fields["slo"] == SLO(0.5, 0.02, 2.0)
    assert (fields["priority"], fields["session"], fields["timeout"], fields["predicted_len"]) == (-1.5, "s", 9, 40)
    assert (params.min_new_tokens, params.ignore_eos, params.top_k, params.min_p) == (2, True, 0, 0.1)
    assert (params.stop, params.stop_token_ids, params.temperature) == (("a", "b"), (3,), 0)
    ask(CHAT, {**HELLO, "stop": "x", "user": "u"}, service, headers={"x-gateway-inference-fairness-id": "gate"})
    assert service.asked[1][3].stop == ("x",) and service.asked[1][4]["client"] == "gate"
    assert service.asked[1][3].temperature == 1.0  # OpenAI's default
    ask(CHAT, {**HELLO, "client": "c", "user": "u"}, service)
    assert service.asked[2][4]["client"] == "c"


@pytest.mark.parametrize(("reason", "said"), [("stop", "stop"), ("aborted", "abort"), ("timeout", "timeout")])
def test_how_an_answer_ends(reason, said):
    out = ask(CHAT, HELLO, Fake(ending=reason)).json()
    assert out["choices"][0]["finish_reason"] == said and len(out["choices"][0]["message"]["content"]) == 2


def test_token_ids_where_they_are_asked_for():
    ids = ask(COMPLETION, {"prompt": "a", "max_tokens": 3, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    assert ids == [64 + (64 + i) % 26 for i in range(3)]


def test_models():
    about = {"policy": "srpt", "predictor": "artefact", "marks": ["transfer: ..."]}
    (card,) = ask("/v1/models", about=about).json()["data"]
    assert card["id"] == card["root"] == "tiny-bytes" and card["max_model_len"] == 512 and card["metadata"] == about
    assert ask("/v1/models/tiny-bytes").json()["id"] == "tiny-bytes" and ask("/v1/models/other/one").status_code == 404


def test_tokens_there_and_back():
    out = ask("/tokenize", {"prompt": "h\u00e9"}).json()
    assert out["count"] == 3 == len(out["tokens"]) and out["max_model_len"] == 512
    assert ask("/detokenize", {"tokens": out["tokens"]}).json() == {"prompt": "h\u00e9"}
    chat = ask("/tokenize", {"messages": HELLO["messages"]}).json()
    assert chat["count"] == len("user: hello\nassistant: ")
    for body in ({}, {"prompt": "a", "messages": HELLO["messages"]}):
        assert ask("/tokenize", body).status_code == 400
    assert ask("/detokenize", {"tokens": [257]}).status_code == 400


def test_what_operators_read():
    service = Fake()
    service.last_step_age = 1.25
    health = ask("/health", service=service)
    assert health.status_code == 200 and health.json()["last_step_age"] == 1.25  # V7: a stuck engine can be seen
    service.down = "the engine has failed: boom"
    red = ask("/health", service=service)
    assert red.status_code == 503 and "boom" in red.json()["error"]
    assert "vllm:num_requests_running 0.0" in ask("/metrics").text
    head = ask("/metrics", method="HEAD")
    assert head.status_code == 200 and head.headers["content-type"].startswith("text/plain")
    assert set(ask("/version").json()) == {"version"}
