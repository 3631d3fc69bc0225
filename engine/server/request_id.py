"""Request ids: what a client calls its call is in the headers of whatever it is answered, errors too."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .protocol import MAX_NAME

REQUEST_ID = "x-request-id"


def own_id(headers: Mapping[str, str]) -> str | None:
    """The id that the client has given, if it is one that a header and a line of a log may hold."""
    key = headers.get(REQUEST_ID, "")
    return key if 0 < len(key) <= MAX_NAME and key.isascii() and key.isprintable() else None


class EchoId:
    """Around `app`: its answers have the client's own id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = own_id(Headers(scope=scope)) if scope["type"] == "http" else None
        if key is None:
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = key
            await send(message)

        await self._app(scope, receive, named)
