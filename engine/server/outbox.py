"""Outbox: what the step loop makes of live requests, handed over to whoever carries it to their readers.

It never waits for a reader, and hands over what a step made of all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lengthwise.sched import Outcome, Phase, Plan, Request, Scheduler

from ..native.executor import NativeExecutor
from ..native.logprobs import Logprobs
from .predicting import Predicting
from .tally import Tally


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


class Outbox:
    """The step loop's Observer: collects what each step brings, and tells the tally.

    send: takes the pieces of a step and its time. end: takes the Ending of a request once its key is free again (`freed`).
    learning: a predictor that is told what comes of its predictions; None where none learns.
    `num_leaving`: requests that the scheduler has let go of in this step and whose keys are not free yet.
    """

    def __init__(
        self,
        executor: NativeExecutor,
        tally: Tally,
        send: Callable[[list[Piece], float], None],
        end: Callable[[Ending], None],
        learning: Predicting | None = None,
    ) -> None:
        self.num_leaving = 0
        self.last_step = 0.0  # s, when it ended
        self._executor = executor
        self._tally = tally
        self._send = send
        self._end = end
        self._learning = learning
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
        if self._learning is not None:
            self._learning.stepped(scheduler)

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
        if self._learning is not None:
            self._learning.ended(request, num_tokens, reason)

    def freed(self, request: Request) -> None:
        """Its key is free: whoever is told of the end may use it again."""
        self.num_leaving = max(self.num_leaving - 1, 0)
        self._end(self._endings.pop(request))
