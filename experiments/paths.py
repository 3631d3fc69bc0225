"""Where results lie: PATH/<study>/<cell>/ for cells, PATH/prepared/ for what they share. What to say when a disk is full."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

MANIFEST = "cells.jsonl"
PREPARED = "prepared"
_TEMPORARY = ".tmp-"


def root(out: str) -> Path:
    """The absolute PATH of `out=PATH`; relative to the current folder, `~` is home."""
    return Path(out).expanduser().absolute()


def traceback_file(folder: Path) -> Path:
    """Where the traceback of a failed cell goes: beside its folder, which does not exist then."""
    return folder.with_name(folder.name + ".failed.txt")


def temporary(final: Path) -> Path:
    """A name beside `final` that says which process of which machine writes it; renamed to `final` when whole."""
    return final.with_name(f"{_TEMPORARY}{final.name}-{socket.gethostname()}-{os.getpid()}")


def remove_stale(folder: Path) -> int:
    """Remove what killed processes of this machine left half-written in `folder`. Returns how many there were."""
    count = 0
    for path in folder.glob(f"{_TEMPORARY}*"):
        host, _, pid = path.name.removeprefix(_TEMPORARY).rpartition("-")
        if host.endswith(f"-{socket.gethostname()}") and pid.isdigit() and not _alive(int(pid)):
            count += 1
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return count


def describe_error(error: OSError, where: Path) -> str:
    """One line that names the path and the free space of its disk."""
    path = Path(error.filename) if isinstance(error.filename, str) else where
    while not where.exists() and where != where.parent:
        where = where.parent
    free = shutil.disk_usage(where).free
    return f"cannot write {path}: {error.strerror or error}; {free:,} bytes free there"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
