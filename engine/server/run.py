"""run: one server until it is told to stop; then it takes nobody new, lets the live ones finish for a while, and leaves."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from .app import make_app
from .patience import patient_protocol
from .service import Service
from .settings import Settings

SEND_BUFFER = 2**17  # bytes that the system keeps for a client that does not read: see patience.py
KEEP_ALIVE = 60  # s that a connection may be idle: longer than clients keep theirs
LAST_WORDS = 5  # s that answers have to reach their clients once all requests have ended


def bind(settings: Settings) -> socket.socket:
    """The socket to listen on, bound. Raises OSError where that cannot be."""
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run(
    service: Service, settings: Settings, sock: socket.socket, about: Mapping[str, Any], ready: Callable[[], None]
) -> None:
    """Start `service`, answer on `sock`, call `ready` when that can be asked, and return after SIGTERM or SIGINT. Mutates and
    closes both."""
    service.start(asyncio.get_running_loop())
    try:
        await Server(service, settings, about, ready).serve([sock])
    finally:
        await service.close()


class Server(uvicorn.Server):
    """uvicorn's, with a drain of `service` before it shuts down, and an exit that is no death by signal."""

    def __init__(
        self, service: Service, settings: Settings, about: Mapping[str, Any], ready: Callable[[], None] = lambda: None
    ) -> None:
        quiet()
        super().__init__(
            uvicorn.Config(
                make_app(service, settings, about), http=patient_protocol(settings.slow_reader, settings.upload_timeout),
                ws="none", lifespan="off", log_config=None, access_log=settings.access_log, server_header=False,
                timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=LAST_WORDS,
            )
        )  # fmt: skip
        self._service = service
        self._drain = settings.drain
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        draining = asyncio.ensure_future(self._service.drain(self._drain))
        while not draining.done() and not self.force_exit:  # a second SIGINT
            await asyncio.wait({draining}, timeout=0.1)
        if not draining.done():
            draining.cancel()
            await self._service.drain(0.0)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        main = threading.current_thread() is threading.main_thread()  # others cannot
        old = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM) if main}
        try:
            yield
        finally:
            for sig, handler in old.items():
                signal.signal(sig, handler)


class WithoutQuery(logging.Filter):
    """Cuts the query off the path in uvicorn's access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, version, status = record.args
            record.args = (client, method, str(path).partition("?")[0], version, status)
        return True


def quiet() -> None:
    """uvicorn tells of its faults only; the service has a line for each request."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    access = logging.getLogger("uvicorn.access")
    if not any(isinstance(each, WithoutQuery) for each in access.filters):
        access.addFilter(WithoutQuery())
