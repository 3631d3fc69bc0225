"""Collect: each prompt of a workload answered several times, by whoever answers, and kept as they come.

Every answer draws with a seed of its own, made of (seed, row, sample): it does not hang on what else is being answered, or on
how often the run was stopped. Requests are made when there is room for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import INF, Event, EventKind, Request

from .collected import CLASSES, Collected, first_rows, read, write
from .dataset import Dataset, Ints
from .journal import Journal
from .jsonable import jsonable
from .reshape import take
from .taken import Inbox, Say, Taken

Told = Callable[[int, int, int, str], None]  # rid, prompt and answer tokens, how it ended


@dataclass(frozen=True)
class Asking:
    """Requests to be answered: rid -> row of `dataset`, and the seed that its answer is drawn by. rids (m,): in order. at_once:
    at most so many, if fewer than there is room for. words: told, before anything else is of an answer that has ended, its rid
    and text, the seconds it took and how many were asked at once."""

    dataset: Dataset
    rids: Ints
    max_new_tokens: int
    row: Callable[[int], int]
    seed: Callable[[int], int]
    at_once: int | None = None
    words: Callable[[int, str, float, int], None] | None = None

    def most(self, room: int) -> int:
        """How many are asked at once where there is room for so many."""
        return room if self.at_once is None else min(room, self.at_once)


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
    if limit is not None and limit < len(dataset):
        dataset = take(dataset, np.arange(limit))
    hashes, again = first_rows(dataset.prompts or ())
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
        if old is not None and not len(rids) and len(old) == len(rows) and (old.prompts is not None) == texts:
            journal.path.unlink()
            return old
        inbox = Inbox(taken, journal, len(rids), say or (lambda text: None))
        if len(rids):
            asking = Asking(
                dataset, rids, max_new_tokens, lambda rid: int(rows[rid // samples]),
                lambda rid: seed_of(seed, int(rows[rid // samples]), rid % samples),
            )  # fmt: skip
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
    return made


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
