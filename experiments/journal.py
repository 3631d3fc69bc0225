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


class Journal:
    """The journal `path` of what `asked` describes (JSON values), to be used in `with`; made if absent. `found`: the answers
    that were there. Raises ValueError when it is of something else, is broken, or another process writes it."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.found = path, list[Answered]()
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        try:
            self._begin(asked)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, asked: Mapping[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {self.path}: wait for it, or give another out=PATH") from None
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        if not whole:
            self._write(asked)
            return
        head, *lines = whole.splitlines()
        try:
            same_asked(json.loads(head), asked, self.path)
            self.found = [Answered(*json.loads(line)) for line in lines]
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{self.path} is no journal of answers: {error}") from error

    def add(self, answer: Answered) -> None:
        """Keep an answer, whatever happens to this process from now on."""
        self._write(answer)

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def same_asked(before: Any, asked: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError, naming what differs, unless the answers in `path` are to what is asked now."""
    if not isinstance(before, Mapping):
        raise TypeError("its first line does not say what was asked")
    other = [f"{key} {before.get(key)!r}, now {value!r}" for key, value in asked.items() if before.get(key) != value]
    if other:
        raise ValueError(f"{path} holds answers to something else ({'; '.join(other)}): give another out=PATH, or remove it")
