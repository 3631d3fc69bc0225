"""The server of one cell, as a child process: the cell's own scheduler behind HTTP, for as long as its parent lives.

The parent writes the config as one line of JSON and keeps the pipe open; when that closes, whatever became of the parent, the
server leaves as if told by SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from .serve_app import serve


def main() -> None:
    """Serve the config on the first line of stdin until it ends. Leaves by SystemExit with the reason when that cannot be."""
    cfg = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        serve(cfg)
    except (ImportError, ValueError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def _leave_with_parent() -> None:
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
