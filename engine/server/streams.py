"""Streams: live requests as the tasks of the event loop read them. What nobody has read yet is joined, so that a slow reader
costs at most its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from lengthwise.sched import Request

from ..native.logprobs import Logprobs
from .outbox import Piece


class Delta(NamedTuple):
    """What came for one request since the last look.

    text: "" without a tokenizer; never half a character; what a stop string may yet cut is held back. logprobs: one a token
    where they were asked for, else empty. reason: None while it goes on; else stop, length, aborted, timeout or failed: ....
    time: s of the service's clock, when the step that made the first of these tokens ended.
    """

    token_ids: list[int]
    text: str
    logprobs: list[Logprobs]
    reason: str | None
    time: float


class Stream:
    """One live request, read by one task of the event loop, in whose thread all of this runs. trace: see Traces."""

    def __init__(self, key: str, request: Request, trace: Mapping[str, str] | None = None) -> None:
        self.key = key
        self.request = request
        self.trace = trace
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._reason: str | None = None
        self._time = 0.0  # of the first thing that waits to be read
        self._come = False
        self._closed = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def num_cached(self) -> int:
        """Tokens of its prompt that were found cached, known from its first token on."""
        return self.request._cached

    async def next(self) -> Delta:
        """All that has come since the last call, once there is something. Raises RuntimeError after one with a reason."""
        if self._closed:
            raise RuntimeError(f"request {self.key!r} has ended: there is nothing more to wait for")
        if not self._come:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        delta = Delta(self._token_ids, "".join(self._texts), self._logprobs, self._reason, self._time)
        self._token_ids, self._texts, self._logprobs = [], [], []
        self._come, self._closed = False, self._reason is not None
        return delta

    def put(self, piece: Piece, time: float, reason: str | None = None) -> None:
        """Something has come, made at `time` (s)."""
        if not self._come:
            self._come, self._time = True, time
        if piece.token_id is not None:
            self._token_ids.append(piece.token_id)
        if piece.text:
            self._texts.append(piece.text)
        if piece.logprobs is not None:
            self._logprobs.append(piece.logprobs)
        self._reason = reason
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
