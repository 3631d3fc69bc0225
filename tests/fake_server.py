"""A scripted OpenAI-compatible server in a thread: what a client must make of streams that real servers send now and then."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import contextmanager

from aiohttp import web

Script = Callable[["Stream", dict], Awaitable[None]]


class Stream:
    """One answer being streamed. `send` writes one event; `number` counts the requests of the server from 0."""

    def __init__(self, number: int, request: web.Request) -> None:
        self.number, self.request = number, request
        self.chat = request.path.endswith("chat/completions")
        self.response: web.StreamResponse | None = None

    async def open(self) -> web.StreamResponse:
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self.response.prepare(self.request)
        return self.response

    async def send(self, text: str | None = None, *, finish: str | None = None, usage: dict | None = None, **delta) -> None:
        choice: dict = {"index": 0, "finish_reason": finish}
        if self.chat:
            choice["delta"] = delta | ({} if text is None else {"content": text})
        else:
            choice["text"] = text or ""
        await self.event({"choices": [choice], "usage": usage})

    async def usage(self, n: int, prompt: int = 7, **more) -> None:
        await self.event({"choices": [], "usage": {"completion_tokens": n, "prompt_tokens": prompt, **more}})

    async def event(self, value: object) -> None:
        await self.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())

    async def write(self, data: bytes) -> None:
        await (await self.open()).write(data)

    async def done(self) -> None:
        await self.event("[DONE]")

    def cut(self) -> None:
        assert self.request.transport is not None
        self.request.transport.abort()


async def words(stream: Stream, body: dict, gap: float = 0.0) -> None:
    """As many tokens as asked for, one an event, with usage at the end."""
    n = body["max_tokens"]
    for i in range(n):
        await stream.send(" w", finish="length" if i == n - 1 else None)
        if gap:
            await asyncio.sleep(gap)
    await stream.usage(n)
    await stream.done()


class Server:
    """url; bodies and headers of all requests, in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.statuses: list[int] = []  # to answer with first, instead of a stream
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        stream = Stream(len(self.bodies), request)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.statuses:
            status = self.statuses.pop(0)
            return web.json_response({"error": {"message": f"scripted {status}"}}, status=status)
        try:
            await self.script(stream, body)
        except web.HTTPException:
            raise
        except ConnectionError:  # the client has gone
            pass
        return await stream.open()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "root": "fake", "max_model_len": 4096}]})

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        return app


@contextmanager
def serving(script: Script = words):
    """A Server in a thread of its own, on a free port of the loopback."""
    server, loop, ready = Server(script), asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1, access_log=None)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        assert not thread.is_alive()


if __name__ == "__main__":  # a null server in a process of its own: prints its URL, ends with its standard input
    import sys

    with serving() as main:
        print(main.url, flush=True)
        sys.stdin.read()
