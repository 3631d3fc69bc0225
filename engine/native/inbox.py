"""Inbox: where requests come in while the engine runs. What no engine can serve is refused at once, and nobody else notices."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lengthwise.sched import INF, Clock, Event, EventKind, Request

from .door import check_stops, whole_ids
from .generation import GREEDY
from .names import name_pieces
from .sampling import SamplingParams

POLL = 0.05  # s; an open inbox is looked into at least this often


class Inbox:
    """A Source. `submit`, `abort` and `close` may be called from any thread; `wake` is set whenever something comes in, for a
    clock that waits. hash_tokens: name the pieces of prompts, for a prefix cache; 0: do not. has_text: the model has a
    tokenizer, so that stop strings can be found.

    A key names one live request: it is free again once that has ended. `sampling` says how a request's tokens are chosen.
    """

    def __init__(
        self,
        clock: Clock,
        vocab_size: int,
        *,
        hash_tokens: int = 0,
        wake: threading.Event | None = None,
        has_text: bool = False,
    ) -> None:
        self._clock = clock
        self._vocab_size = vocab_size
        self._has_text = has_text
        self._hash_tokens = hash_tokens
        self.wake = wake or threading.Event()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._live: dict[str, Request] = {}
        self._keys: dict[Request, str] = {}
        self._params: dict[Request, SamplingParams] = {}
        self._num = 0
        self._open = True

    def submit(
        self, key: str, prompt_ids: Sequence[int], max_new_tokens: int, params: SamplingParams = GREEDY, **fields: Any
    ) -> Request:
        """Hand in a request. fields: further ones of Request (client, priority, slo, ...).

        Raises ValueError, and changes nothing, for a key that is in use, an empty prompt, ids outside the vocabulary, a
        max_new_tokens that is no whole number of at least 1, stop strings without a tokenizer, a priority or weight that is no
        finite number, or an inbox that is closed."""
        prompt_ids = whole_ids(f"request {key!r}", prompt_ids, self._vocab_size)
        check_stops(f"request {key!r}", params, self._has_text)
        for name in ("priority", "weight"):
            if not math.isfinite(fields.get(name, 0.0)):  # as a key it would stand anywhere
                raise ValueError(f"request {key!r} has the {name} {fields[name]}: a finite number is wanted")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"request {key!r} asks for {max_new_tokens!r} new tokens: a whole number of at least 1 is wanted")
        names = name_pieces(prompt_ids, self._hash_tokens) if self._hash_tokens else None
        with self._lock:
            if not self._open:
                raise ValueError(f"request {key!r} comes after the inbox was closed")
            if key in self._live:
                raise ValueError(f"request id {key!r} is in use by a request that has not ended")
            now = self._clock.now
            request = Request(
                self._num, now, len(prompt_ids), max_new_tokens, prompt_ids=prompt_ids, block_hashes=names, **fields
            )
            self._num += 1
            self._live[key] = request
            self._keys[request] = key
            self._params[request] = params
            self._events.append(Event(now, EventKind.ARRIVAL, request))
        self.wake.set()
        return request

    def abort(self, key: str) -> bool:
        """Ask that a request ends; False if none of that key is live."""
        with self._lock:
            request = self._live.get(key)
            if request is None:
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
            return self._clock.now + POLL if self._open else INF

    def pop(self, now: float) -> list[Event]:
        out = []
        with self._lock:
            while self._events and self._events[0].time <= now:
                out.append(self._events.popleft())
        return out

    def on_finish(self, request: Request, now: float) -> None:
        with self._lock:
            self._params.pop(request, None)
            del self._live[self._keys.pop(request)]
