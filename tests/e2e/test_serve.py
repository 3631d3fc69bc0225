"""`lengthwise serve` as a process of its own: real requests over real sockets, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest
from fake_service import CHAT as TEMPLATE
from fake_service import byte_tokenizer

from lengthwise.engine.native.tiny import tiny_model
from lengthwise.experiments.serve_app import Told, check_lengths
from lengthwise.predictors.constant import Constant
from lengthwise.sched import LengthDistribution

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TINY = ("model=tiny", "limits.kv_pool_tokens=4096", "executor.attention=torch")


class Served:
    """A server on a free port. `lines`: what it has printed."""

    def __init__(self, *overrides, env=None):
        self.lines = []
        command = [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main())", "serve"]
        self.process = subprocess.Popen(
            [*command, "server.port=0", "check=true", *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.start = self.wait_for(r"serving .* at (http://\S+) ")
        self.url = self.start[1]

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, pattern):
        for _ in range(6000):
            if found := re.search(pattern, "".join(self.lines)):
                return found
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError("".join(self.lines))

    def stop(self):
        """Its exit code, after SIGTERM where it has not been told to stop before."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reading.join(10)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def served(*overrides, **options):
    server = Served(*overrides, **options)
    try:
        yield server
    finally:
        assert server.stop() == 0, "".join(server.lines)
        bad = [line for line in server.lines if "ERROR" in line or "Traceback" in line or "CRITICAL" in line]
        assert not bad, "".join(server.lines)


@pytest.fixture(scope="module")
def tiny_server():
    with served(*TINY, "policy=srpt", "predictor=constant") as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model that reads and writes bytes, with a chat template."""
    path = tmp_path_factory.mktemp("bytes")
    tiny_model(vocab_size=257, max_positions=2048, eos_token_id=256).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def metric(client, name):
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def until(condition, seconds=60):
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it has not come to pass")


def idle(client):
    """Nothing lives and no block is held."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metric(client, f"vllm:{name}") for name in names)


def prompt(seed, n=20):
    return np.random.default_rng(seed).integers(0, 128, n).tolist()


def test_the_line_it_starts_with_and_what_it_says_of_itself(tiny_server):
    (line,) = [line for line in tiny_server.lines if line.startswith("serving ")]
    assert re.fullmatch(
        r"serving tiny-llama at http://127\.0\.0\.1:\d+ policy=srpt predictor=constant \(256 tokens\); no API key\n", line
    )
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "tiny-llama" and card["metadata"]["policy"] == "srpt"
        assert client.get("/health").json()["ok"] and client.head("/metrics").status_code == 200


def test_the_same_answer_whole_and_streamed(tiny_server):
    body = {"prompt": prompt(1), "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        whole = client.post(COMPLETION, json=body).json()
        assert len(whole["choices"][0]["token_ids"]) == 40 == whole["usage"]["completion_tokens"]
        assert whole["choices"][0]["finish_reason"] == "length"
        got = []
        with client.stream("POST", COMPLETION, json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    got.append(json.loads(line[6:])["choices"][0]["token_ids"])
        assert [t for ids in got for t in ids] == whole["choices"][0]["token_ids"] and len(got) > 1


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_give_their_blocks_back(tiny_server, stream):
    """More than there are slots, so that some are queued; the longest answers there are."""

    async def work():
        async with httpx.AsyncClient(base_url=tiny_server.url, timeout=60) as client:
            body = {"max_tokens": 3000, "stream": stream, "temperature": 0}
            calls = [asyncio.ensure_future(client.post(COMPLETION, json={**body, "prompt": prompt(i)})) for i in range(40)]
            await asyncio.sleep(1.0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(work())
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        until(lambda: idle(client))
        assert client.post(COMPLETION, json={"prompt": [1], "max_tokens": 2}).status_code == 200


# --- hostile company ------------------------------------------------------------------------------------------------------

VALUES = [
    None, True, -1, 0, 1, 2.5, 10**30, "", "x", "\u0000", [], [[]], {}, [1], ["a"], {"a": 1}, "NaN", [None], 1e308, "9" * 400,
]  # fmt: skip
FIELDS = [
    "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "logprobs", "seed", "model", "priority",
    "slo", "timeout", "predicted_len", "answer_len", "stop_token_ids", "stream_options", "min_tokens", "client",
]  # fmt: skip
RAW = [
    b"", b"{", b'{"prompt": [1], "temperature": NaN}', b'{"prompt": "\xff"}', b"[" * 3000, b"null", b"\x00" * 100,
    b'{"prompt": "\\ud800"}', b'{"prompt": [1], "max_tokens": 1e400}', b" " * (2**20 + 1),
]  # fmt: skip


def malformed(rng):
    """Arguments of one call that may be wrong in any way, and asks for little where it is not."""
    path = [COMPLETION, CHAT, "/tokenize", "/detokenize", "/v1/nothing"][rng.integers(5)]
    headers = {"content-type": "application/json"}
    if rng.random() < 0.3:
        return path, RAW[rng.integers(len(RAW))], headers
    body = {"prompt": prompt(int(rng.integers(1000)), 3), "max_tokens": 2}
    for _ in range(rng.integers(1, 4)):
        body[FIELDS[rng.integers(len(FIELDS))]] = VALUES[rng.integers(len(VALUES))]
    if rng.random() < 0.2:
        headers["x-request-id"] = "bad"  # in use, now and then
    return path, json.dumps(body).encode(), headers


def storm(url, num, num_good):
    """(answers of the good streams, statuses of `num` malformed calls). The good ones go on for as long as the others come."""

    async def work():
        rng = np.random.default_rng(0)
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

            async def good(i):
                body = {"prompt": prompt(i), "max_tokens": 400, "temperature": 0, "stream": True, "return_token_ids": True}
                out = []
                async with client.stream("POST", COMPLETION, json=body, headers={"x-request-id": f"good-{i}"}) as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            out += json.loads(line[6:])["choices"][0]["token_ids"]
                return out

            async def bad(path, content, headers):
                response = await client.post(path, content=content, headers=headers)
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                return response.status_code

            over = asyncio.Event()

            async def again(i):
                answers = [await good(i)]
                while not over.is_set():
                    answers.append(await good(i))
                return answers

            streams = [asyncio.ensure_future(again(i)) for i in range(num_good)]
            await asyncio.sleep(0.2)
            statuses: list[int] = []
            while len(statuses) < num:
                statuses += await asyncio.gather(*(bad(*malformed(rng)) for _ in range(min(20, num - len(statuses)))))
            over.set()
            return await asyncio.gather(*streams), statuses

    return asyncio.run(work())


@pytest.mark.parametrize(("num", "num_good"), [(300, 4), pytest.param(2000, 8, marks=pytest.mark.slow)])
def test_v5_malformed_calls_harm_nobody(tiny_server, num, num_good):
    alone, _ = storm(tiny_server.url, 0, num_good)
    rss = resident(tiny_server.process.pid)
    together, statuses = storm(tiny_server.url, num, num_good)
    assert all(answer == alone[i][0] for i, answers in enumerate(together) for answer in answers)
    assert all(len(answers[0]) == 400 for answers in alone)
    assert max(statuses) < 500 and sum(status >= 400 for status in statuses) > num / 2
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        until(lambda: idle(client))
    if num >= 1000:
        assert resident(tiny_server.process.pid) - rss < 50e6


def resident(pid):
    """Bytes of memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- its end, its key, its logs -------------------------------------------------------------------------------------------


def test_told_to_stop_it_finishes_what_lives(folder):
    with served("model=hf", f"model.source={folder}", "model.verify=false", *TINY[1:]) as server:

        async def work():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 1500, "ignore_eos": True}
                call = asyncio.ensure_future(client.post(CHAT, json=body, headers={"x-request-id": "last"}))
                while metric_of((await client.get("/metrics")).text) < 1:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                return (await call).json()

        out = asyncio.run(work())
        assert out["choices"][0]["finish_reason"] == "length" and out["usage"]["completion_tokens"] == 1500
        assert server.process.wait(60) == 0
    lines = [line for line in server.lines if "'last'" in line]
    assert len(lines) == 1 and "ended by length" in lines[0]  # V8: one line a request
    said = out["choices"][0]["message"]["content"]
    assert "secret" not in "".join(server.lines) and said[:20] not in "".join(server.lines)


def metric_of(text):
    return float(re.search(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)[1])


def test_a_drain_that_takes_too_long_is_ended(folder):
    with served(*TINY, "server.drain=0.2", "kv=paged") as server:

        async def work():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                call = asyncio.ensure_future(client.post(COMPLETION, json={"prompt": [1], "max_tokens": 4000}))
                while metric_of((await client.get("/metrics")).text) < 1:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGINT)
                return (await call).json()

        assert asyncio.run(work())["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(60) == 0


def test_chats_text_and_a_key(folder):
    """A model with a tokenizer: what is said comes in pieces that add up; nobody asks without the key."""
    key = {"LENGTHWISE_API_KEY": "s3cret"}
    with served("model=hf", f"model.source={folder}", "model.verify=false", *TINY[1:], env=key) as server:
        assert "open without the key: /health /version" in server.start.string and "s3cret" not in "".join(server.lines)
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/metrics").status_code == 401
        right = {"authorization": "Bearer s3cret"}
        with httpx.Client(base_url=server.url, timeout=60, headers=right) as client:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "temperature": 0, "logprobs": True}
            whole = client.post(CHAT, json=body).json()["choices"][0]
            got = []
            with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
                got = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
            assert "".join(c["choices"][0]["delta"]["content"] for c in got) == whole["message"]["content"]
            assert got[0]["choices"][0]["delta"]["role"] == "assistant"
            entries = [e for c in got for e in c["choices"][0]["logprobs"]["content"]]
            assert entries == whole["logprobs"]["content"] and len(entries) == 60
            text = "user: hello\nassistant: "
            assert TEMPLATE and client.post("/tokenize", json={"messages": body["messages"]}).json()["count"] == len(text)
            again = client.post(CHAT, json=body).json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16  # a block of the prompt


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["server.host=0.0.0.0"], "server.host=0.0.0.0"),
        (["server.port=99999"], "server.port=99999"),
        (["predictor=gbdt", "policy=srpt"], "has learned nothing"),
        (["predictor=oracle"], "nobody"),
        (["executor.times=told"], "executor.times='told'"),
        (["limits.max_model_len=1"], "max_model_len"),
        (["policy=srptt"], "Did you mean 'srpt'"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is(overrides, says, monkeypatch, capfd):
    from lengthwise import cli

    monkeypatch.setattr(sys, "argv", ["lengthwise"])
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", *TINY, "server.port=0", *overrides])
    assert end.value.code not in (0, None)
    assert says in str(end.value.code) + capfd.readouterr().err


def test_a_predictor_of_another_tokenizer_needs_leave(tmp_path, monkeypatch):
    from lengthwise.experiments.serve_app import told_by
    from lengthwise.predictors.prompt_length import PromptLength
    from lengthwise.predictors.prompts import Prompts

    rng = np.random.default_rng(0)
    predictor = PromptLength()
    lens = rng.integers(1, 100, 60)
    predictor.fit(Prompts(lens), lens + rng.integers(1, 200, 60), np.zeros(60, dtype=bool))
    predictor.unit = "cl100k tokens"
    predictor.save(tmp_path)
    node = {"_target_": "lengthwise.predictors.artefact.load", "path": str(tmp_path), "transfer": False}
    cfg = {"predictor": node, "choices": {"predictor": "artefact"}}
    with pytest.raises(ValueError, match=r"cl100k tokens.*predictor\.transfer=true"):
        told_by(cfg, "tiny tokens")
    told = told_by({**cfg, "predictor": {**node, "transfer": True}}, "tiny tokens")
    assert told.words == "artefact (prompt_length)" and told.fallback_len == predictor.training_median
    (mark,) = told.marks
    assert mark.startswith("transfer: ")
    assert told_by(cfg, "cl100k tokens").marks == []


class Ranks:
    """Says an order and no length."""

    def predict(self, requests):
        return [LengthDistribution.rank_only(-float(request.prompt_len)) for request in requests]


@pytest.mark.parametrize(("policy", "asks"), [("fcfs", False), ("sjf", False), ("srpt", True), ("aging_sjf", True)])
def test_a_policy_that_asks_for_lengths_is_not_served_by_a_predictor_that_only_ranks(policy, asks):
    nodes = {
        "fcfs": {"_target_": "lengthwise.sched.policies.FCFS"}, "sjf": {"_target_": "lengthwise.sched.policies.SJF"},
        "srpt": {"_target_": "lengthwise.sched.policies.SRPT"},
    }  # fmt: skip
    nodes["aging_sjf"] = {"_target_": "lengthwise.sched.policies.Aging", "policy": nodes["sjf"], "alpha": 1.0}
    cfg = {"policy": nodes[policy], "choices": {"policy": policy, "predictor": "ranks"}}
    with contextlib.ExitStack() as stack:
        if asks:
            stack.enter_context(pytest.raises(ValueError, match=rf"policy={policy} asks for lengths, and predictor=ranks says"))
        check_lengths(cfg, Told(Ranks(), 9.0, "ranks", []))
    check_lengths(cfg, Told(Constant(9.0), 9.0, "constant", []))
    check_lengths(cfg, Told(None, None, "none", []))
