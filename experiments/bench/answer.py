"""Answer: what has come back for one request: when each token came, and how many the server says there were.

A token is generated text of any channel (content, reasoning, tool calls), never an empty role frame. The server's own count,
`usage`, goes before the number of events; where it comes with every event it also says how many tokens each one holds, else an
event counts as one token, and what is missing of the server's count is spread over the events evenly.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTENT = ("text", "content")
CHANNELS = (*CONTENT, "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
STOPS = ("stop", "tool_calls", "function_call", "content_filter", "eos", "eos_token", "stop_sequence", "end_turn")
ENDS = {**dict.fromkeys(STOPS, "stop"), "length": "length", "abort": "aborted", "aborted": "aborted", "timeout": "timeout"}


class StreamError(Exception):
    """The server says in the middle of a stream that it has failed."""


class Answer:
    """One request's answer so far. Times in seconds of the run's clock; NaN for what has not come.

    sent: when it was first sent. first_content: when visible text first came. count: output tokens as the server says, None
    until it does. prompt_count, cached: prompt tokens, and how many of them were found cached, as the server says. finish: the
    server's reason. num_retries: times it was sent again. num_events: those that held tokens. num_seen: tokens by those alone.
    """

    __slots__ = (
        "_closed", "_each", "_silent", "_sizes", "_times", "cached", "count", "finish", "first_content", "num_retries",
        "num_seen", "prompt_count", "sent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sent = self.first_content = math.nan
        self.num_retries = self.num_seen = 0
        self.count: int | None = None
        self.prompt_count: int | None = None
        self.cached: int | None = None
        self.finish: str | None = None
        self._times, self._sizes = array("d"), array("l")
        self._each = True  # every event with tokens came with a count
        self._silent = array("d")  # events without text: half a character, or nothing at all
        self._closed = math.nan  # when the reason came, without text

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Take in one event of the stream, come at `now`. Mutates self. Raises StreamError when it is an error."""
        if (error := event.get("error")) is not None:
            raise StreamError(str(error.get("message", error) if isinstance(error, Mapping) else error)[:200])
        usage = event.get("usage") or {}
        told = _count(usage.get("completion_tokens"))
        for choice in event.get("choices") or ():
            self._choice(choice, told, now)
        if told is not None:
            self.count = told
        if (given := _count(usage.get("prompt_tokens"))) is not None:
            self.prompt_count = given
        if (found := _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))) is not None:
            self.cached = found

    def _choice(self, choice: Mapping[str, Any], told: int | None, now: float) -> None:
        said = choice.get("delta") or choice
        text = any(said.get(name) for name in CHANNELS)
        ids = choice.get("token_ids") or ()
        if told is not None and self._each:
            size = told - self.num_seen
        else:
            size = len(ids) or int(text)
        if size > 0:
            self._each = self._each and told is not None
            self._times.append(now)
            self._sizes.append(size)
            self.num_seen += size
        if math.isnan(self.first_content) and any(said.get(name) for name in CONTENT):
            self.first_content = now
        if choice.get("finish_reason") is not None:
            self.finish = str(choice["finish_reason"])
            if size <= 0:
                self._closed = now
        elif size <= 0 and told is None and "role" not in said:
            self._silent.append(now)

    @property
    def num_events(self) -> int:
        return len(self._times)

    @property
    def num_tokens(self) -> int:
        """Output tokens: the server's count, else those seen."""
        return self.num_seen if self.count is None else self.count

    def tokens(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(times (m,) in s, tokens that came at each (m,), at least 1). They add up to num_tokens, where any came at a time."""
        times, sizes, missing = self._known()
        if missing and len(times):
            ends = np.round(np.cumsum(sizes) * (self.num_tokens / sizes.sum())).astype(np.int64)
            sizes = np.diff(np.maximum(ends, min(self.num_tokens, 1)), prepend=0)  # the first event holds a token
        elif missing and not math.isnan(self._closed):  # nobody knows when
            times, sizes = np.array([self._closed]), np.array([missing])
        return times[sizes > 0], sizes[sizes > 0]

    @property
    def first_token(self) -> float:
        """When the first token came, s; NaN where none did, or nobody knows when."""
        times, _, _ = self._known()
        return float(times[0]) if len(times) and self.num_tokens else math.nan

    @property
    def miscount(self) -> int:
        """The server's count less the tokens whose time is known; 0 where it gives none."""
        return self._known()[2]

    def _known(self) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
        """(times, tokens at each, tokens of the server's count that have none). An event without text held a token where the
        count says so: where as many are missing as there were such events, with or without the last one, or where an end token
        came with the reason."""
        times, sizes = np.array(self._times, np.float64), np.array(self._sizes, np.int64)
        missing, silent = self.num_tokens - self.num_seen, self._silent.tolist()
        if missing <= 0:
            return times, sizes, missing
        closed = [] if math.isnan(self._closed) else [self._closed]
        if missing == len(silent) + len(closed):
            silent += closed
        elif missing != len(silent):
            silent = closed if ENDS.get(self.finish or "") == "stop" and len(times) else []
        order = np.argsort(np.append(times, silent), kind="stable")
        sizes = np.append(sizes, np.ones(len(silent), np.int64))[order]
        return np.append(times, silent)[order], sizes, missing - len(silent)


def _count(value: Any) -> int | None:
    """Raises TypeError for what is no count."""
    if value is not None and (not isinstance(value, int) or not 0 <= value < 2**31):
        raise TypeError(f"a count of {value!r}"[:100])
    return value
