"""Streams: what the step loop makes of live requests, carried to the tasks of the event loop that read them.

The step loop's thread never waits for a reader. It hands over what a step made of all requests at once; what nobody has read
yet is joined, so that a slow reader costs at most its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from lengthwise.sched import Outcome, Phase, Plan, Request, Scheduler

from ..native.executor import NativeExecutor
from ..native.logprobs import Logprobs
from .tally import Tally


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


class Piece(NamedTuple):
    """What one step, or the end, brings one request. token_id: None where there is none."""

    request: Request
    token_id: int | None
    text: str
    logprobs: Logprobs | None


class Ending(NamedTuple):
    """The last piece of a request, and how it ended at `time` (s)."""

    piece: Piece
    num_tokens: int
    reason: str
    time: float


class Stream:
    """One live request, read by one task of the event loop, in whose thread all of this runs."""

    def __init__(self, key: str, request: Request) -> None:
        self.key = key
        self.request = request
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


class Outbox:
    """The step loop's Observer: collects what each step brings, and tells the tally.

    send: takes the pieces of a step and its time. end: takes the Ending of a request once its key is free again (`freed`).
    `num_leaving`: requests that the scheduler has let go and whose key is not free yet.
    """

    def __init__(
        self,
        executor: NativeExecutor,
        tally: Tally,
        send: Callable[[list[Piece], float], None],
        end: Callable[[Ending], None],
    ) -> None:
        self.num_leaving = 0
        self.last_step = 0.0  # s, when it ended
        self._executor = executor
        self._tally = tally
        self._send = send
        self._end = end
        self._endings: dict[Request, Ending] = {}

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None:
        self.num_leaving = len(outcome.finished) + len(outcome.failures)
        end = self.last_step = outcome.ends[-1]
        generations = self._executor.generations
        if plan.num_decode:  # all that decode now have had a token
            emitting = list(scheduler.running.members)
        else:
            emitting = [chunk.request for chunk in plan.chunks if chunk.last and chunk.request.phase == Phase.DECODING]
        pieces = []
        for request in emitting:
            generation = generations[request]
            text = "" if generation.text is None else generation.text.new()
            entry = None if generation.params.logprobs is None else generation.logprobs[-1]
            pieces.append(Piece(request, generation.tokens[-1], text, entry))
        if pieces:
            self._send(pieces, end)
        self._tally.step(start, plan, outcome, scheduler)

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        generation = self._executor.forget(request)
        token, text, entry = None, "", None
        if generation is not None:
            text = "" if generation.text is None else generation.text.last()
            if reason in ("stop", "length"):  # it ended with a token; whoever is stopped has had all of theirs
                token = generation.tokens[-1]
                entry = None if generation.params.logprobs is None else generation.logprobs[-1]
        self._endings[request] = Ending(Piece(request, token, text, entry), num_tokens, reason, now)
        self._tally.ended(request, num_tokens, reason, now)

    def freed(self, request: Request) -> None:
        """Its key is free: whoever is told of the end may use it again."""
        self.num_leaving = max(self.num_leaving - 1, 0)
        self._end(self._endings.pop(request))
