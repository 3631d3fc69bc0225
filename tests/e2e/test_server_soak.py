"""A soak: a live server in bad company for half an hour. Nobody gets a 5xx, nothing is kept of who has gone, and who asks the
same hears the same.

LENGTHWISE_SOAK says for how many seconds. Server and clients share a process, so that between rounds, when nobody asks, all
that it holds can be counted. Clients are few and come at random: it takes a small part of a core.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import json
import os
import socket
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from fake_service import byte_model
from serving import until

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import generate
from lengthwise.engine.server.run import Server, bind, url_of
from lengthwise.engine.server.service import Service
from lengthwise.engine.server.settings import Settings
from lengthwise.predictors.constant import Constant
from lengthwise.sched import Phase, pause
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Prefix
from lengthwise.sched.policies import SRPT

SECONDS = float(os.environ.get("LENGTHWISE_SOAK", "1800"))  # a soak of 30 minutes
NUM_ROUNDS = 24
RATE = 1.0  # calls and bursts a second
GROWTH = 16e6  # bytes that the process may grow by from the first quarter to the end
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
NUM_KNOWN, KNOWN_LEN = 12, 24  # prompts whose greedy answers are known, and tokens of those

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


def prompt(seed, n):
    return np.random.default_rng([7, seed]).integers(32, 127, n).tolist()


def known(i):
    return prompt(i % 3, 40) + prompt(i, 5 + 20 * (i % 4))  # three beginnings, so that the prefix cache is used


class Soak:
    """Calls of every kind to one server. `counts`: of statuses and ends."""

    def __init__(self, service, url, references):
        self.service, self.url, self.references = service, url, references
        self.rng = np.random.default_rng(1)
        self.counts = collections.Counter()
        self.num = self.num_slow = 0
        self.deck = []

    def key(self):
        self.num += 1
        return {"x-request-id": f"soak-{self.num}"}

    def noted(self, response):
        self.counts[response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return response.status_code == 200

    async def undisturbed(self):
        """Alone or among others, streamed or not: the same answer."""
        i = int(self.rng.integers(NUM_KNOWN))
        body = {"prompt": known(i), "max_tokens": KNOWN_LEN, "temperature": 0, "return_token_ids": True}
        if self.rng.random() < 0.5:
            response = await self.client.post(COMPLETION, json=body, headers=self.key())
            if not self.noted(response):
                return
            ids = response.json()["choices"][0]["token_ids"]
        else:
            async with self.client.stream("POST", COMPLETION, json={**body, "stream": True}, headers=self.key()) as response:
                if response.status_code != 200:
                    await response.aread()
                if not self.noted(response):
                    return
                lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            ids = [token for line in lines for token in json.loads(line[6:])["choices"][0]["token_ids"]]
        assert ids == self.references[i]
        self.counts["undisturbed"] += 1

    async def ordinary(self):
        """A chat with whatever may be asked for beside it."""
        rng = self.rng
        body = {
            "messages": [{"role": "user", "content": "x" * int(rng.integers(1, 60))}], "max_tokens": int(rng.integers(1, 30)),
            "n": int(rng.integers(1, 3)), "seed": self.num, "slo": {"ttft": 1.0, "e2e": 5.0}, "client": f"c{self.num % 3}",
            "stream": bool(rng.random() < 0.5), "logprobs": bool(rng.random() < 0.2), "priority": float(rng.normal()),
        }  # fmt: skip
        if rng.random() < 0.5:
            body["predicted_len"] = float(rng.integers(1, 60))
        self.noted(await self.client.post(CHAT, json=body, headers={**self.key(), "x-slo-tpot-ms": "50"}))

    async def impatient(self):
        body = {
            "prompt": prompt(self.num, 8),
            "max_tokens": 400,
            "ignore_eos": True,
            "timeout": float(self.rng.uniform(0.01, 0.1)),
        }
        response = await self.client.post(COMPLETION, json=body, headers=self.key())
        if self.noted(response):
            self.counts[response.json()["choices"][0]["finish_reason"]] += 1

    async def leaves(self, phase, after, stream):
        """A client that is gone `after` s (0: none) from when its request has come to `phase`."""
        key = self.key()
        body = {"prompt": prompt(self.num, 400), "max_tokens": 100, "stream": stream, "ignore_eos": True}
        call = asyncio.ensure_future(self.client.post(COMPLETION, json=body, headers=key))

        def there():
            streams = self.service._live.streams.values()
            return [s for s in streams if s.key == key["x-request-id"] and s.request.phase == phase]

        while not call.done() and not there():
            await asyncio.sleep(2e-3)
        if after:
            await asyncio.sleep(after)
        for stream in self.service._live.streams.values():
            if stream.key == key["x-request-id"]:
                self.counts["left", stream.request.phase] += 1
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.noted(await call)

    async def burst(self):
        """More than there are slots and than may wait; most are gone before their turn."""
        kinds = [(Phase.PREFILLING, 0.0), (Phase.DECODING, 0.0)] * 2 + [(Phase.WAITING, 0.1)] * 12
        await asyncio.gather(*(self.leaves(phase, after, i % 3 == 0) for i, (phase, after) in enumerate(kinds)))

    async def malformed(self):
        raw = [
            b"", b"{", b"null", b"[" * 3000, b'{"prompt": "\xff"}', b'{"prompt": [1], "temperature": NaN}',
            b'{"prompt": [99999]}', b'{"prompt": [1], "max_tokens": -1}', b'{"prompt": [1], "n": 1e9}', b" " * (2**20 + 1),
            b'{"prompt": "a", "stop": 5, "stream": "yes"}', b'{"prompt": "' + b"a" * 5000 + b'"}', b'{"messages": [{}]}',
        ]  # fmt: skip
        content, path = raw[self.rng.integers(len(raw))], [COMPLETION, CHAT, "/tokenize", "/v1/no"][self.rng.integers(4)]
        response = await self.client.post(path, content=content, headers={**self.key(), "content-type": "application/json"})
        self.counts["malformed"] += not self.noted(response)

    async def connect(self, data, window=None):
        host, port = self.url.removeprefix("http://").split(":")
        sock = socket.socket()
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2048)
        writer.write(data)
        return reader, writer

    def request(self, body, path=COMPLETION, extra=0):
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(content) + extra}"
        return f"{head}\r\n\r\n".encode() + content

    async def dribbles(self):
        """Half the headers, or half the body, and then a byte now and then."""
        data = self.request({"prompt": "a", "max_tokens": 1}, extra=100)
        reader, writer = await self.connect(data[: int(self.rng.integers(1, 60))] if self.rng.random() < 0.5 else data)
        said = asyncio.ensure_future(reader.read())
        while not said.done():
            writer.write(b" ")
            await asyncio.sleep(0.1)
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            self.counts["dribbled"] += b" 408 " in said.result()

    async def reads_slowly(self):
        """Takes its time over a long answer, or takes nothing and is cut."""
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 450, "ignore_eos": True, "stream": True}
        body |= {"logprobs": True, "top_logprobs": 20}  # twice as much as is kept for a client
        reader, writer = await self.connect(self.request(body, CHAT), window=4096)
        self.num_slow += 1
        end = b""
        with contextlib.suppress(ConnectionError):
            if self.num_slow % 2:
                await reader.readline()
                await until(lambda: not any(s.request.max_new_tokens == 450 for s in self.service._live.streams.values()))
                await asyncio.sleep(2.0)
            while b"[DONE]" not in end and (piece := await reader.read(8192)):
                end = (end + piece)[-20:]
                await asyncio.sleep(2e-3)
        writer.transport.abort()
        self.counts["read to the end" if b"[DONE]" in end else "cut"] += 1

    async def looks(self):
        for path in ("/health", "/metrics", "/v1/models"):
            self.noted(await self.client.get(path))

    async def resets(self):
        """A stream whose client hangs up after a piece or two, without a farewell."""
        body = {"prompt": prompt(self.num, 8), "max_tokens": 300, "ignore_eos": True, "stream": True}
        reader, writer = await self.connect(self.request(body))
        await reader.readline()
        await asyncio.sleep(float(self.rng.uniform(0.0, 0.05)))
        writer.transport.abort()
        self.counts["reset"] += 1

    def draw(self):
        """A kind of call: all in turn, shuffled."""
        kinds = {
            self.undisturbed: 10, self.ordinary: 5, self.impatient: 2, self.malformed: 3, self.resets: 2, self.looks: 1,
            self.burst: 1, self.dribbles: 1, self.reads_slowly: 1,
        }  # fmt: skip
        if not self.deck:
            self.deck = [kind for kind, num in kinds.items() for _ in range(num)]
            self.rng.shuffle(self.deck)
        return self.deck.pop()

    async def round(self, seconds):
        """Calls of all kinds for so long, and to their ends. The first failure is raised."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while (left := end - time.monotonic()) > 0:
                group.create_task(self.draw()())
                await asyncio.sleep(min(float(self.rng.exponential(1 / RATE)), left))


def held():
    """What the process holds: (tasks, files, threads), bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), threading.active_count()), resident


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_v9_a_soak(caplog):
    engine = NativeEngine(byte_model(), attention="torch")
    references = [a.token_ids for a in generate(engine, [known(i) for i in range(NUM_KNOWN)], KNOWN_LEN)]
    settings = Settings(port=0, slow_reader=1.0, upload_timeout=1.0)
    service = Service(
        engine, Prefix(1536, 16, 0.0), SRPT(), Chunked(), pause(), max_num_seqs=4, token_budget=32, max_model_len=512,
        predictor=Constant(40.0), fallback_len=40.0, max_waiting=8,
    )  # fmt: skip

    async def main():
        service.start(asyncio.get_running_loop())
        sock = bind(settings)
        server = Server(service, settings, {})
        serving = asyncio.ensure_future(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(1e-3)
        state, soak, kept = server.server_state, Soak(service, url_of(sock), references), []
        try:
            for _ in range(NUM_ROUNDS):
                async with httpx.AsyncClient(base_url=soak.url, timeout=60, verify=False, trust_env=False) as soak.client:
                    await soak.round(SECONDS / NUM_ROUNDS)
                async with asyncio.timeout(60):
                    await until(lambda: not (service._live.streams or service._inbox.num_live))
                    await until(lambda: not (state.connections or state.tasks))
                service.idle_check()
                assert service._scheduler.kv.in_use == 0 and service.health().ok and service.num_waiting == 0
                kept.append(held())
        finally:
            server.should_exit = True
            await serving
            await service.close()
        return soak.counts, kept

    begun, cpu = time.monotonic(), time.process_time()
    counts, kept = asyncio.run(main())
    share = (time.process_time() - cpu) / (time.monotonic() - begun)
    quarter = kept[NUM_ROUNDS // 4 :]
    grown = kept[-1][1] - quarter[0][1]
    print(f"\n{dict(counts)}\n{service._tally.reasons}\ntasks, files, threads {kept[0][0]}, at the end {kept[-1][0]}")
    print(f"MB by round {[round(size / 1e6, 1) for _, size in kept]}; {share:.3f} of a core")
    most = tuple(max(values) for values in zip(*(things for things, _ in kept[: NUM_ROUNDS // 4]), strict=True))
    assert all(now <= then for things, _ in quarter for now, then in zip(things, most, strict=True)), (most, quarter)
    assert grown < GROWTH
    wanted = {
        "undisturbed",
        "malformed",
        "dribbled",
        "timeout",
        "reset",
        429,
        ("left", Phase.WAITING),
        ("left", Phase.PREFILLING),
    }
    wanted |= {("left", Phase.DECODING), "read to the end", "cut"}
    assert SECONDS < 100 or wanted <= set(counts), wanted - set(counts)
    assert service._tally.reasons["error"] == 0 and not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]
