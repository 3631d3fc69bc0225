"""Live: the requests that live and who reads them, in the event loop's thread alone."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from lengthwise.sched import Request

from .outbox import Ending, Piece
from .streams import Stream

log = logging.getLogger(__name__)

RECENT = 64  # ends that the rate is taken from
LONGEST_RETRY = 60.0  # s


class Live:
    """`streams` by request. `idle` is set while there are none. busy_since: s, when there was last nobody before. told: hears
    of each end too."""

    def __init__(self, told: Callable[[Stream, Ending], None] | None = None) -> None:
        self._told = told
        self.streams: dict[Request, Stream] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.busy_since = 0.0
        self._ends: deque[float] = deque(maxlen=RECENT)

    def add(self, stream: Stream) -> None:
        if not self.streams:
            self.idle.clear()
            self.busy_since = stream.request.arrival
        self.streams[stream.request] = stream

    def put(self, pieces: Sequence[Piece], time: float) -> None:
        """What a step that ended at `time` (s) has brought."""
        for piece in pieces:
            if (stream := self.streams.get(piece.request)) is not None:
                stream.put(piece, time)

    def end(self, ending: Ending) -> None:
        stream = self.streams.pop(ending.piece.request, None)
        if stream is None:  # everybody's end was told before
            return
        self._ends.append(ending.time)
        self._end(stream, ending)
        if not self.streams:
            self.idle.set()

    def end_all(self, reason: str, time: float, generated: Callable[[Request], int]) -> None:
        """The engine ends nobody any more."""
        streams, self.streams = self.streams, {}
        for request, stream in streams.items():
            self._end(stream, Ending(Piece(request, None, "", None), generated(request), reason, time))
        self.idle.set()

    def retry_after(self, num_waiting: int, now: float) -> float:
        """s in which as many end as wait, at the rate of late; from 1 to LONGEST_RETRY."""
        if len(self._ends) < 2:
            return 1.0
        rate = (len(self._ends) - 1) / max(now - self._ends[0], 1e-9)
        return min(max(num_waiting / rate, 1.0), LONGEST_RETRY)

    def _end(self, stream: Stream, ending: Ending) -> None:
        """Tell the reader, and the log: one line, never what was said."""
        stream.put(ending.piece, ending.time, ending.reason)
        request = stream.request
        moments = {"scheduled": request._first_scheduled, "first token": request._first_token}
        said = "".join(f", {name} after {at - request.arrival:.3f} s" for name, at in moments.items() if at >= 0.0)
        log.info(
            "request %r ended by %s: %d + %d tokens, %.3f s%s",
            stream.key, ending.reason, request.prompt_len, ending.num_tokens, ending.time - request.arrival, said,
        )  # fmt: skip
        if self._told is not None:
            self._told(stream, ending)
