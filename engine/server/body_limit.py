"""BodyLimit: a body is read whole before anything looks at it. One that is too long gets 413, however it is sent, and one that
takes too long 408: until then nobody else has noticed the call.

Plain ASGI: what an application hears of its client later (that it has left) comes through unchanged.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_response


class BodyLimit:
    """Around `app`. limit: bytes. seconds: that a client has to send them, however steadily they come."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._too_long(f"{declared} bytes", scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            message = f"the body has not come within {self._seconds:g} s"
            await error_response(message, 408, headers={"connection": "close"})(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self._limit:
            await self._too_long("longer", scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or as much of it as is too long; None when the client has left."""
        parts, size, more = [], 0, True
        while more and size <= self._limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _too_long(self, size: str, scope: Scope, receive: Receive, send: Send) -> None:
        answer = error_response(f"the body is {size}, the limit is {self._limit} bytes", 413)
        await answer(scope, receive, send)
