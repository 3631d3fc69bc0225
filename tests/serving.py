"""A live Service on a tiny model for tests: started and closed around a coroutine, its steps held and let go one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from native import served

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.tiny import tiny
from lengthwise.engine.server.service import Service
from lengthwise.engine.server.streams import Delta, Stream
from lengthwise.sched import recompute
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS

LIMIT = 60.0  # s; a test that takes longer hangs


class Letters:
    """A tokenizer: every id has two or three characters of its own."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{chr(97 + i % 26)}{i // 26}{'!' if i % 7 == 0 else ''}" for i in ids)


def writer() -> NativeEngine:
    """An engine whose model has a tokenizer."""
    model = tiny("qwen2")
    model.tokenizer = Letters()  # type: ignore[assignment]
    return NativeEngine(model, attention="torch")


def plain_engine() -> NativeEngine:
    return NativeEngine(served(), attention="torch")


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    logprobs: list[Any]
    reason: str
    deltas: list[Delta]


async def read(stream: Stream) -> Answer:
    """All of it, as fast as it comes."""
    deltas = [await stream.next()]
    while deltas[-1].reason is None:
        deltas.append(await stream.next())
    return Answer(
        [i for d in deltas for i in d.token_ids],
        "".join(d.text for d in deltas),
        [entry for d in deltas for entry in d.logprobs],
        str(deltas[-1].reason),
        deltas,
    )


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(1e-3)


class Gate:
    """Holds the step loop before a step, once shut. `held`: it stands there. Steps go when they are let go, one by one."""

    def __init__(self, service: Service) -> None:
        self._shut, self._tickets = False, threading.Semaphore(0)
        self.held = False
        executor, inner = service._executor, service._executor.submit

        def submit(plan: Any) -> Any:
            if self._shut:
                self.held = True
                assert self._tickets.acquire(timeout=LIMIT)
                self.held = False
            return inner(plan)

        executor.submit = submit  # type: ignore[method-assign]

    async def shut(self) -> None:
        self._shut = True
        await until(lambda: self.held)

    def shut_at_next(self) -> None:
        self._shut = True

    async def step(self) -> None:
        """Let one step go, and wait until the loop stands before the next one."""
        self.held = False
        self._tickets.release()
        await until(lambda: self.held)

    def open(self) -> None:
        self._shut = False
        self._tickets.release()


def run(main: Callable[[Service], Awaitable[Any]], engine: NativeEngine | None = None, **options: Any) -> Any:
    """Serve while `main` runs, close, and see that no thread is left; returns what it returns."""
    kv, policy = options.pop("kv", None) or Paged(4096, 16, 0.0), options.pop("policy", None) or FCFS()
    batching, preemption = options.pop("batching", None) or Chunked(), options.pop("preemption", None) or recompute()
    options = {"max_num_seqs": 8, "token_budget": 64, "max_model_len": 2048, "check": True, **options}
    service = Service(engine or plain_engine(), kv, policy, batching, preemption, **options)

    async def body() -> Any:
        service.start(asyncio.get_running_loop())
        try:
            return await asyncio.wait_for(main(service), LIMIT)
        finally:
            await service.close()

    result = asyncio.run(body())
    assert not [t for t in threading.enumerate() if t.name.startswith("lengthwise-")]
    if service.health().error is None:
        service.idle_check()
    return result
