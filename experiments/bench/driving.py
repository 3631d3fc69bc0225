"""Driving: a whole run against one server, from its first word about itself to the last answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from lengthwise.sched import Request, Source

from .answer import Answer
from .sender import Sender, Told

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["Connection", "Driven", "Made", "Told", "Tries", "drive", "introduced"]

T = TypeVar("T")


class Made(Protocol):
    """Makes the bodies of requests."""

    def of(self, request: Request) -> dict[str, Any]:
        """The JSON of one request."""
        ...


@dataclass(frozen=True)
class Tries:
    """How often and when a request is sent again. retries: at most so many; backoff: s before the first, twice that before the
    next. stall: s without a byte after which it is given up."""

    retries: int = 2
    backoff: float = 0.5
    stall: float = 600.0


@dataclass(frozen=True)
class Connection:
    """How a server is reached. model: as it calls it; None: the first that it lists. concurrency: see Sender."""

    address: str
    headers: Mapping[str, str]
    tries: Tries
    path: str
    model: str | None
    concurrency: int | None


class Driven(NamedTuple):
    """How a run went. stopped: s, where the cap ended it; about: what the server says of itself; cpu, wall: s."""

    stopped: float | None
    about: Mapping[str, Any]
    model: str
    cpu: float
    wall: float


class Since:
    """Seconds since it was last restarted."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start = time.monotonic()  # as an event loop counts

    def __call__(self) -> float:
        return time.monotonic() - self._start


def drive(
    connection: Connection,
    bodies: Callable[[str], Made],
    source: Source,
    told: Told,
    cap: float | None = None,
    answer: Callable[[], Answer] = Answer,
) -> Driven:
    """Ask the server all that `source` gives, in real time from the first word on; bodies: given the name of the model. answer:
    makes what an answer is taken into. Raises ValueError when the server cannot be asked."""
    from .endpoint import Endpoint  # aiohttp is an extra's

    clock = Since()

    async def work() -> Driven:
        async with Endpoint(connection.address, connection.headers, connection.tries, clock) as endpoint:
            model, about = await _introduced(endpoint, connection)
            made = bodies(model)

            async def ask(request: Request, answer: Answer) -> str:
                return await endpoint.ask(connection.path, made.of(request), answer)

            sender = Sender(ask, told, clock, connection.concurrency, answer)
            clock.restart()
            cpu = time.process_time()
            stopped = await sender.run(source, cap)
            return Driven(stopped, about, model, time.process_time() - cpu, clock())

    return _finished(work)


def introduced(connection: Connection) -> tuple[str, Mapping[str, Any]]:
    """(the name of the model, what the server says of itself). Raises ValueError when it cannot be asked."""
    from .endpoint import Endpoint

    async def work() -> tuple[str, Mapping[str, Any]]:
        async with Endpoint(connection.address, connection.headers, connection.tries, Since()) as endpoint:
            return await _introduced(endpoint, connection)

    return _finished(work)


async def _introduced(endpoint: Endpoint, connection: Connection) -> tuple[str, Mapping[str, Any]]:
    about = await endpoint.about()
    model = connection.model or next((one["id"] for one in about["models"]), None)
    if model is None:
        raise ValueError(f"target={connection.address} lists no model: executor.model_name= says which")
    return model, about


def _finished(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine of `work` returns, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()
