"""Server-sent events: bytes as they come from a connection, cut anywhere, to the data of whole events."""

from __future__ import annotations

from collections.abc import Iterator

LIMIT = 1 << 24  # bytes of one line: a server that sends more without an end is broken


class Events:
    """Feed it bytes; it gives the data of each event that is whole. Comments and other fields are left out."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # a line that has not ended
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of the events that `part` completes, in order. Raises ValueError on a line beyond LIMIT bytes."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > LIMIT:
            raise ValueError(f"a line of more than {LIMIT} bytes in a stream of events")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data
