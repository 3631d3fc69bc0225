"""Patience: how long a connection waits for a client that reads nothing.

Writing pauses while 64 KiB stand ready for a client (uvicorn's flow control), so that an answer waits in its stream. When
none of them can be sent on for `slow_reader` seconds the client is cut, which aborts its requests like any other disconnect.
With what the system keeps for it (run.py), that is a client that reads less than about 100 KB in that time while three times
as much waits.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger(__name__)


def patient_protocol(slow_reader: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which cuts a client that has taken nothing for `slow_reader` s."""
    parent: Any = AutoHTTPProtocol

    class PatientProtocol(parent):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

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
