"""Writer: one call's answer around its choices: ids, counts, usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .answering import Answering
from .answers import Json, Shape, joined
from .calls import Call
from .protocol import Asked
from .streams import Delta


class Writer:
    """For the call `body`, whose answers are `calls` and run as `live`. Counts tokens as they are written."""

    def __init__(self, key: str, body: Asked, shape: Shape, calls: Sequence[Call], live: Answering, model: str) -> None:
        self.include_usage = body.stream_options.include_usage
        self._continuous = self.include_usage and body.continuous_usage
        self._shape = shape
        self._head = {"id": f"{shape.prefix}-{key}", "created": int(time.time()), "model": model}
        self._asked = calls[:: body.n]  # one of each prompt
        self._begun = live.streams[:: body.n]
        self._num_tokens = 0
        self._seen: set[int] = set()

    def chunk(self, index: int, delta: Delta) -> Json:
        """What has come for the answer `index`."""
        first = index not in self._seen
        self._seen.add(index)
        self._num_tokens += len(delta.token_ids)
        usage = {"usage": self._usage()} if self._continuous else {}
        return {**self._chunk([self._shape.piece(index, delta, first)]), **usage}

    def usage_chunk(self) -> Json:
        return {**self._chunk([]), "usage": self._usage()}

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> Json:
        """Of all answers, each with its deltas."""
        answers = [joined(each) for each in deltas]
        self._num_tokens = sum(len(answer.token_ids) for answer in answers)
        choices = [self._shape.whole(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self._shape.kind, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self._shape.chunk_kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        given = sum(len(call.prompt.ids) for call in self._asked)
        cached = sum(stream.num_cached for stream in self._begun)
        return {
            "prompt_tokens": given, "completion_tokens": self._num_tokens, "total_tokens": given + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
