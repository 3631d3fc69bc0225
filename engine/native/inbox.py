"""Inbox: where requests come in while the engine runs. What no engine can serve is refused at once, and nobody else notices."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from lengthwise.sched import INF, Clock, Event, EventKind, LengthDistribution, Request

from .door import check_count, check_stops, whole_ids
from .generation import GREEDY
from .names import name_pieces
from .sampling import SamplingParams

POLL = 0.05  # s; an open inbox is looked into at least this often


class StandIn(NamedTuple):
    """For a prediction that is still to come: if it is not there `after` so many seconds, this one takes its place."""

    after: float
    prediction: LengthDistribution


class Inbox:
    """A Source. `submit`, `predicted`, `abort` and `close` may be called from any thread; `wake` is set whenever something
    comes in, for a clock that waits. hash_tokens: name the pieces of prompts, for a prefix cache; 0: do not. has_text: the
    model has a tokenizer, so that stop strings can be found. door: says why a request can never be served, or None. freed: told
    of each request that has ended, in the engine's thread, when its key is free again.

    A key names one live request: it is free again once that has ended. `sampling` says how a request's tokens are chosen,
    `answer_lens` (rid -> tokens) which answers are forced to a length. `num_late` counts stand-ins for late predictions.
    """

    def __init__(
        self,
        clock: Clock,
        vocab_size: int,
        *,
        hash_tokens: int = 0,
        wake: threading.Event | None = None,
        has_text: bool = False,
        door: Callable[[Request], str | None] | None = None,
        freed: Callable[[Request], None] | None = None,
    ) -> None:
        self._clock = clock
        self._vocab_size = vocab_size
        self._has_text = has_text
        self._hash_tokens = hash_tokens
        self._door = door
        self._freed = freed
        self.wake = wake or threading.Event()
        self.answer_lens: dict[int, int] = {}
        self.num_late = 0
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._timed: list[tuple[float, int, Request, LengthDistribution | None]] = []  # timeouts, and stand-ins
        self._live: dict[str, Request] = {}
        self._keys: dict[Request, str] = {}
        self._params: dict[Request, SamplingParams] = {}
        self._num = 0
        self._open = True

    @property
    def num_live(self) -> int:
        """Requests that have come in and have not ended."""
        return len(self._live)

    def submit(
        self,
        key: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        params: SamplingParams = GREEDY,
        *,
        answer_len: int | None = None,
        stand_in: StandIn | None = None,
        **fields: Any,
    ) -> Request:
        """Hand in a request. answer_len: its answer has so many tokens, whatever they are. stand_in: its prediction is still to
        come, by `predicted`. fields: further ones of Request (client, priority, slo, ...); timeout is from now on.

        Raises ValueError, and changes nothing, for a key that is in use, an empty prompt, ids outside the vocabulary, a
        max_new_tokens or answer_len that is no whole number of at least 1, stop strings without a tokenizer, a priority or
        weight that is no finite number, a timeout that is not above 0, what the door refuses, or an inbox that is closed."""
        name = f"request {key!r}"
        prompt_ids = whole_ids(name, prompt_ids, self._vocab_size)
        check_stops(name, params, self._has_text)
        for field in ("priority", "weight"):
            if not math.isfinite(fields.get(field, 0.0)):  # as a key it would stand anywhere
                raise ValueError(f"{name} has the {field} {fields[field]}: a finite number is wanted")
        check_count(name, "new tokens", max_new_tokens)
        if answer_len is not None:
            check_count(name, "tokens as its answer", answer_len)
        timeout = fields.get("timeout")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"{name} has the timeout {timeout}: seconds above 0 are wanted")
        names = name_pieces(prompt_ids, self._hash_tokens) if self._hash_tokens else None
        with self._lock:
            if not self._open:
                raise ValueError(f"{name} comes after the inbox was closed")
            if key in self._live:
                raise ValueError(f"request id {key!r} is in use by a request that has not ended")
            now = self._clock.now
            request = Request(
                self._num, now, len(prompt_ids), max_new_tokens, prompt_ids=prompt_ids, block_hashes=names, **fields
            )
            if self._door is not None and (refusal := self._door(request)) is not None:
                raise ValueError(f"{name}: {refusal}")
            self._num += 1
            self._live[key] = request
            self._keys[request] = key
            self._params[request] = params
            if answer_len is not None:
                self.answer_lens[request.rid] = answer_len
            self._events.append(Event(now, EventKind.ARRIVAL, request))
            if stand_in is not None:
                heappush(self._timed, (now + stand_in.after, 2 * request.rid, request, stand_in.prediction))
            if timeout is not None and timeout < INF:
                heappush(self._timed, (now + timeout, 2 * request.rid + 1, request, None))
            if len(self._timed) > 4 * len(self._live) + 64:  # of those who have ended, each keeps a prompt
                self._timed = [entry for entry in self._timed if entry[2] in self._keys]
                heapify(self._timed)
        self.wake.set()
        return request

    def predicted(self, request: Request, prediction: LengthDistribution) -> bool:
        """Here is the prediction of a request that came in without; False if that has ended, or has one."""
        with self._lock:
            if request not in self._keys or request.prediction is not None:
                return False
            request.prediction = prediction
            self._events.append(Event(self._clock.now, EventKind.PREDICTION_READY, request))
        self.wake.set()
        return True

    def abort(self, request: Request) -> bool:
        """Ask that a request ends; False if it has. Not by its key, which may name another by now."""
        with self._lock:
            if request not in self._keys:
                return False
            self._events.append(Event(self._clock.now, EventKind.ABORT, request))
        self.wake.set()
        return True

    def close(self) -> None:
        """Nothing more comes: the loop ends when all that is in has ended."""
        with self._lock:
            self._open = False
        self.wake.set()

    def sampling(self, request: Request) -> SamplingParams:
        return self._params[request]

    # --- the Source ---------------------------------------------------------------------------------------------------

    def peek(self) -> float:
        with self._lock:  # between a look at the events and one at the door, a last one may come in and the door close
            if self._events:
                return self._events[0].time
            return min(self._due(), self._clock.now + POLL if self._open else INF)

    def pop(self, now: float) -> list[Event]:
        out = []
        with self._lock:
            while self._events and self._events[0].time <= now:
                out.append(self._events.popleft())
            while self._due() <= now:
                time, _, request, prediction = heappop(self._timed)
                if prediction is None:
                    out.append(Event(time, EventKind.TIMEOUT, request))
                elif request.prediction is None:
                    self.num_late += 1
                    request.prediction = prediction
                    out.append(Event(time, EventKind.PREDICTION_READY, request))
        return out

    def _due(self) -> float:
        """When the first of `timed` happens (s). Drops those of requests that have ended. The lock is held."""
        timed = self._timed
        while timed and timed[0][2] not in self._keys:
            heappop(timed)
        return timed[0][0] if timed else INF

    def on_finish(self, request: Request, now: float) -> None:
        with self._lock:
            self._params.pop(request, None)
            self.answer_lens.pop(request.rid, None)
            del self._live[self._keys.pop(request)]
        if self._freed is not None:
            self._freed(request)
