"""Patience: how long a connection waits for a client that reads nothing, or that does not say what it wants.

Writing pauses while 64 KiB stand ready for a client (uvicorn's flow control), so that an answer waits in its stream. When
none of them can be sent on for `slow_reader` seconds the client is cut, which aborts its requests like any other disconnect.
With what the system keeps for it (run.py), that is a client that reads less than about 100 KB in that time while three times
as much waits.

A new connection, and one that has begun to send another call, has `upload_timeout` seconds until the last of its headers; the
body is BodyLimit's. A connection that is idle between calls waits for nothing here: uvicorn closes it in its own time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import error_body

log = logging.getLogger(__name__)


def patient_protocol(slow_reader: float, upload_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which cuts a client that has taken nothing for `slow_reader` s, or whose headers have not come
    within `upload_timeout` s."""
    parent: Any = AutoHTTPProtocol
    late = _answer(408, f"the headers have not come within {upload_timeout:g} s")

    class PatientProtocol(parent):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None  # for a reader
        _call: asyncio.TimerHandle | None = None  # for the next call
        _heard = False  # anything since the last call

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            begun = self.cycle is not None and not self.cycle.response_complete
            self._heard = not begun
            if begun:
                self._expect_nothing()
            elif self._call is None:
                self._expect()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            self._expect_nothing()
            super().connection_lost(exc)

        def _expect(self) -> None:
            self._call = asyncio.get_running_loop().call_later(upload_timeout, self._late)

        def _expect_nothing(self) -> None:
            if self._call is not None:
                self._call.cancel()
                self._call = None

        def _late(self) -> None:
            refused = self.cycle is not None and self.cycle.more_body  # what comes is a body that nobody has waited for
            if self._heard and not refused and not self.transport.is_closing():
                self.transport.write(late)
            log.info("cut a client that has not said what it wants for %g s", upload_timeout)
            self.transport.close()

        def _wait(self) -> None:
            size = self.transport.get_write_buffer_size()
            self._timer = asyncio.get_running_loop().call_later(slow_reader, self._look, size)

        def _look(self, before: int) -> None:
            if self.transport.get_write_buffer_size() < before:
                self._wait()
                return
            log.info("cut a client that has read nothing for %g s", slow_reader)
            self.transport.abort()

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return PatientProtocol


def _answer(status: int, message: str) -> bytes:
    """An error as it is sent, to whom no application answers."""
    body = json.dumps(error_body(message, status)).encode()
    head = f"HTTP/1.1 {status} Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body
