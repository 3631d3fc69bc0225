"""A Service without an engine: the same interface, answers that follow from the prompt alone, and levers for trouble."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import prometheus_client

from lengthwise.engine.native.logprobs import Logprobs
from lengthwise.engine.native.model import ServedModel
from lengthwise.engine.native.tiny import tiny_model
from lengthwise.engine.server.answers import joined
from lengthwise.engine.server.health import Down, Full, Health
from lengthwise.engine.server.settings import Settings
from lengthwise.engine.server.streams import Delta

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def byte_tokenizer() -> Any:
    """One token a byte, and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(letters, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", chat_template=CHAT)


@lru_cache(maxsize=1)
def byte_model() -> ServedModel:
    """A tiny random model that reads and writes bytes."""
    return ServedModel(tiny_model(vocab_size=257, max_positions=512, eos_token_id=256), byte_tokenizer(), "tiny-bytes")


class FakeStream:
    def __init__(self, key: str) -> None:
        self.key, self.num_cached = key, 3
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()

    def put(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)

    async def next(self) -> Delta:
        deltas = [await self._queue.get()]
        while not self._queue.empty():
            deltas.append(self._queue.get_nowait())
        return joined(deltas)


class Fake:
    """step: s between tokens. hold: requests stay queued. ending: how they end after two tokens, instead of by length."""

    def __init__(self, *, step: float = 0.0, hold: bool = False, ending: str | None = None, width: int = 1) -> None:
        self.model, self.max_model_len = byte_model(), 512
        self.metrics = SimpleNamespace(registry=prometheus_client.CollectorRegistry())
        prometheus_client.Gauge("vllm:num_requests_running", "live", registry=self.metrics.registry).set_function(
            lambda: len(self.live)
        )
        self.step, self.hold, self.ending, self.width = step, hold, ending, width
        self.live: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, FakeStream] = {}
        self.asked: list[tuple[str, list[int], int, Any, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.full: float | None = None
        self.down: str | None = None
        self.last_step_age = 0.0

    def start(self, loop: Any) -> None: ...

    def check_room(self) -> None:
        if self.down is not None:
            raise Down(self.down)
        if self.full is not None and len(self.live) >= self.full:
            raise Full(len(self.live), int(self.full), 2.5)

    async def submit(self, key: str, prompt_ids: list[int], max_new_tokens: int, params: Any, **fields: Any) -> FakeStream:
        self.check_room()
        if key in self.live:
            raise ValueError(f"request id {key!r} is in use by a request that has not ended")
        if not prompt_ids:
            raise ValueError("empty prompt")
        if max(prompt_ids) >= self.model.vocab_size:
            raise ValueError("token id outside the vocabulary")
        self.asked.append((key, prompt_ids, max_new_tokens, params, fields))
        stream = self._streams[key] = FakeStream(key)
        self.live[key] = asyncio.ensure_future(self._run(stream, prompt_ids, max_new_tokens, params))
        return stream

    async def _run(self, stream: FakeStream, prompt: list[int], cap: int, params: Any) -> None:
        if self.hold:
            await asyncio.Event().wait()
        for i in range(cap):
            await asyncio.sleep(self.step)
            if self.ending is not None and i == 2:
                del self.live[stream.key]
                stream.put(Delta([], "", [], self.ending, 0.0))
                return
            token = 64 + (sum(prompt) + i) % 26
            last = i == cap - 1
            if last:
                del self.live[stream.key]
            top = () if not params.logprobs else ((token, -0.5), (65, -float("inf")))
            probs = [] if params.logprobs is None else [Logprobs(token, -0.5, top)]
            text = self.model.decode([token]) * self.width
            stream.put(Delta([token], text, probs, "length" if last else None, float(i)))

    def abort(self, stream: FakeStream) -> None:
        if stream.key in self.live and self._streams[stream.key] is stream:
            self.live.pop(stream.key).cancel()
            self.aborted.append(stream.key)

    async def drain(self, timeout: float) -> int:
        self.down = "the server is stopping"
        if self.live:
            await asyncio.wait(self.live.values(), timeout=timeout)
        left = list(self.live)
        for key in left:
            self.abort(self._streams[key])
        return len(left)

    async def close(self) -> None: ...

    def health(self) -> Health:
        return Health(self.down is None, self.down, False, self.last_step_age, 0, len(self.live))


OPEN = Settings(port=0)
