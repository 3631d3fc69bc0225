"""Collected answers: how long a model's answers to each prompt were, as one Parquet file that says how they were made.

A prompt is known by the hash of its text, so that lengths can be kept and handed on where the texts may not be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .dataset import Dataset, Ints
from .jsonable import jsonable
from .paths import temporary
from .reshape import take

FORMAT = 1
KEY = b"lengthwise"  # of the schema's metadata
CLASSES = ("template", "topic")  # columns of a workload that say what kind of prompt a row is
ENDS = ("length", "stop")  # by whether the model ended it itself
STATED = ("model", "unit", "max_new_tokens", "workload")  # what every file's metadata holds, besides the rest


@dataclass(frozen=True)
class Collected:
    """N prompts, k answers each. meta: how they were made (model, tokenizer, unit, chat_template, sampling, seed,
    max_new_tokens, workload, dropped, versions), JSON values. prompt_id (N,): the row of the workload. sha: hash of each text.
    prompt_len (N,), lengths (N, k): tokens of the model, an end token counted. stopped (N, k): the model ended it; else it was
    cut off at max_new_tokens. columns: the workload's own group, template, topic. prompts: the texts, where they are kept."""

    meta: Mapping[str, Any]
    prompt_id: Ints
    sha: Sequence[str]
    prompt_len: Ints
    lengths: Ints
    stopped: NDArray[np.bool_]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    prompts: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.sha)

    @property
    def num_samples(self) -> int:
        return int(self.lengths.shape[1])


def prompt_sha(text: str) -> str:
    """The first 16 hex digits of the SHA-256 of the text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def write(collected: Collected, path: Path) -> None:
    """Write the file `path` and, beside it, its metadata as JSON; each is there as a whole or not at all. Same answers, same
    bytes, as long as the library that writes them is the same."""
    columns: dict[str, Any] = {
        "prompt_id": pa.array(collected.prompt_id, pa.int32()),
        "prompt_sha": pa.array(list(collected.sha), pa.string()),
        "prompt_len": pa.array(collected.prompt_len, pa.int32()),
        "lengths": pa.array(collected.lengths.tolist(), pa.list_(pa.int32())),
        "finish": pa.array([[ENDS[s] for s in row] for row in collected.stopped.tolist()], pa.list_(pa.string())),
        **{name: pa.array(np.asarray(column).tolist()) for name, column in collected.columns.items()},
    }
    if collected.prompts is not None:
        columns["prompt"] = pa.array(list(collected.prompts), pa.string())
    meta = jsonable({**collected.meta, "format": FORMAT, "samples": collected.num_samples})
    table = pa.table(columns).replace_schema_metadata({KEY: json.dumps(meta, sort_keys=True, allow_nan=False).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, half = path.with_suffix(".json"), temporary(path)
    half.write_text(json.dumps(meta, sort_keys=True, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    half.replace(beside)
    pq.write_table(table, half, compression="zstd")
    half.replace(path)


def read(path: Path) -> Collected:
    """What `write` has written. Raises ValueError, saying why, where the file is no such one."""
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path.name} is no Parquet file: {str(error).splitlines()[0]}") from error
    raw = (table.schema.metadata or {}).get(KEY)
    meta = {} if raw is None else json.loads(raw)
    if meta.get("format") != FORMAT or any(key not in meta for key in STATED):
        raise ValueError(f"{path.name} holds no answers that `lengthwise collect` has written in format {FORMAT}")
    lengths = np.array(table["lengths"].to_pylist(), dtype=np.int64)
    finish = np.array(table["finish"].to_pylist())
    if lengths.ndim != 2 or finish.shape != lengths.shape or not np.isin(finish, ENDS).all() or lengths.min() < 1:
        raise ValueError(f"{path.name}: lengths and finish are not {table.num_rows} rows of the same number of answers")
    names = [name for name in ("group", *CLASSES) if name in table.column_names]
    return Collected(
        meta=meta,
        prompt_id=table["prompt_id"].to_numpy().astype(np.int64),
        sha=table["prompt_sha"].to_pylist(),
        prompt_len=table["prompt_len"].to_numpy().astype(np.int64),
        lengths=lengths,
        stopped=finish == "stop",
        columns={name: np.array(table[name].to_pylist()) for name in names},
        prompts=table["prompt"].to_pylist() if "prompt" in table.column_names else None,
    )


def alone(collected: Collected, sample: int = 0) -> Dataset:
    """The answers as a Dataset, with texts where they are kept; output_len is answer number `sample`. Raises ValueError for one
    that there is not."""
    workload = collected.meta["workload"]
    columns = {name: column for name, column in collected.columns.items() if name != "group"}
    group = collected.columns.get("group")
    return Dataset(
        name=workload["name"],
        prompt_len=collected.prompt_len,
        group=None if group is None else np.asarray(group, np.int64),
        prompts=collected.prompts,
        columns=columns,
        dropped=dict(collected.meta.get("dropped") or {}),
        licence=workload["licence"],
        source=_source(collected, workload["source"]),
        notes={"collected": dict(collected.meta), "sample": sample},
        **_answers(collected, np.arange(len(collected)), sample),
    )


def join(dataset: Dataset, collected: Collected, sample: int = 0) -> Dataset:
    """The rows of `dataset` whose texts were asked, with prompt_len and the answers that were collected; output_len is answer
    number `sample`. Rows without answers, and those whose text came before, are left out, counted. Raises ValueError for a
    dataset without texts, where no row was asked, and for a sample that there is not."""
    if dataset.prompts is None:
        raise ValueError(f"workload {dataset.name} has no texts to know the prompts by that were asked")
    place = {sha: at for at, sha in enumerate(collected.sha)}
    rows, again = first_rows(dataset.prompts)
    at = [(row, place[sha]) for row, sha in rows.items() if sha in place]
    if not at:
        raise ValueError(f"no prompt of workload {dataset.name} is among the {len(collected)} that were asked")
    kept, asked = np.array(at, np.int64).T
    lost = {"rows_prompt_again": again, "rows_without_answers": len(rows) - len(at)}
    base = take(dataset, kept)
    return replace(
        base,
        prompt_len=collected.prompt_len[asked],
        source=_source(collected, base.source),
        dropped={**base.dropped, **{reason: n for reason, n in lost.items() if n}},
        columns={name: column for name, column in base.columns.items() if name != "max_new_tokens"},
        notes={**base.notes, "collected": dict(collected.meta), "sample": sample},
        block_hashes=None,  # they name pieces in tokens of another count
        hash_tokens=0,
        prompt_ids=None,
        answers_before=None,  # of other answers than those
        **_answers(collected, asked, sample),
    )


def first_rows(prompts: Iterable[str]) -> tuple[dict[int, str], int]:
    """(row -> hash of its text, of those rows whose text comes for the first time; how many repeat one)."""
    seen: dict[str, int] = {}
    num_rows = 0
    for num_rows, text in enumerate(prompts, 1):
        seen.setdefault(prompt_sha(text), num_rows - 1)
    return {row: sha for sha, row in seen.items()}, num_rows - len(seen)


def _answers(collected: Collected, at: Ints, sample: int) -> dict[str, Any]:
    if not 0 <= sample < collected.num_samples:
        raise ValueError(f"sample {sample} is not within 0 and {collected.num_samples - 1}")
    return {
        "output_len": collected.lengths[at, sample],
        "samples": collected.lengths[at],
        "censored": ~collected.stopped[at, sample],
        "unit": collected.meta["unit"],
        "max_new_tokens": collected.meta["max_new_tokens"],
    }


def _source(collected: Collected, source: str) -> str:
    return f"{source}, answered by {collected.meta['model']}"
