"""What the HTTP server refuses: with a status, OpenAI's JSON error, and without harm to anybody else."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from fake_service import OPEN, Fake
from pydantic import ValidationError

from lengthwise.engine.server.app import make_app
from lengthwise.engine.server.prompts import Prompts
from lengthwise.engine.server.protocol import CompletionBody
from lengthwise.engine.server.settings import Settings

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "hello"}]
ASCII = {"content-type": "application/json"}


def talk(work, service=None, settings=OPEN):
    """What the coroutine function `work` makes of a client of a server over `service`."""

    async def run():
        transport = httpx.ASGITransport(make_app(service or Fake(), settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await work(client)

    return asyncio.run(run())


def post(path, service=None, settings=OPEN, **request):
    return talk(lambda client: client.post(path, **request), service, settings)


def error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "5", True, 10**30])
def test_s18_lengths_that_are_none_are_refused(field, value):
    service = Fake()
    assert error(post(CHAT, service, json={"messages": TURNS, field: value}), 400)["param"] in (field, "messages")
    assert not service.asked


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": ["a", ""]}])
def test_s18_an_empty_prompt_is_refused_and_what_came_with_it_is_let_go(body):
    service = Fake(hold=True)
    error(post(COMPLETION, service, json=body), 400)
    assert not service.live and len(service.aborted) == len(service.asked)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"), ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, None), ({"temperature": True}, "temperature"),
        ({"top_p": 0}, None), ({"top_p": [1]}, "top_p"), ({"n": 0}, "n"), ({"n": 1.5}, "n"), ({"stop": ""}, None),
        ({"stop": [1]}, "stop"), ({"seed": 2**70}, None), ({"stream": "yes"}, "stream"), ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 3}, "logprobs"), ({"slo": {"ttft": 0}}, "slo"),
        ({"slo": {"tfft": 1}}, "slo"), ({"timeout": 0}, "timeout"), ({"predicted_len": -1}, "predicted_len"),
        ({"answer_len": 0}, "answer_len"), ({"user": "u" * 300}, "user"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"best_of": 2}, None), ({"tools": [{"type": "function"}]}, None), ({"logit_bias": {"5": 1}}, None),
        ({"response_format": {"type": "json_object"}}, None), ({"priority": 10**400}, "priority"),
    ],
)  # fmt: skip
def test_v5_values_that_are_none_are_named(body, param):
    service = Fake()
    assert error(post(CHAT, service, json={"messages": TURNS, **body} if body else {}), 400)["param"] == param
    assert not service.asked


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"messages": [', b"[1]", b'"x"', b"null", b'{"prompt": "\xff\xfe"}', b"\x00", b'{"prompt": "\\ud800"}',
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
     b'{"prompt": "a", "priority": -Infinity}', b"[" * 50_000,
     b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": [1.5]}', b'{"prompt": [true]}', b'{"prompt": {"a": 1}}'],
)  # fmt: skip
def test_v5_bodies_that_are_none_get_an_error_at_once(content):
    begin = time.perf_counter()
    error(post(COMPLETION, content=content, headers=ASCII), 400)
    assert time.perf_counter() - begin < 60  # whatever the machine does: not for ever


def test_v5_a_body_that_is_not_sent_as_json():
    error(post(COMPLETION, data={"prompt": "a"}), 400)
    error(post(COMPLETION, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}), 400)


@pytest.mark.parametrize(
    ("request_", "settings", "status"),
    [
        (("POST", CHAT, {"json": {}}), {}, 400), (("POST", CHAT, {"content": b"{"}), {}, 400),
        (("POST", CHAT, {"json": {"messages": TURNS, "model": "x"}}), {}, 404), (("GET", "/nothing", {}), {}, 404),
        (("GET", CHAT, {}), {}, 405), (("POST", CHAT, {"content": b" " * 100}), {"max_body": 50}, 413),
        (("GET", "/v1/models", {}), {"api_key": "k"}, 401), (("POST", CHAT, {"json": {"messages": TURNS}}), {"full": 0}, 429),
        (("POST", CHAT, {"json": {"messages": TURNS}}), {"down": "gone"}, 503),
        (("POST", CHAT, {"json": {"messages": TURNS}}), {"live": None}, 500),
    ],
)  # fmt: skip
def test_an_error_has_the_id_of_its_call(request_, settings, status):
    service, (method, path, given) = Fake(), request_
    for name in ("full", "down", "live"):
        setattr(service, name, settings.get(name, getattr(service, name)))
    settings = Settings(port=0, **{k: v for k, v in settings.items() if k in ("max_body", "api_key")})

    async def work():
        transport = httpx.ASGITransport(make_app(service, settings), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            first = await client.request(method, path, headers={"x-request-id": "mine"}, **given)
            return first, await client.request(method, path, headers={"x-request-id": "x" * 300}, **given)

    response, unfit = asyncio.run(work())
    error(response, status)
    assert response.headers.get_list("x-request-id") == ["mine"] and "x-request-id" not in unfit.headers


def test_v5_an_unknown_model_path_and_method():
    found = error(post(CHAT, json={"messages": TURNS, "model": "gpt-5"}), 404)
    assert found["code"] == "model_not_found" and "tiny-bytes" in found["message"]
    error(post("/v1/nothing", json={}), 404)
    error(talk(lambda client: client.get(CHAT)), 405)


def test_v5_a_body_over_the_limit_is_not_kept_however_it_is_sent():
    small = Settings(port=0, max_body=1000)

    async def pieces():
        for _ in range(10):
            yield b" " * 200

    assert "1000" in error(post(COMPLETION, settings=small, content=b" " * 1001, headers=ASCII), 413)["message"]
    error(post(COMPLETION, settings=small, content=pieces(), headers=ASCII), 413)
    body = b'{"prompt": "a"}'
    assert post(COMPLETION, settings=small, content=body + b" " * (1000 - len(body)), headers=ASCII).status_code == 200


def test_v6_a_prompt_that_is_too_long_names_what_is_given_allowed_and_asked():
    service = Fake()
    found = error(post(COMPLETION, service, json={"prompt": "a" * 513, "max_tokens": 7}), 400)
    assert all(number in found["message"] for number in ("513", "512", "7"))
    assert found["param"] == "prompt" and found["code"] == "context_length_exceeded" and not service.asked
    error(post(COMPLETION, service, json={"prompt": "a" * 506, "max_tokens": 7}), 400)
    assert post(COMPLETION, service, json={"prompt": "a" * 505, "max_tokens": 7}).status_code == 200
    long = [{"role": "user", "content": "a" * 600}]
    assert "600" not in error(post(CHAT, json={"messages": long}), 400)["message"]  # counted with the template
    found = error(post(COMPLETION, settings=Settings(port=0, max_prompt_tokens=9), json={"prompt": "a" * 10}), 400)
    assert "10 tokens" in found["message"] and "may have 9" in found["message"]


def test_limits_on_answers_and_stops():
    tight = Settings(port=0, max_n=3, max_stops=2, max_stop_len=4)
    error(post(COMPLETION, settings=tight, json={"prompt": ["a", "b"], "n": 2}), 400)
    error(post(COMPLETION, settings=tight, json={"prompt": "a", "stop": ["a", "b", "c"]}), 400)
    error(post(COMPLETION, settings=tight, json={"prompt": "a", "stop": "aaaaa"}), 400)
    assert post(COMPLETION, settings=tight, json={"prompt": "a", "n": 3, "stop": ["aaaa", "b"]}).status_code == 200


def test_echo_and_logprobs_exclude_each_other():
    error(post(COMPLETION, json={"prompt": "a", "echo": True, "logprobs": 1}), 400)


@pytest.mark.parametrize("key", ["", "x" * 257, "a\u00e9".encode().decode("latin-1")])
def test_a_request_id_that_no_log_should_hold(key):
    error(post(CHAT, json={"messages": TURNS}, headers={"x-request-id": key.encode("latin-1")}), 400)


@pytest.mark.parametrize("value", ["0", "-5", "soon", "inf", "nan"])
def test_objectives_in_headers_are_checked(value):
    assert error(post(CHAT, json={"messages": TURNS}, headers={"x-slo-ttft-ms": value}), 400)["param"] == "x-slo-ttft-ms"


def test_s17_an_id_names_one_live_request():
    service = Fake(step=1e-3)

    async def work(client):
        body, mine = {"messages": TURNS, "max_tokens": 30}, {"x-request-id": "x"}
        first = asyncio.ensure_future(client.post(CHAT, json=body, headers=mine))
        while not service.live:
            await asyncio.sleep(1e-3)
        second = await client.post(CHAT, json=body, headers=mine)
        return await first, second, await client.post(CHAT, json=body, headers=mine)

    first, second, third = talk(work, service)
    assert "in use" in error(second, 400)["message"]
    assert first.json()["choices"] == third.json()["choices"] and not service.aborted


def test_v3_a_full_queue_says_when_to_come_back():
    service = Fake(step=1e-3)
    service.full = 8

    async def work(client):
        return await asyncio.gather(*(client.post(CHAT, json={"messages": TURNS, "max_tokens": 20}) for _ in range(40)))

    responses = talk(work, service)
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) == 32 and all(response.headers["retry-after"] == "3" for response in refused)
    assert all(error(response, 429)["code"] == "queue_full" for response in refused)
    assert sum(response.status_code == 200 for response in responses) == 8


def test_a_full_queue_takes_all_answers_of_a_call_or_none():
    service = Fake(hold=True)
    service.full = 2
    error(post(COMPLETION, service, json={"prompt": "a", "n": 3}), 429)
    assert len(service.aborted) == 2 and not service.live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status"), [("failed: logits are not finite", 500), ("rejected: needs 90 KV blocks, the pool has 80", 400)]
)
def test_v7_what_ends_before_its_first_token_has_a_status(reason, status, stream):
    class Early(Fake):
        async def _run(self, stream, prompt, cap, params):
            del self.live[stream.key]
            from lengthwise.engine.server.streams import Delta

            stream.put(Delta([], "", [], reason, 0.0))

    message = error(post(CHAT, Early(), json={"messages": TURNS, "stream": stream}), status)["message"]
    assert reason.partition(": ")[2] in message


def test_v7_a_failure_in_the_middle_of_a_stream_is_an_event():
    text = post(CHAT, Fake(step=1e-3, ending="failed: boom"), json={"messages": TURNS, "stream": True}).text
    *_, last, done, end = text.split("\n\n")
    assert '"error"' in last and "boom" in last and (done, end) == ("data: [DONE]", "")


def test_v7_an_engine_that_is_down_refuses():
    service = Fake()
    service.down = "the engine has failed: boom"
    assert "boom" in error(post(CHAT, service, json={"messages": TURNS}), 503)["message"]


def test_a_fault_of_ours_is_an_error_without_details():
    class Broken(Fake):
        async def submit(self, *arguments, **fields):
            raise KeyError("secret prompt")

    async def work():
        transport = httpx.ASGITransport(make_app(Broken(), OPEN), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.post(CHAT, json={"messages": TURNS})

    assert "secret" not in str(error(asyncio.run(work()), 500))


# --- the key --------------------------------------------------------------------------------------------------------------

LOCKED = Settings(host="0.0.0.0", port=0, api_key="s3cret")


@pytest.mark.parametrize("given", [None, "s3cret", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3crett", "bearer s3cret"])
def test_every_route_but_the_open_ones_wants_the_key(given):
    headers = {} if given is None else {"authorization": given}
    app = make_app(Fake(), LOCKED)
    paths = [(route.path, next(iter(route.methods))) for route in app.routes]
    assert len(paths) >= 10

    async def work(client):
        for path, method in [*paths, ("/health/", "GET"), ("//health", "GET"), ("/nothing", "GET")]:
            response = await client.request(method, path, headers=headers)
            if path in ("/health", "/version"):
                assert response.status_code == 200
            elif method == "HEAD":  # no body to look into
                assert response.status_code == 401
            else:
                assert error(response, 401)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"

    talk(work, settings=LOCKED)


def test_the_key_opens_and_metrics_are_open_where_the_setting_says_so():
    right = {"authorization": "Bearer s3cret"}
    assert post(CHAT, settings=LOCKED, json={"messages": TURNS}, headers=right).status_code == 200
    shown = Settings(port=0, api_key="s3cret", open_metrics=True)
    assert talk(lambda client: client.get("/metrics"), settings=shown).status_code == 200
    error(talk(lambda client: client.get("/v1/models"), settings=shown), 401)


def test_the_key_comes_before_the_body():
    error(post(COMPLETION, settings=Settings(port=0, api_key="k", max_body=10), content=b" " * 100), 401)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_without_a_key_only_loopback_is_bound(host):
    with pytest.raises(ValueError, match=r"server\.host"):
        Settings(host=host)
    assert Settings(host=host, api_key="k").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    assert Settings(host=host).api_key is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", -1), ("port", 70000), ("port", 1.5), ("max_body", 0), ("max_n", 0), ("max_stops", True), ("max_waiting", 0),
     ("slow_reader", 0), ("slow_reader", float("inf")), ("upload_timeout", 0),
     ("drain", 0), ("drain", "x"), ("max_prompt_tokens", 0),
     ("api_key", ""), ("api_key", 5)],
)  # fmt: skip
def test_settings_that_are_none_are_named(name, value):
    with pytest.raises(ValueError, match=rf"server\.{name}"):
        Settings(**{name: value})
    assert "s3cret" not in repr(LOCKED)


@pytest.mark.parametrize(
    "body", [{"prompt": "a", "n": 10**9, "echo": True}, {"prompt": ["a"] * 10_000}, {"prompt": [[1]] * 10_000}]
)
def test_v5_too_many_answers_are_refused_before_anything_is_made_of_them(body, monkeypatch):
    monkeypatch.setattr(Prompts, "completion", None)
    assert error(post("/v1/completions", json=body), 400)["param"] == "n"


@pytest.mark.parametrize("prompt", [[0.5] * 20_000, [{}] * 20_000, [[0.5]] * 20_000])
def test_v5_of_a_list_one_fault_is_told(prompt):
    with pytest.raises(ValidationError) as raised:
        CompletionBody(prompt=prompt)
    assert raised.value.error_count() <= 8


def test_what_is_not_served_is_named():
    assert "best_of is not served" in error(post(CHAT, json={"messages": TURNS, "best_of": 2}), 400)["message"]


def test_v3_a_full_queue_is_told_before_the_prompt_is_read(monkeypatch):
    monkeypatch.setattr(Prompts, "chat", None)
    service = Fake()
    service.full = 0
    assert error(post(CHAT, service, json={"messages": TURNS}), 429)
