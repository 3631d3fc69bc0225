"""Collect: each prompt of a workload answered several times, by whoever answers, and kept as they come.

Every answer draws with a seed of its own, made of (seed, row, sample): it does not hang on what else is being answered, or on
how often the run was stopped. Requests are made when there is room for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import INF, Event, EventKind, Request

from .collected import CLASSES, Collected, first_rows, read, write
from .dataset import Dataset, Ints
from .journal import Answered, Journal, same_asked
from .jsonable import jsonable

Say = Callable[[str], None]
Told = Callable[[int, int, int, str], None]  # rid, prompt and answer tokens, how it ended
EVERY = 10.0  # s between lines of progress
ALL_LOST = 100  # failures in a row: nobody answers any more


@dataclass(frozen=True)
class Asking:
    """Requests to be answered: rid -> row of `dataset`, and the seed that its answer is drawn by. rids (m,): in order."""

    dataset: Dataset
    rids: Ints
    max_new_tokens: int
    row: Callable[[int], int]
    seed: Callable[[int], int]


class Answerer(Protocol):
    """Who answers: our engine, or a server. libraries: what its answers pass through."""

    libraries: tuple[str, ...]

    def asked(self, seed: int, max_new_tokens: int) -> dict[str, Any]:
        """What answers hang on besides their prompts, as JSON values: model, tokenizer, chat_template, sampling, ..."""
        ...

    def too_long(self, dataset: Dataset, max_new_tokens: int) -> NDArray[np.bool_]:
        """The rows (N,) that have no room for such an answer."""
        ...

    def answer(self, asking: Asking, told: Told) -> None:
        """Answer all, telling each as it ends: stop, length, rejected: ... (it never will be), or what went wrong. Raises what
        `told` raises."""
        ...


class Feed:
    """A Source of requests that all want to be answered now: each is made when there is room for it, at most `most` a time."""

    def __init__(self, rids: Ints, make: Callable[[int], Request], most: int) -> None:
        self._rids, self._make, self._most = rids, make, most
        self._next = self._live = 0

    def peek(self) -> float:
        return 0.0 if self._next < len(self._rids) and self._live < self._most else INF

    def pop(self, now: float) -> list[Event]:
        out = []
        while self.peek() <= now:
            out.append(Event(0.0, EventKind.ARRIVAL, self._make(int(self._rids[self._next]))))
            self._next += 1
            self._live += 1
        return out

    def on_finish(self, request: Request, now: float) -> None:
        self._live -= 1


def seed_of(seed: int, row: int, sample: int) -> int:
    """The seed of one answer, below 2**48: JSON keeps it whole."""
    return int(np.random.SeedSequence([seed, row, sample]).generate_state(1, np.uint64)[0] >> np.uint64(16))


def journal_of(out: Path) -> Path:
    """Where answers lie until all are there."""
    return out.with_suffix(".part.jsonl")


def collect(
    answerer: Answerer,
    dataset: Dataset,
    out: Path,
    *,
    samples: int = 4,
    seed: int = 0,
    max_new_tokens: int = 1024,
    limit: int | None = None,
    texts: bool = False,
    command: str = "",
    say: Say | None = None,
) -> Collected:
    """Ask for `samples` answers to each prompt of `dataset` (its first `limit` rows), each of at most max_new_tokens, and write
    them to `out` (collected.py). Answers that are in `out` or its journal are not asked for again: what was stopped goes on,
    and more rows or samples can be asked for later. A text that comes again is asked once. texts: keep the prompts too.
    command: for the record. say: told how far it is.

    Raises ValueError for what cannot be asked, for answers to something else in `out`, and when answers have failed: those that
    came are kept.
    """
    for name, value, least in (
        ("samples", samples, 1), ("seed", seed, 0), ("max_new_tokens", max_new_tokens, 1),
        ("limit", 1 if limit is None else limit, 1),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name}={value}, the least is {least}")
    if out.suffix != ".parquet":
        raise ValueError(f"out={out}: a file NAME.parquet is wanted; NAME.json goes beside it")
    if dataset.prompts is None:
        raise ValueError(f"workload {dataset.name} has no texts that could be asked")
    asked = jsonable(answerer.asked(seed, max_new_tokens))
    if samples > 1 and asked["sampling"].get("temperature") == 0:
        raise ValueError("temperature 0 gives the same answer each time: samples=1, or sampling.temperature=0.8")
    hashes, again = first_rows(dataset.prompts[:limit])
    long = answerer.too_long(dataset, max_new_tokens)
    rows = np.array([row for row in hashes if not long[row]], np.int64)
    taken = Taken(rows, [hashes[row] for row in rows.tolist()], samples)
    old = read(out) if out.is_file() else None
    if old is not None:
        taken.take_file(old, out, asked)
    with Journal(journal_of(out), asked) as journal:
        for answer in journal.found:
            taken.take(answer, journal.path)
        rids = np.flatnonzero(taken.lengths.ravel() == 0)
        whole = old is not None and not len(rids) and len(old) == len(rows) and (old.prompts is not None) == texts
        if not whole:
            inbox = Inbox(taken, journal, len(rids), say or (lambda text: None))
            asking = Asking(
                dataset, rids, max_new_tokens, lambda rid: int(rows[rid // samples]),
                lambda rid: seed_of(seed, int(rows[rid // samples]), rid % samples),
            )  # fmt: skip
            if len(rids):
                answerer.answer(asking, inbox)
            inbox.check()
            lost = {
                "rows_prompt_again": again, "rows_prompt_too_long": len(hashes) - len(rows),
                "rows_refused": int((~taken.done).sum()),
            }  # fmt: skip
            made = _finished(dataset, taken, texts, {
                **asked, "unit": f"{asked['model']} tokens", "command": command,
                "versions": {name: version(name) for name in ("lengthwise", *answerer.libraries)},
                "workload": {"name": dataset.name, "source": dataset.source, "licence": dataset.licence},
                "dropped": {**dataset.dropped, **{reason: n for reason, n in lost.items() if n}},
            })  # fmt: skip
            write(made, out)
        journal.path.unlink()
    return made if old is None or not whole else old


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


def _finished(dataset: Dataset, taken: Taken, texts: bool, meta: Mapping[str, Any]) -> Collected:
    done = taken.done
    if not done.any():
        raise ValueError(f"no prompt of workload {dataset.name} has its answers; left out: {meta['dropped']}")
    rows = taken.rows[done]
    known = {**dataset.columns, **({} if dataset.group is None else {"group": dataset.group})}
    return Collected(
        meta=jsonable(meta),
        prompt_id=rows,
        sha=[sha for sha, whole in zip(taken.sha, done.tolist(), strict=True) if whole],
        prompt_len=taken.prompt_len[done],
        lengths=taken.lengths[done],
        stopped=taken.stopped[done],
        columns={name: np.asarray(known[name])[rows] for name in ("group", *CLASSES) if name in known},
        prompts=[dataset.prompts[row] for row in rows.tolist()] if texts and dataset.prompts is not None else None,
    )
