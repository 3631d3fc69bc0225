"""Journal: finished answers, one JSON line each, on disk as they come, so that a run that was killed can go on.

Its first line says what is being asked; another question never goes on with these answers. A line that was cut off is void.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self


class Answered(NamedTuple):
    """One answer. row: of the workload. sha: hash of its text. Lengths in tokens; stopped: the model ended it itself."""

    row: int
    sample: int
    sha: str
    prompt_len: int
    length: int
    stopped: bool


class Lines:
    """The lines of the file `path`, made if absent, each on disk as it comes; to be used in `with`. `whole`: those that were
    there, without a last one that was cut off. Raises ValueError when another process writes it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another run is writing {path}: wait for it, or give another out=PATH") from None
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        self.whole = whole.splitlines()

    def write(self, line: str) -> None:
        """Keep a line, whatever happens to this process from now on."""
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Journal(Lines):
    """The journal `path` of what `asked` describes (JSON values), to be used in `with`; made if absent. `found`: the answers
    that were there. Raises ValueError when it is of something else, is broken, or another process writes it."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        super().__init__(path)
        self.found = list[Answered]()
        try:
            self._begin(asked)
        except BaseException:
            self.close()
            raise

    def _begin(self, asked: Mapping[str, Any]) -> None:
        if not self.whole:
            self._write(asked)
            return
        head, *lines = self.whole
        try:
            same_asked(json.loads(head), asked, self.path)
            self.found = [Answered(*json.loads(line)) for line in lines]
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{self.path} is no journal of answers: {error}") from error

    def add(self, answer: Answered) -> None:
        """Keep an answer."""
        self._write(answer)

    def _write(self, value: Any) -> None:
        self.write(json.dumps(value, sort_keys=True, separators=(",", ":")))


def same_asked(before: Any, asked: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError, naming what differs, unless the answers in `path` are to what is asked now."""
    if not isinstance(before, Mapping):
        raise TypeError("its first line does not say what was asked")
    other = [f"{key} {before.get(key)!r}, now {value!r}" for key, value in asked.items() if before.get(key) != value]
    if other:
        raise ValueError(f"{path} holds answers to something else ({'; '.join(other)}): give another out=PATH, or remove it")
