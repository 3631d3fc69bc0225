"""Taken: the answers that there are while a collection goes on, and what is said of it meanwhile.

An answer that nobody can give leaves its prompt out; one that is lost on the way is asked for again by the same command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .collected import Collected
from .dataset import Ints
from .journal import Answered, Journal, same_asked

Say = Callable[[str], None]
EVERY = 10.0  # s between lines of progress
ALL_LOST = 100  # failures in a row: nobody answers any more


class Taken:
    """The answers there are: n rows (of the workload; sha: hashes of their texts), k each. A length of 0: none yet."""

    def __init__(self, rows: Ints, sha: Sequence[str], samples: int) -> None:
        self.rows, self.sha = rows, sha
        self.prompt_len = np.zeros(len(rows), np.int64)
        self.lengths = np.zeros((len(rows), samples), np.int64)
        self.stopped = np.zeros((len(rows), samples), np.bool_)
        self._place = {row: at for at, row in enumerate(rows.tolist())}

    @property
    def done(self) -> NDArray[np.bool_]:
        """The rows (n,) that have all their answers."""
        return np.asarray((self.lengths > 0).all(axis=1))

    def take(self, answer: Answered, path: Path) -> None:
        """An answer from `path`; one that nobody asks for is passed over. Raises ValueError where it is to another text."""
        at = self._place.get(answer.row)
        if at is None or answer.sample >= self.lengths.shape[1]:
            return
        if answer.sha != self.sha[at]:
            raise ValueError(f"{path}: row {answer.row} of the workload was another text when it was asked: another out=PATH")
        self.put(at, answer)

    def take_file(self, old: Collected, path: Path, asked: Mapping[str, Any]) -> None:
        """The answers of a file that is to have more. Raises ValueError where it holds others, or more than is asked for."""
        same_asked(old.meta, asked, path)
        if old.num_samples > self.lengths.shape[1] or not set(old.prompt_id.tolist()) <= self._place.keys():
            raise ValueError(
                f"{path} holds {len(old)} prompts with {old.num_samples} answers each, more than is asked for: another out=PATH"
            )
        for i, (row, sha, prompt_len) in enumerate(zip(old.prompt_id.tolist(), old.sha, old.prompt_len.tolist(), strict=True)):
            for sample, (length, stopped) in enumerate(zip(old.lengths[i].tolist(), old.stopped[i].tolist(), strict=True)):
                self.take(Answered(row, sample, sha, prompt_len, length, stopped), path)

    def put(self, at: int, answer: Answered) -> None:
        self.prompt_len[at] = answer.prompt_len
        self.lengths[at, answer.sample] = answer.length
        self.stopped[at, answer.sample] = answer.stopped


class Inbox:
    """Takes what an Answerer tells, and says how far it is. total: answers that are to come."""

    def __init__(self, taken: Taken, journal: Journal, total: int, say: Say) -> None:
        self._taken, self._journal, self._total, self._say = taken, journal, total, say
        self._begin = self._said = time.monotonic()
        self._num = self._num_tokens = self._in_a_row = 0
        self._lost: list[str] = []
        self._refused: set[str] = set()

    def __call__(self, rid: int, prompt_len: int, length: int, reason: str) -> None:
        """Raises ValueError when nothing is answered any more."""
        at, sample = divmod(rid, self._taken.lengths.shape[1])
        self._num += 1
        if reason in ("stop", "length") and length < 1:
            reason = "rejected: an answer of no token"
        if reason in ("stop", "length"):
            answer = Answered(int(self._taken.rows[at]), sample, self._taken.sha[at], prompt_len, length, reason == "stop")
            self._taken.put(at, answer)
            self._journal.add(answer)
            self._num_tokens += length
            self._in_a_row = 0
        else:
            self._note(int(self._taken.rows[at]), reason)
        if (now := time.monotonic()) - self._said >= EVERY:
            self._said = now
            took = now - self._begin
            left = took / self._num * (self._total - self._num)
            self._say(
                f"{self._num:,} of {self._total:,} answers, {self._num_tokens / took:,.0f} tokens/s, about {left:,.0f} s left"
            )

    def _note(self, row: int, reason: str) -> None:
        if reason.startswith("rejected"):
            if not self._refused:
                self._say(f"row {row} is left out, as others like it may be: {reason}")
            self._refused.add(reason)
            return
        if not self._lost:
            self._say(f"an answer to row {row} is lost: {reason}")
        self._lost.append(reason)
        self._in_a_row += 1
        if self._in_a_row == ALL_LOST:
            raise ValueError(f"{ALL_LOST} answers in a row are lost, the last: {reason}; the same command goes on from here")

    def check(self) -> None:
        """Raises ValueError where answers are lost that may yet come."""
        if self._lost:
            raise ValueError(
                f"{len(self._lost)} of {self._total} answers are lost, the last: {self._lost[-1]}; the same command asks for "
                "them again"
            )
