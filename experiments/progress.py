"""Progress of a sweep, read from its manifest, so for any launcher: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from .manifest import Row, merged
from .paths import MANIFEST

EVERY = 10.0  # s between plain lines


class Progress:
    """Watches `study`'s manifest from a thread while the block runs. total: of cells; None: those in the manifest."""

    def __init__(self, study: Path, total: int | None = None) -> None:
        self._manifest = study / MANIFEST
        self._total = total
        self._read = 0  # bytes of the manifest that are in _rows
        self._rows: dict[str, Row] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="progress")
        self._begin = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Show the final state and end the thread."""
        self._done.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        if sys.stderr.isatty():
            self._bar()
        else:
            self._lines()

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Bar(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None)
            last = False
            while not last:
                last = self._done.wait(0.5)
                total, ended, failed, _ = self._count()
                bar.update(task, total=total, completed=ended, description=f"{failed} failed" if failed else "")

    def _lines(self) -> None:
        shown = -1
        wait = EVERY / 4
        while True:
            last = self._done.wait(wait)
            wait = EVERY
            total, ended, failed, computed = self._count()
            if ended != shown and (ended or last):
                shown = ended
                took = time.monotonic() - self._begin
                left = f", about {took / computed * (total - ended):.0f} s left" if computed and ended < total else ""
                print(
                    f"{ended}/{total} cells in {took:.0f} s{left}" + (f", {failed} failed" if failed else ""),
                    file=sys.stderr,
                    flush=True,
                )
            if last:
                return

    def _count(self) -> tuple[int, int, int, int]:
        """(cells, ended, failed, ended here and not found); reads on from where it was: a manifest only grows in a sweep."""
        with open(self._manifest, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        merged(whole.decode().splitlines(), self._rows)
        ended = [row for row in self._rows.values() if row["status"] != "planned"]
        failed = sum(row["status"] == "failed" for row in ended)
        total = len(self._rows) if self._total is None else self._total
        return total, len(ended), failed, sum(not row.get("cached") for row in ended)
