"""Estimates: the served model asked how long its answer to a prompt would be, before it answers anything.

What it says is kept a line a prompt, as `predictor=self_estimate` reads it, with the tokens and the seconds that asking took:
some prompts are asked alone, the others as many at a time as there is room for, so that the time can be charged.
A file that holds some already is gone on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lengthwise.predictors.self_estimate import asking_latency, parse_estimate, question

from .collect import Answerer, Asking, seed_of
from .collected import first_rows
from .dataset import Dataset, Ints
from .journal import Lines, same_asked
from .jsonable import jsonable
from .nodes import Config
from .reshape import take

Say = Callable[[str], None]


@dataclass(frozen=True)
class Estimates:
    """What `ask=estimate` does. max_new_tokens: of what the model says. num_alone: prompts that are asked one at a time."""

    max_new_tokens: int = 16
    num_alone: int = 8
    suffix: ClassVar[str] = "-estimates.jsonl"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_alone < 1:
            raise ValueError(f"ask.max_new_tokens={self.max_new_tokens}, ask.num_alone={self.num_alone}: the least is 1")

    def __call__(self, answerer: Answerer, dataset: Dataset, out: Path, cfg: Config, command: str, say: Say) -> list[str]:
        """Ask for one estimate of each prompt of `dataset` (its first cfg["limit"]) that `out` has none of, append each as it
        comes, and write what it cost beside it (NAME.json). Returns what is to be said.

        Raises ValueError for what cannot be asked, for estimates of something else in `out`, and when some are lost: those that
        came are kept.
        """
        if out.suffix != ".jsonl":
            raise ValueError(f"out={out}: a file NAME.jsonl is wanted; NAME.json goes beside it")
        if dataset.prompts is None:
            raise ValueError(f"workload {dataset.name} has no texts that could be asked")
        seed, limit = cfg["seed"], cfg["limit"]
        dataset = dataset if limit is None else take(dataset, np.arange(min(limit, len(dataset))))
        hashes, again = first_rows(dataset.prompts or ())
        questions = replace(
            dataset,
            prompts=[question(text) for text in dataset.prompts or ()],
            block_hashes=None,
            hash_tokens=0,
            prompt_ids=None,
        )
        long = answerer.too_long(questions, self.max_new_tokens)
        asked = {**jsonable(answerer.asked(seed, self.max_new_tokens)), "question": question("PROMPT")}
        beside = out.with_suffix(".json")
        with _Lines(out) as lines:
            if lines.found and beside.is_file():
                same_asked(json.loads(beside.read_text(encoding="utf-8")).get("asked"), asked, out)
            _write(beside, {"asked": asked})
            there = {line["prompt_sha"] for line in lines.found}
            todo = np.array([row for row, sha in hashes.items() if sha not in there and not long[row]], np.int64)
            wanted = max(self.num_alone - sum(line["at_once"] == 1 for line in lines.found), 0)
            takes = _Takes(lines, hashes, len(todo), say)
            for rids, at_once in ((np.arange(min(wanted, len(todo))), 1), (np.arange(min(wanted, len(todo)), len(todo)), None)):
                if len(rids):
                    self._ask(answerer, questions, todo, rids, at_once, seed, takes)
            takes.check()
            found = lines.found
        if not found:
            raise ValueError(f"no prompt of workload {dataset.name} has an estimate; {takes.num_refused} were refused")
        lost = {
            "rows_prompt_again": again, "rows_prompt_too_long": sum(bool(long[row]) for row in hashes),
            "rows_refused": takes.num_refused,
        }  # fmt: skip
        told = {
            **costs(out, found), "command": command, "workload": {"name": dataset.name, "source": dataset.source},
            "dropped": {reason: n for reason, n in lost.items() if n},
        }  # fmt: skip
        _write(beside, {"asked": asked, **jsonable(told)})
        return words(told, out)

    def _ask(
        self, answerer: Answerer, questions: Dataset, todo: Ints, rids: Ints, at_once: int | None, seed: int, takes: _Takes
    ) -> None:
        answerer.answer(
            Asking(
                questions, rids, self.max_new_tokens, lambda rid: int(todo[rid]), lambda rid: seed_of(seed, int(todo[rid]), 0),
                at_once, takes.words,
            ),
            lambda rid, prompt_len, length, reason: takes.ended(rid, int(todo[rid]), prompt_len, length, reason),
        )  # fmt: skip


class _Takes:
    """Takes what an Answerer tells, and writes it down. total: estimates that are to come."""

    def __init__(self, lines: _Lines, hashes: Mapping[int, str], total: int, say: Say) -> None:
        self._lines, self._hashes, self._total, self._say = lines, hashes, total, say
        self._said: dict[int, tuple[str, float, int]] = {}
        self._lost: list[str] = []
        self.num_refused = self._num = 0

    def words(self, rid: int, text: str, seconds: float, at_once: int) -> None:
        self._said[rid] = text, seconds, at_once

    def ended(self, rid: int, row: int, prompt_len: int, length: int, reason: str) -> None:
        text, seconds, at_once = self._said.pop(rid, ("", 0.0, 0))
        self._num += 1
        if reason in ("stop", "length"):
            self._lines.add({
                "prompt_sha": self._hashes[row], "answer": text, "prompt_len": prompt_len, "output_len": length,
                "seconds": round(seconds, 6), "at_once": at_once,
            })  # fmt: skip
        elif reason.startswith("rejected"):
            self.num_refused += 1
        else:
            self._lost.append(reason)
        if self._num % 200 == 0:
            self._say(f"{self._num:,} of {self._total:,} estimates")

    def check(self) -> None:
        """Raises ValueError where some are lost that may yet come."""
        if self._lost:
            raise ValueError(
                f"{len(self._lost)} of {self._total} estimates are lost, the last: {self._lost[-1]}; the same command asks for "
                "them again"
            )


class _Lines(Lines):
    """The estimates of a file. `found`: all that are there. Raises ValueError on a line that is no JSON."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.found: list[dict[str, Any]] = []
        for number, line in enumerate(self.whole, 1):
            try:
                self.found.append(json.loads(line))
            except json.JSONDecodeError as error:
                self.close()
                raise ValueError(f"{path} line {number} is no JSON ({error}): mend it, or give another out=PATH") from error

    def add(self, line: dict[str, Any]) -> None:
        self.write(json.dumps(line))
        self.found.append(line)


def costs(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What asking has cost: tokens, seconds, and the latency that the predictor is charged."""
    alone = [line["seconds"] for line in lines if line["at_once"] == 1]
    crowd = [line["seconds"] for line in lines if line["at_once"] > 1]
    latency = asking_latency(path)
    return {
        "num": len(lines), "num_without_number": sum(parse_estimate(line["answer"]) is None for line in lines),
        "tokens": {key: float(np.mean([line[key] for line in lines])) for key in ("prompt_len", "output_len")},
        "seconds": {
            "alone": float(np.median(alone)) if alone else None, "at_once": max(line["at_once"] for line in lines),
            "each_at_once": float(np.mean(crowd)) if crowd else None,
        },
        "latency": None if latency is None else latency.as_dict(),
    }  # fmt: skip


def words(told: Mapping[str, Any], out: Path) -> list[str]:
    """What there is, in words."""
    tokens, seconds, latency = told["tokens"], told["seconds"], told["latency"]
    lines = [
        f"{told['num']:,} estimates, {told['num_without_number']:,} of them without a number; each reads "
        f"{tokens['prompt_len']:.0f} tokens and makes {tokens['output_len']:.1f}"
    ]
    if latency is not None:
        crowd = (
            "" if seconds["each_at_once"] is None else f", {seconds['each_at_once']:.3f} s with {seconds['at_once']} at once"
        )
        alone = "none was asked alone" if seconds["alone"] is None else f"one takes {seconds['alone']:.3f} s alone"
        lines.append(
            f"{alone}{crowd}: charged {1e3 * latency['per_batch']:.1f} ms a batch and "
            f"{1e3 * latency['per_request']:.1f} ms a request"
        )
    lines += [f"left out: {reason} {n:,}" for reason, n in told["dropped"].items()]
    return [*lines, f"written: {out}", f"use it: predictor=self_estimate predictor.path={out}"]


def _write(path: Path, value: Any) -> None:
    half = path.with_suffix(".json.part")
    half.write_text(json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    half.replace(path)
