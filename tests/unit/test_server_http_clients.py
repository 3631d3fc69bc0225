"""Clients over real sockets: they leave, read slowly, stay when the server stops; the server loses and leaks nothing."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket

import httpx
import pytest
from fake_service import Fake

from lengthwise.engine.server import patience
from lengthwise.engine.server.run import Server, bind, url_of
from lengthwise.engine.server.settings import Settings

CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "hello"}]


@contextlib.asynccontextmanager
async def serving(service, **settings):
    """(client, url, server, task) of a server on a free port, which is stopped at the end."""
    settings = Settings(port=0, **{"drain": 5, **settings})
    sock = bind(settings)
    server = Server(service, settings, {})
    task = asyncio.ensure_future(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(1e-3)
    url = url_of(sock)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client, url, server, task
    finally:
        server.should_exit = True
        await task


async def until(condition, seconds=30):
    for _ in range(int(seconds / 1e-2)):
        if condition():
            return
        await asyncio.sleep(1e-2)
    raise AssertionError("it has not come to pass")


def lines(caplog, level=logging.WARNING):
    return [record for record in caplog.records if record.levelno >= level and record.name != "asyncio"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("queued", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream, queued, caplog):
    """Streaming or not, queued or decoding; the engine hears of it at once."""
    service = Fake(hold=queued, step=5e-3)

    async def work():
        async with serving(service) as (client, *_):
            body = {"messages": TURNS, "stream": stream, "max_tokens": 450}
            call = asyncio.ensure_future(client.post(CHAT, json=body, headers={"x-request-id": "x"}))
            await until(lambda: service.live)
            await asyncio.sleep(0.05)
            assert not service.aborted
            call.cancel()
            await until(lambda: not service.live)
            assert service.aborted == ["x"]
            service.hold = False
            again = await client.post(CHAT, json={"messages": TURNS, "max_tokens": 2}, headers={"x-request-id": "x"})
            assert again.status_code == 200

    asyncio.run(work())
    assert not lines(caplog)


def test_all_answers_of_a_call_end_with_their_client():
    service = Fake(step=5e-3)

    async def work():
        async with serving(service) as (client, *_):
            body = {"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 450}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
                assert len(service.live) == 4
            await until(lambda: not service.live)

    asyncio.run(work())
    assert len(service.aborted) == 4


def test_v8_a_hundred_clients_drop_and_nobody_cries(caplog):
    caplog.set_level(logging.INFO)
    service = Fake(step=1e-2)

    async def drop(url, i):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": TURNS, "stream": True, "max_tokens": 450}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\nx-request-id: {i}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readline()
        writer.transport.abort()  # a reset, no farewell

    async def work():
        async with serving(service) as (_, url, *_):
            await asyncio.gather(*(drop(url, i) for i in range(100)))
            await until(lambda: len(service.aborted) == 100)

    asyncio.run(work())
    assert not service.live and not lines(caplog)


async def slow_reader(url, num_tokens):
    """A connection with a small window that asks for a long stream and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    body = json.dumps({"messages": TURNS, "stream": True, "max_tokens": num_tokens}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)
    return sock


def test_v4_a_client_that_reads_nothing_is_cut_and_others_are_served(caplog):
    caplog.set_level(logging.INFO, logger="lengthwise")
    service = Fake(step=1e-2, width=50_000)  # a second of steps fills all that is kept for a client many times

    async def work():
        async with serving(service, slow_reader=0.5) as (client, _, server, _):
            url = str(client.base_url).rstrip("/")
            sock = await slow_reader(url, 450)
            await until(lambda: service.live)
            response = await client.post(CHAT, json={"messages": TURNS, "max_tokens": 3})
            assert response.status_code == 200
            await until(lambda: service.aborted)
            await until(lambda: len(server.server_state.connections) == 1)  # the good client's own
            sock.close()

    asyncio.run(work())
    assert not service.live and not lines(caplog)
    assert [record.message for record in caplog.records if "read nothing" in record.message] == [
        "cut a client that has read nothing for 0.5 s"
    ]


def test_v4_a_client_that_reads_slowly_is_served_to_the_end():
    service = Fake(step=1e-3, width=20_000)

    async def work():
        loop = asyncio.get_running_loop()
        async with serving(service, slow_reader=1.0) as (client, *_):
            sock = await slow_reader(str(client.base_url).rstrip("/"), 60)
            got = b""
            while b"[DONE]" not in got[-200:]:
                await asyncio.sleep(0.01)
                got += (new := await loop.sock_recv(sock, 65536))
                assert new, "cut"
            sock.close()
            assert len(got) > 60 * 20_000

    asyncio.run(work())
    assert not service.aborted


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\nx-request-id: slow\r\ncontent-type: application/json\r\n".encode()


async def dribble(url, first, rest):
    """All that a server says to a client that sends `first` and then `rest` byte by byte, until it hangs up."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send():
        writer.write(first)
        for byte in rest:
            await asyncio.sleep(0.02)
            writer.write(bytes([byte]))

    sending = asyncio.ensure_future(send())
    said = b""
    with contextlib.suppress(ConnectionError):  # it is cut while it still sends
        while piece := await reader.read(4096):
            said += piece
    sending.cancel()
    writer.transport.abort()
    return said


@pytest.mark.parametrize(
    ("first", "rest", "said"),
    [
        (b"", b"", None),  # says nothing at all
        (b"", HEAD * 20, "headers"),
        (HEAD, b"", "headers"),
        (HEAD + b"content-length: 1000\r\n\r\n", b"", "body"),
        (HEAD + b"content-length: 1000\r\n\r\n", b" " * 1000, "body"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 200, "body"),
    ],
    ids=["silent", "byte by byte", "half the headers", "headers alone", "body byte by byte", "chunks"],
)
def test_a_client_that_does_not_say_what_it_wants_is_cut(first, rest, said, caplog):
    service = Fake()
    service.full = 0  # whoever took a slot would be refused

    async def work():
        async with serving(service, upload_timeout=0.4) as (client, url, server, _):
            answers = await asyncio.gather(*(dribble(url, first, rest) for _ in range(5)))
            await until(lambda: not server.server_state.connections)
            assert (await client.get("/health")).status_code == 200
            return answers

    for answer in asyncio.run(work()):
        if said is None:
            assert answer == b""
            continue
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
        error = json.loads(body)["error"]
        assert said in error["message"] and "0.4 s" in error["message"] and error["code"] == "upload_timeout"
        assert (b"x-request-id: slow" in head) == (said == "body")
    assert not service.asked and not lines(caplog)


@pytest.fixture(params=["h11", "httptools"])
def parser(request, monkeypatch):
    """uvicorn takes httptools where that is installed, else h11."""
    pytest.importorskip(request.param)
    module = importlib.import_module(f"uvicorn.protocols.http.{request.param}_impl")
    name = {"h11": "H11Protocol", "httptools": "HttpToolsProtocol"}[request.param]
    monkeypatch.setattr(patience, "AutoHTTPProtocol", getattr(module, name))


@pytest.mark.usefixtures("parser")
def test_a_call_on_a_connection_that_has_been_idle_has_its_own_time():
    """A connection may be idle for longer than an upload may take; an answer may take longer too."""
    service = Fake(step=5e-3)

    async def work():
        async with serving(service, upload_timeout=0.3) as (client, _, server, _):
            for num_tokens in (1, 200):  # at once; a second
                response = await client.post(CHAT, json={"messages": TURNS, "max_tokens": num_tokens})
                assert response.status_code == 200
                (connection,) = server.server_state.connections
                assert connection._call is None  # an idle connection costs no timer
                await asyncio.sleep(0.6)
                assert {connection} == server.server_state.connections

    asyncio.run(work())


@pytest.mark.usefixtures("parser")
def test_half_a_call_after_a_whole_one_is_cut_and_so_is_a_body_that_was_refused_unread():
    async def work():
        async with serving(Fake(), upload_timeout=0.4, max_body=100) as (_, url, server, _):
            whole = await dribble(url, b"GET /version HTTP/1.1\r\nhost: t\r\n\r\n", b"GET /v")
            refused = await dribble(url, HEAD + b"content-length: 100000\r\n\r\n", b" " * 1000)
            await until(lambda: not server.server_state.connections)
            return whole, refused

    whole, refused = asyncio.run(work())
    assert whole.count(b"HTTP/1.1 200 ") == whole.count(b"HTTP/1.1 408 ") == 1
    assert refused.count(b"HTTP/1.1 ") in (0, 1) and b"408" not in refused  # the reset may overtake what it has said


GET = b"GET /version HTTP/1.1\r\nhost: t\r\n\r\n"
LENGTH = (b"content-length: 1000\r\n\r\n" + b" " * 300, b" " * 700)
CHUNKS = (b"transfer-encoding: chunked\r\n\r\n12c\r\n" + b" " * 300 + b"\r\n", b"1\r\n \r\n0\r\n\r\n")


@contextlib.asynccontextmanager
async def refused(url, body, status):
    """A connection whose call is refused before its body has ended."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(HEAD + body)
        assert (await answered(reader)).startswith(b"HTTP/1.1 %d " % status)
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    return head + await reader.readexactly(length)


@pytest.mark.parametrize("body", [LENGTH, CHUNKS], ids=["length", "chunks"])
@pytest.mark.parametrize(("settings", "status"), [({"max_body": 100}, 413), ({"api_key": "k"}, 401)], ids=["long", "no key"])
@pytest.mark.usefixtures("parser")
def test_the_timer_of_a_body_that_was_refused_unread_ends_with_it(settings, status, body):
    """Then the connection is as idle as others, and the next call has a time of its own, wherever its first byte comes."""

    async def one(url, server, first):
        async with refused(url, body[0], status) as (reader, writer):
            (connection,) = server.server_state.connections
            timer = connection._call
            assert timer is not None and connection.timeout_keep_alive_task is None
            writer.write(body[1] + first)
            await until(lambda: connection._call is not timer)
            assert timer.cancelled()
            if not first:
                assert connection._call is None and connection.timeout_keep_alive_task is not None
                writer.write(GET[:5])
            await until(lambda: connection._call is not None)
            assert connection.timeout_keep_alive_task is None
            writer.write(GET[5:])
            assert (await answered(reader)).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 "))
            assert connection._call is None and connection.timeout_keep_alive_task is not None
        await until(lambda: not server.server_state.connections)

    async def work():
        async with serving(Fake(), **settings) as (_, url, server, _):
            await one(url, server, b"")
            await one(url, server, GET[:5])

    asyncio.run(work())


@pytest.mark.usefixtures("parser")
def test_after_a_refused_body_a_connection_may_be_idle_and_half_a_call_gets_its_408():
    async def work():
        async with serving(Fake(), upload_timeout=0.4, max_body=100) as (_, url, server, _):
            async with refused(url, LENGTH[0], 413) as (reader, writer):
                writer.write(LENGTH[1])
                await asyncio.sleep(0.8)
                writer.write(GET + GET[:5])
                assert (await answered(reader)).startswith(b"HTTP/1.1 200 ")
                assert (await answered(reader)).startswith(b"HTTP/1.1 408 ")
                assert not await reader.read()
            await until(lambda: not server.server_state.connections)

    asyncio.run(work())


@pytest.mark.usefixtures("parser")
def test_blank_lines_are_no_call_and_hold_no_connection():
    async def work():
        async with serving(Fake(), upload_timeout=0.4) as (_, url, server, _):
            assert b"408" not in await dribble(url, b"\r\n", b"\r\n" * 100)
            await until(lambda: not server.server_state.connections)

    asyncio.run(work())


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_lets_live_requests_finish_and_takes_no_more(sig, caplog):
    service = Fake(step=5e-3)

    async def work():
        async with serving(service) as (client, url, _, task):
            live = asyncio.ensure_future(client.post(CHAT, json={"messages": TURNS, "max_tokens": 100}))
            await until(lambda: service.live)
            os.kill(os.getpid(), sig)
            await until(lambda: service.down)
            with pytest.raises(httpx.ConnectError):
                await httpx.AsyncClient().get(url + "/health")
            response = await live
            assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 100
            await task

    asyncio.run(work())
    assert not lines(caplog) and not service.aborted


def test_the_drain_ends():
    service = Fake(step=5e-2)

    async def work():
        async with serving(service, drain=0.2) as (client, _, server, task):
            live = asyncio.ensure_future(client.post(CHAT, json={"messages": TURNS, "max_tokens": 450}))
            await until(lambda: service.live)
            server.should_exit = True
            await until(lambda: service.aborted)
            live.cancel()
            await task

    asyncio.run(work())
    assert not service.live


def test_the_access_log_has_no_queries(caplog):
    caplog.set_level(logging.INFO)

    async def work():
        async with serving(Fake(), access_log=True) as (client, *_):
            await client.get("/version?token=secret")

    asyncio.run(work())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert "GET /version" in line and "secret" not in line
