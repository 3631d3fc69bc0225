"""Endpoint: one server over HTTP: what it says of itself, and one request from its sending to its end.

What fails before an answer begins is sent again, a few times, later and later; a stream that breaks off has failed, and keeps
the tokens it brought.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from .answer import ENDS, Answer, StreamError
from .driving import Tries
from .sse import Events

REJECTIONS = (400, 413, 422, 429)  # refused at the door, for good or for lack of room
AGAIN = (408, 500, 502, 503, 504)
KEEPALIVE = 4.0  # s, less than servers keep an idle connection: one that is taken up while it is closed would fail
CONNECT = 30.0  # s


class Endpoint:
    """A server at `target`, to be used in `async with`. headers: with every request. clock: s."""

    def __init__(self, target: str, headers: Mapping[str, str], tries: Tries, clock: Callable[[], float]) -> None:
        self._target, self._headers, self._tries, self.clock = target, headers, tries, clock

    async def __aenter__(self) -> Self:
        # its own limit of 100 connections would hold requests back without a word
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=self._tries.stall)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self._session.close()

    async def about(self) -> dict[str, Any]:
        """What the server says of itself: `models`, as it lists them, and `version` where it has one. Raises ValueError when it
        cannot be reached, or refuses."""
        try:
            models = await self._get("/v1/models")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ValueError(f"target={self._target}: no answer from /v1/models: {_words(error)}") from error
        kept = ("id", "root", "max_model_len", "owned_by", "metadata")
        said = {"models": [{key: one[key] for key in kept if one.get(key) is not None} for one in models.get("data") or ()]}
        try:
            return {**said, "version": (await self._get("/version")).get("version")}
        except (aiohttp.ClientError, TimeoutError, ValueError):  # few servers have it
            return said

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._session.get(self._target + path, timeout=aiohttp.ClientTimeout(total=CONNECT)) as got:
            text = await got.text()
            if got.status != 200:
                raise ValueError(f"HTTP {got.status}: {text[:200]}")
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError(f"{path} gives a {type(found).__name__}")
            return found

    async def ask(self, path: str, body: Mapping[str, Any], answer: Answer) -> str:
        """Send `body` and read the answer into `answer`. Returns how it ended, as an Observer is told. Raises OSError when this
        machine has no more room for connections: that is no fault of the server."""
        data = json.dumps(body, ensure_ascii=False).encode()
        for attempt in range(self._tries.retries + 1):
            if attempt:
                answer.num_retries += 1
                await asyncio.sleep(self._tries.backoff * 2 ** (attempt - 1))
            reason, again = await self._try(path, data, answer)
            if not again:
                break
        return reason

    async def _try(self, path: str, data: bytes, answer: Answer) -> tuple[str, bool]:
        """(how it ended, whether it may be sent again)."""
        if math.isnan(answer.sent):
            answer.sent = self.clock()
        begun = False
        try:
            kind = {"Content-Type": "application/json"}
            async with self._session.post(self._target + path, data=data, headers=kind) as got:
                if got.status != 200:
                    return _refusal(got.status, await got.text(errors="replace"))
                if got.content_type != "text/event-stream":
                    return f"failed: {got.content_type} instead of a stream of events", False
                begun = True
                return await self._read(got.content, answer), False
        except aiohttp.SocketTimeoutError:
            return f"timeout: no byte for {self._tries.stall:g} s", False
        except (aiohttp.ClientError, ConnectionError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise OSError(error.errno, "no more connections than open files: raise `ulimit -n`") from error
            return (_cut(answer), False) if begun else (f"failed: {_words(error)}", True)

    async def _read(self, stream: aiohttp.StreamReader, answer: Answer) -> str:
        events, done = Events(), False
        try:
            async for part in stream.iter_any():  # to its very end, or the connection could not be used again
                now = self.clock()
                for data in events.feed(part):
                    if data == b"[DONE]":
                        done = True
                    else:
                        answer.take(json.loads(data), now)
        except StreamError as error:
            return f"failed: {error}"
        except (ValueError, TypeError, AttributeError, KeyError) as error:  # no JSON, or not in the form of an answer
            return f"failed: an event that cannot be read: {_words(error)}"
        except (aiohttp.ClientError, ConnectionError):
            if not done and answer.finish is None:
                raise
        if answer.finish is None:
            return "failed: it ended without a finish_reason" if done else _cut(answer)
        return ENDS.get(answer.finish, f"failed: finish_reason {answer.finish!r}")


def _refusal(status: int, text: str) -> tuple[str, bool]:
    try:
        said = json.loads(text)
        error = said.get("error", said)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):  # not every server says it in JSON
        pass
    kind = "rejected" if status in REJECTIONS else "failed"
    return f"{kind}: HTTP {status}: {' '.join(text.split())[:200]}", status in AGAIN


def _cut(answer: Answer) -> str:
    return "failed: the connection was cut after some tokens" if answer.num_events else "failed: the connection was cut"


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()[:200]
