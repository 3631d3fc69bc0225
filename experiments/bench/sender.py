"""Sender: requests of a source, each sent at its own absolute time.

The time of the next one is never counted from the last: a loop that sleeps gap by gap adds up its delays and sends less than it
was asked for. The source is the simulation's, so sessions, closed loops, timeouts and the end of arrivals are as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from lengthwise.sched import INF, EventKind, Request, Source

from ..windows import Capped, CapReached
from .answer import Answer

Ask = Callable[[Request, Answer], Awaitable[str]]  # sends a request, fills in its answer, returns how it ended
Told = Callable[[Request, Answer, str, float], None]  # of each request that has ended: how, and when (s)


class Sender:
    """Sends what `source` gives by `ask` and tells `told`. concurrency: at most so many at a time; others wait, in order.
    answer: makes what each is taken into."""

    def __init__(
        self,
        ask: Ask,
        told: Told,
        clock: Callable[[], float],
        concurrency: int | None = None,
        answer: Callable[[], Answer] = Answer,
    ) -> None:
        self._ask, self._told, self._clock, self._answer = ask, told, clock, answer
        self._slots = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._live: dict[int, tuple[Request, Answer, asyncio.Task[None]]] = {}
        self._gone: set[int] = set()  # given up by their clients
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None

    async def run(self, source: Source, cap: float | None = None) -> float | None:
        """Until all have ended: None; or until `cap` (s), whoever is left unfinished: its time. Raises what `ask` raises."""
        self._source = source if cap is None else Capped(source, cap)
        try:
            while (at := self._due()) < INF or self._live:
                self._changed.clear()
                wake = None
                if at < INF:
                    loop = asyncio.get_running_loop()
                    wake = loop.call_at(loop.time() + at - self._clock(), self._changed.set)
                await self._changed.wait()
                if wake is not None:
                    wake.cancel()
        except CapReached as stop:
            self._gone.clear()
            for request, answer, task in list(self._live.values()):
                task.cancel()
                self._told(request, answer, "unfinished", stop.now)
            return stop.now
        finally:
            for _, _, task in self._live.values():
                task.cancel()
            await asyncio.gather(*(task for _, _, task in self._live.values()), return_exceptions=True)
        return None

    def _due(self) -> float:
        """Start all that is due. Returns when the next one is (s)."""
        if self._broken is not None:
            raise self._broken
        for _, kind, request in self._source.pop(self._clock()):
            if kind == EventKind.ARRIVAL:
                answer = self._answer()
                self._live[request.rid] = request, answer, asyncio.create_task(self._one(request, answer))
            elif kind == EventKind.TIMEOUT:
                self._gone.add(request.rid)
                cancel = self._live[request.rid][2].cancel  # soon: a task that has not begun could not say how it ended
                asyncio.get_running_loop().call_soon(cancel)
        return self._source.peek()

    async def _one(self, request: Request, answer: Answer) -> None:
        try:
            async with nullcontext() if self._slots is None else self._slots:
                reason = await self._ask(request, answer)
        except asyncio.CancelledError:
            if request.rid not in self._gone:
                raise
            reason = "timeout"
        except Exception as error:  # no request's own fault: the run ends by it
            self._broken = error
            self._changed.set()
            raise
        now = self._clock()
        del self._live[request.rid]
        self._gone.discard(request.rid)
        try:
            self._told(request, answer, reason, now)
            self._source.on_finish(request, now)
        except Exception as error:  # it cannot be kept: the run ends by it
            self._broken = error
        self._changed.set()
