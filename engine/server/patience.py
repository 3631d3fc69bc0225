"""Patience: how long a connection waits for a client that reads nothing, or that does not say what it wants.

Writing pauses while 64 KiB stand ready for a client (uvicorn's flow control), so that an answer waits in its stream. When
none of them can be sent on for `slow_reader` seconds the client is cut, which aborts its requests like any other disconnect.
With what the system keeps for it (run.py), that is a client that reads less than about 100 KB in that time while three times
as much waits.

A new connection, and one that has begun to send another call, has `upload_timeout` seconds until the last of its headers; the
body is BodyLimit's. What is left of a body that has been answered unread has as long again. A connection that is idle between
calls waits for nothing here: uvicorn closes it in its own time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import h11
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import error_body

log = logging.getLogger(__name__)


def patient_protocol(slow_reader: float, upload_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which cuts a client that has taken nothing for `slow_reader` s, or whose headers have not come
    within `upload_timeout` s."""
    parent: Any = AutoHTTPProtocol
    late = _answer(408, f"the headers have not come within {upload_timeout:g} s")

    class PatientProtocol(parent):  # type: ignore[misc]
        timeout_keep_alive_task: asyncio.TimerHandle | None  # uvicorn's
        _timer: asyncio.TimerHandle | None = None  # for a reader
        _call: asyncio.TimerHandle | None = None  # for what is awaited
        _awaited: str | None = None  # "headers" or "body", of a call that nobody has noticed yet, or that has been answered
        _coming: str | None = None  # "headers" or "body", of a call of which some has come and some has not

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect()

        def on_message_begin(self) -> None:  # this and the next two are httptools': h11 tells of its state itself
            super().on_message_begin()
            self._coming = "headers"

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self._coming = "body"

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._coming = None

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
            """Have the timer run for what is awaited now, from when that began; uvicorn's for a connection that is idle."""
            if conn := getattr(self, "conn", None):  # h11
                self._coming = "body" if conn.their_state is h11.SEND_BODY else "headers" if conn.trailing_data[0] else None
            if self.cycle is None:  # a connection is made for a call
                awaited: str | None = "headers"
            else:
                awaited = self._coming if self.cycle.response_complete else None
            if awaited != self._awaited:
                self._expect_nothing()
                self._awaited = awaited
                if awaited is not None:
                    self._unset_keepalive_if_required()
                    self._call = self.loop.call_later(upload_timeout, self._late)
            if awaited is None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
                # uvicorn has stopped it for what has come, and starts it only after an answer
                self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

        def _expect_nothing(self) -> None:
            self._awaited = None
            if self._call is not None:
                self._call.cancel()
                self._call = None

        def _late(self) -> None:
            if self._coming == "headers" and not self.transport.is_closing():
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
