"""Answering: the requests behind one HTTP call, as long as it lasts. Whoever leaves it leaves nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from .calls import Call
from .errors import Gone, Refused
from .service import Service
from .streams import Delta, Stream

T = TypeVar("T")
Came = tuple[int, Delta]  # what came for the answer of that index


class Answering:
    """Streams that were submitted together."""

    def __init__(self, service: Service, streams: Sequence[Stream]) -> None:
        self._service = service
        self._open = dict(enumerate(streams))
        self.streams = list(streams)

    @classmethod
    async def submit(cls, service: Service, calls: Sequence[Call]) -> Answering:
        """All of them or none. Raises Refused, Full or Down."""
        live = cls(service, [])
        try:
            for call in calls:
                stream = await _submit(service, call)
                live._open[len(live.streams)] = stream
                live.streams.append(stream)
        except BaseException:
            live.abort()
            raise
        return live

    def abort(self) -> None:
        """End what has not ended."""
        for stream in self._open.values():
            self._service.abort(stream)
        self._open.clear()

    async def deltas(self) -> AsyncIterator[Came]:
        """What comes, until all have ended. Raises Refused when an answer cannot be had; the others end with it."""
        waiting: dict[int, asyncio.Future[Delta]] = {}
        try:
            while self._open:
                if len(self._open) == 1 and not waiting:  # the usual case needs no task
                    ((index, stream),) = self._open.items()
                    yield self._took(index, await stream.next())
                    continue
                for index, stream in self._open.items():
                    if index not in waiting:
                        waiting[index] = asyncio.ensure_future(stream.next())
                await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
                for index in [index for index, future in waiting.items() if future.done()]:
                    yield self._took(index, waiting.pop(index).result())
        finally:
            for future in waiting.values():
                future.cancel()
            self.abort()

    async def whole(self) -> list[list[Delta]]:
        """All that comes, by answer. Raises as `deltas` does."""
        out: list[list[Delta]] = [[] for _ in self.streams]
        async for index, delta in self.deltas():
            out[index].append(delta)
        return out

    def _took(self, index: int, delta: Delta) -> Came:
        if delta.reason is not None:
            del self._open[index]
            raise_unless_answered(delta.reason)
        return index, delta


def raise_unless_answered(reason: str) -> None:
    """Raises Refused for a reason that is no end of an answer."""
    if reason.startswith("rejected"):
        raise Refused(reason.partition(": ")[2] or reason)
    if reason.startswith("failed"):
        raise Refused(reason, 500)


def finish_reason(reason: str | None) -> str | None:
    """In OpenAI's words; `abort` (vLLM's) or `timeout` for what was ended before its end."""
    return "abort" if reason == "aborted" else reason


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives. Raises Gone, and cancels it, when the client leaves first. For a call whose body has been read."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    both: list[asyncio.Future[Any]] = [task, watch]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for future in both:
            if not future.done():
                future.cancel()
                await asyncio.gather(future, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _submit(service: Service, call: Call) -> Stream:
    fields: dict[str, Any] = dict(call.fields)
    try:
        return await service.submit(
            call.key,
            call.prompt.ids,
            call.max_new_tokens,
            call.params,
            prompt=call.prompt.text,
            answers_before=call.prompt.answers_before,
            **fields,
        )
    except ValueError as error:
        raise Refused(str(error)) from error
