"""Groups of processes: a command and all that it starts, of which nothing is left once its block has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

PATIENCE = 60.0  # s that a command has to leave


@contextlib.contextmanager
def group(
    command: Sequence[str | Path], stdout: IO[str], stderr: IO[str] | int, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`command` while the block runs; then it is told to leave, and what has not done so in time is killed."""
    with subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=cwd, start_new_session=True) as child:
        try:
            yield child
        finally:
            child.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(PATIENCE)
            finally:
                with contextlib.suppress(ProcessLookupError):  # all have left
                    os.killpg(child.pid, signal.SIGKILL)
