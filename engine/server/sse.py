"""Server-sent events: the chunks of a call, `data: {...}` each, `data: [DONE]` last, for as long as somebody reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .answering import Answering, Came, unless_gone
from .errors import Gone, Refused, error_body
from .writer import Writer

DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def events(first: Came, rest: AsyncIterator[Came], writer: Writer) -> AsyncIterator[bytes]:
    """The chunks of `first` and `rest`, the usage where it is wanted, and the end. What goes wrong after the first chunk is
    an event of its own: the status has been sent."""
    yield event(writer.chunk(*first))
    try:
        async for index, delta in rest:
            yield event(writer.chunk(index, delta))
    except Refused as error:
        yield event(error_body(error.message, error.status))
    else:
        if writer.include_usage:
            yield event(writer.usage_chunk())
    yield DONE


class EventStream(StreamingResponse):
    """Sends `content` until the client leaves; then what is left of `live` is aborted.

    A client that reads slowly makes `send` wait, and what comes meanwhile is joined in its stream, so that it costs no more
    than its answer; patience.py ends the wait."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], live: Answering, headers: Mapping[str, str]) -> None:
        super().__init__(content, headers={"cache-control": "no-cache", **headers})
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        except Gone:  # the service has a line for each request that ends
            pass
        finally:
            self._live.abort()
