"""Answers: prompts with their text and the lengths of several models' answers, one line each; what two loaders share."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.predictors.splits import prompt_groups

from ..dataset import Dataset
from .origin import Origin, stated
from .sharegpt import UNIT, token_counter


def records(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file (also .gz). Lines end at a newline only: texts hold other line separators.

    Raises ValueError naming the row on a line that is no JSON object.
    """
    with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else open(file, "rb") as lines:
        for number, line in enumerate(line for line in lines if line.strip()):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file.name}: row {number} is not JSON: {error.msg}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{file.name}: row {number} is not an object: {line.strip()[:40]!r}")
            yield record


def checked(answer: Any, file: Path, row: int) -> str | int:
    """An answer given as its text, or as its length. Raises ValueError on anything else."""
    if isinstance(answer, str) or (isinstance(answer, int) and answer >= 0):
        return answer
    raise ValueError(f"{file.name}: the answer of row {row} is {str(answer)[:40]!r}, neither a text nor a length")


def dataset(
    name: str,
    origin: Origin,
    file: Path,
    rows: list[tuple[str, str | int]],
    max_prompt_len: int | None,
    max_new_tokens: int,
    model: str,
) -> Dataset:
    """(prompt, answer or its length) rows as a Dataset, texts counted here; empty ones and long prompts left out, counted."""
    dropped: dict[str, int] = {}
    count = token_counter()
    prompt_len = np.array([count(prompt) for prompt, _ in rows], dtype=np.int64)
    output_len = np.array([count(answer) if isinstance(answer, str) else answer for _, answer in rows], dtype=np.int64)
    keep = (output_len > 0) & (prompt_len > 0)
    dropped["rows_empty"] = int((~keep).sum())
    if max_prompt_len is not None:
        over = keep & (prompt_len > max_prompt_len)
        dropped[f"rows_prompt_over_{max_prompt_len}"] = int(over.sum())
        keep &= ~over
    prompts = [prompt for (prompt, _), k in zip(rows, keep, strict=True) if k]
    return Dataset(
        name=name,
        prompt_len=prompt_len[keep],
        output_len=output_len[keep],
        unit=UNIT,
        group=prompt_groups(prompts, [str(i) for i in range(len(prompts))]),
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        notes={"file": file.name, "model": model},
        **stated(origin, file),
    )
