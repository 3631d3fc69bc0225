"""Child: a server of ours in a process of its own, there for the length of a `with`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

MODULE = "lengthwise.experiments.serve_cell"
READY = re.compile(r"^serving .* at (http://\S+) ")
LAST = 20  # lines of what it has said that are kept, for when it fails
START = 900.0  # s that it has to come up: kernels and a compiled decoder may have to be built first
PATIENCE = 60.0  # s that it has to leave


class Child(NamedTuple):
    """A server that can be asked at `url`."""

    url: str
    pid: int


@contextmanager
def child(cfg: Mapping[str, Any]) -> Iterator[Child]:
    """Serve `cfg` (as serve_app.serve takes it, of plain values) for as long as the block runs.

    Raises ValueError with its last lines when it does not come up, or has ended before it was told to.
    """
    said: deque[str] = deque(maxlen=LAST)
    url: list[str] = []
    known = threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,  # a Ctrl-C at the keyboard is for the parent, which tells it
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    lines = process.stdout

    def read() -> None:
        for line in lines:
            said.append(line)
            if not url and (found := READY.match(line)):
                url.append(found[1])
                known.set()
        known.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()

    def words() -> str:
        reading.join(1.0)  # of one that has ended; else what it has said so far
        return " | ".join(line.strip() for line in reversed(list(said)) if line.strip()) or "it said nothing"

    try:
        process.stdin.write(json.dumps(cfg) + "\n")
        process.stdin.flush()
        if not known.wait(START):
            raise ValueError(f"the server has not started within {START:g} s: {words()}")
        if not url:
            raise ValueError(f"the server did not start: {words()}")
        try:
            yield Child(url[0], process.pid)
        finally:  # whatever its client made of that
            if process.poll() is not None:
                raise ValueError(f"the server ended by itself with exit code {process.returncode}: {words()}")
    except BrokenPipeError:
        raise ValueError(f"the server did not start: {words()}") from None
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reading.join(PATIENCE)
        process.stdin.close()
        lines.close()
