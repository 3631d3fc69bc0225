"""Saved workloads: a drawn workload as Parquet and JSON, and back, with its prefixes, sessions and units intact.

`workload=saved workload.path=FOLDER arrivals=replay load=null` gives the same requests at the same times; those that waited
for answers wait for them again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .dataset import Dataset, Workload
from .jsonable import jsonable
from .prefixes import Shared

FILES = ("requests.parquet", "workload.json")
FORMAT = 1


def save_workload(workload: Workload, folder: Path | str) -> None:
    """Write the N requests into `folder`, made if absent. Row i is request i."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dataset, rows = workload.dataset, workload.rows
    columns: dict[str, Any] = {
        "arrival": workload.arrival,
        "prompt_len": workload.prompt_len,
        "output_len": workload.output_len,
        "row": rows,
    }
    for name, column in (
        ("censored", dataset.censored),
        ("group", dataset.group),
        ("after", workload.after),
        ("gap", workload.gap),
    ):
        if column is not None:
            columns[name] = column if name in ("after", "gap") else column[rows]
    if dataset.prompts is not None:
        columns["prompt"] = [dataset.prompts[row] for row in rows.tolist()]
    if dataset.samples is not None:
        columns["samples"] = pa.array(list(dataset.samples[rows]), pa.list_(pa.int64()))
    if dataset.answers_before is not None:
        columns["answers_before"] = pa.array([list(dataset.answers_before[row]) for row in rows.tolist()], pa.list_(pa.int64()))
    fields = dict.fromkeys([*dataset.columns, *workload.columns])
    for name in fields:
        if name not in columns and name != "after":  # whom the rows of an earlier saved workload waited for is past
            columns[f"field_{name}"] = workload.column(name)
    kinds: list[str] = []
    if dataset.block_hashes is not None:
        hashes, kinds = _encode([dataset.block_hashes[row] for row in rows.tolist()])
        columns["block_hashes"] = pa.array(hashes, pa.list_(pa.int64()))
        if len(set(kinds)) > 1:
            columns["hash_kind"] = kinds
    pq.write_table(pa.table(columns), folder / FILES[0], compression="zstd")
    meta = {
        "format": FORMAT, "name": dataset.name, "unit": dataset.unit, "source": dataset.source, "licence": dataset.licence,
        "max_new_tokens": dataset.max_new_tokens, "dropped": dict(dataset.dropped), "hash_tokens": dataset.hash_tokens,
        "hashes": kinds[0] if len(set(kinds)) == 1 else "mixed" if kinds else None, "users": workload.users,
        "notes": {**{k: v for k, v in dataset.notes.items() if k not in ("saved", "users")}, **workload.notes},
    }  # fmt: skip
    (folder / FILES[1]).write_text(json.dumps(jsonable(meta), sort_keys=True, indent=1, allow_nan=False) + "\n")


def load_workload(folder: Path | str) -> Dataset:
    """The saved requests as a Dataset whose replay is the saved workload. Raises FileNotFoundError, naming what is missing,
    and ValueError on another format."""
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no saved workload in {folder}: {name} is missing")
    meta = json.loads((folder / FILES[1]).read_text())
    if meta["format"] != FORMAT:
        raise ValueError(f"{folder} has format {meta['format']}, this version reads {FORMAT}")
    table = pq.read_table(folder / FILES[0])
    frame = table.drop_columns(
        [name for name in ("block_hashes", "samples", "answers_before") if name in table.column_names]
    ).to_pandas()
    columns = {name.removeprefix("field_"): frame[name].to_numpy() for name in frame if str(name).startswith("field_")}
    columns |= {name: frame[name].to_numpy() for name in ("after", "gap") if name in frame}
    hashes = None
    if meta["hashes"]:
        kinds = frame["hash_kind"].tolist() if meta["hashes"] == "mixed" else repeat(meta["hashes"])
        hashes = [_decoded(stored, kind) for stored, kind in zip(table["block_hashes"].to_pylist(), kinds, strict=False)]
    return Dataset(
        name=meta["name"],
        prompt_len=frame["prompt_len"].to_numpy(np.int64),
        output_len=frame["output_len"].to_numpy(np.int64),
        unit=meta["unit"],
        source=meta["source"],
        licence=meta["licence"],
        censored=frame["censored"].to_numpy(bool) if "censored" in frame else None,
        group=pd.factorize(frame["group"])[0].astype(np.int64) if "group" in frame else None,
        prompts=frame["prompt"].tolist() if "prompt" in frame else None,
        arrival=frame["arrival"].to_numpy(np.float64),
        max_new_tokens=meta["max_new_tokens"],
        dropped=meta["dropped"],
        columns=columns,
        notes={**meta["notes"], "saved": True} | ({} if meta["users"] is None else {"users": meta["users"]}),
        block_hashes=hashes,
        hash_tokens=meta["hash_tokens"],
        samples=np.array(table["samples"].to_pylist(), dtype=np.int64) if "samples" in table.column_names else None,
        answers_before=table["answers_before"].to_pylist() if "answers_before" in table.column_names else None,
    )


def _encode(hashes: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[str]]:
    """Prefix names as lists of numbers, and how to read each: names, or what an endless row of names is made from."""
    kinds = ["range" if isinstance(h, range) else "shared" if isinstance(h, Shared) else "names" for h in hashes]
    return [[h.start, h.stop] if isinstance(h, range) else list(h.key if isinstance(h, Shared) else h) for h in hashes], kinds


def _decoded(stored: list[int], kind: str) -> Sequence[int]:
    return range(*stored) if kind == "range" else Shared.of(stored) if kind == "shared" else stored
