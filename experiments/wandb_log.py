"""Read W&B's offline files back, with no network and no account: one row per run, one row per logged step.

A `run-ID.wandb` file is a log of checked pieces, each a protobuf record. Every row that was logged comes back, not a sample of
them; what a kill cut off, or a disk damaged, is told beside what could be read. The framing is W&B's: 7 bytes of header, then
32 KiB blocks of pieces (CRC-32, length, kind), as in LevelDB's log. Records are W&B's internal protobuf, so the installed W&B
must be one that this reader was tested with (see pyproject.toml).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

IDENT = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK = 32_768
PIECE = struct.Struct("<IHB")  # CRC-32 of kind and data, length, kind
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
RUN_COLUMNS = (
    "id", "name", "group", "job_type", "tags", "project", "config", "summary", "artifacts", "num_rows", "num_segments", "ended",
    "problem", "folder",
)  # fmt: skip


@dataclass
class Segment:
    """What one offline file holds. rows: the logged steps in order, `_step` among their keys. artifacts: {name, type, metadata,
    files: path -> size}. ended: the run said so itself. problem: None, or why the file ends before that."""

    path: Path
    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    problem: str | None = None


def read_offline(folder: Path | str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(runs, history) of all offline runs under `folder`: a study, its `wandb` folder, or one `offline-run-...`.

    runs: RUN_COLUMNS, one row per run id: files with one id are segments of one run, later ones going on where the earlier
    stopped. history: id, step, then the logged keys; nested ones are joined by a dot; NaN where a step did not log a key. A
    step that two segments hold is there once, as the later one has it, and `problem` says so. Raises ValueError when there
    is no offline run.
    """
    paths = offline_files(Path(folder))
    if not paths:
        raise ValueError(f"no offline W&B run under {folder}")
    logical: dict[str, list[Segment]] = {}
    for path in paths:
        segment = read_segment(path)
        logical.setdefault(segment.id or path.stem.removeprefix("run-"), []).append(segment)
    runs, history = [], []
    for run_id, segments in logical.items():
        rows, problem = _joined(segments)
        last = segments[-1]
        problems = [problem, *(segment.problem for segment in segments)]
        runs.append(
            {
                "id": run_id, "name": last.name, "group": last.group, "job_type": last.job_type, "tags": last.tags,
                "project": last.project, "config": _merged(segment.config for segment in segments),
                "summary": _merged(segment.summary for segment in segments),
                "artifacts": [artifact for segment in segments for artifact in segment.artifacts],
                "num_rows": len(rows), "num_segments": len(segments), "ended": last.ended,
                "problem": "; ".join(text for text in problems if text) or None, "folder": str(last.path.parent),
            }
        )  # fmt: skip
        history += [{"id": run_id, "step": step, **row} for step, row in rows.items()]
    keys = sorted({key for row in history for key in row} - {"id", "step"}, key=lambda key: (key.startswith("_"), key))
    return pd.DataFrame(runs, columns=list(RUN_COLUMNS)), pd.DataFrame(history, columns=["id", "step", *keys])


def offline_files(folder: Path) -> list[Path]:
    """The offline logs at or under `folder`, oldest first."""
    for pattern in ("run-*.wandb", "offline-run-*/run-*.wandb", "wandb/offline-run-*/run-*.wandb"):
        found = list(folder.glob(pattern))
        if found:
            return sorted(found, key=lambda path: (path.parent.name, path.name))  # folders are named by their start
    return []


def read_segment(path: Path) -> Segment:
    """Read one `run-ID.wandb`. Never raises for a file that was cut off or damaged: `problem` tells. Raises ValueError on a
    file that is no such log, or whose records the installed W&B cannot read."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    record_type = _record_type()
    segment = Segment(path)
    for raw in _records(path.read_bytes(), segment):
        record = record_type()
        try:
            record.ParseFromString(raw)
        except DecodeError as error:
            raise ValueError(f"{path.name}: a record that this version of W&B cannot read: {error}") from error
        _take(segment, record)
    if segment.problem is None and not segment.ended:
        segment.problem = f"{path.name}: the run never ended: it was killed, or is still going on"
    return segment


def _records(raw: bytes, segment: Segment) -> Iterator[bytes]:
    """The records of a log, until its end or the first piece that is cut off or damaged, which `segment.problem` then names."""
    name = segment.path.name
    if len(raw) < len(IDENT):
        segment.problem = f"{name}: cut off in its header" if IDENT.startswith(raw) else f"{name}: no W&B log"
        return
    if raw[: len(IDENT)] != IDENT:
        raise ValueError(f"{name} is no W&B log that is known here: it begins with {raw[:7]!r}, not {IDENT!r}")
    at = whole = len(IDENT)  # whole: the end of the last whole record
    parts: list[bytes] = []
    while at < len(raw):
        room = BLOCK - at % BLOCK
        if room < PIECE.size:  # a piece never begins so late in a block
            at += room
            continue
        if len(raw) - at < PIECE.size:
            break
        crc, size, kind = PIECE.unpack_from(raw, at)
        data = raw[at + PIECE.size : at + PIECE.size + size]
        if len(data) < size:
            break
        if not WHOLE <= kind <= LAST or size > room - PIECE.size or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            segment.problem = f"{name}: damaged at byte {at} of {len(raw)}: the rest is not read"
            return
        if (kind in (WHOLE, FIRST)) == bool(parts):
            segment.problem = f"{name}: pieces out of order at byte {at} of {len(raw)}: the rest is not read"
            return
        at += PIECE.size + size
        parts.append(data)
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
            parts, whole = [], at
    if whole < len(raw) and (parts or any(raw[whole:])):
        segment.problem = f"{name}: cut off: its last {len(raw) - whole} of {len(raw)} bytes are no whole record"


def _take(segment: Segment, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run = record.run
        segment.id, segment.name, segment.group = run.run_id, run.display_name, run.run_group
        segment.job_type, segment.project, segment.tags = run.job_type, run.project, list(run.tags)
        _update(segment.config, run.config)
    elif kind == "config":
        _update(segment.config, record.config)
    elif kind == "summary":
        _update(segment.summary, record.summary)
    elif kind == "history":
        segment.rows.append({".".join(_keys(item)): json.loads(item.value_json) for item in record.history.item})
    elif kind == "artifact":
        artifact = record.artifact
        files = {entry.path: entry.size for entry in artifact.manifest.contents}
        metadata = json.loads(artifact.metadata) if artifact.metadata else {}
        segment.artifacts.append({"name": artifact.name, "type": artifact.type, "metadata": metadata, "files": files})
    elif kind == "exit":
        segment.ended = True


def _joined(segments: Iterable[Segment]) -> tuple[dict[int, dict[str, Any]], str | None]:
    """step -> row over all segments, in order of steps; and what was there twice."""
    rows: dict[int, dict[str, Any]] = {}
    twice = 0
    for segment in segments:
        for number, row in enumerate(segment.rows):
            step = int(row.get("_step", number))
            twice += step in rows
            rows[step] = {key: value for key, value in row.items() if key != "_step"}
    return dict(sorted(rows.items())), f"{twice} steps were logged twice; the later row is kept" if twice else None


def _update(into: dict[str, Any], record: Any) -> None:
    for item in record.update:
        *outer, key = _keys(item)
        where = into
        for name in outer:
            where = where.setdefault(name, {}) if isinstance(where.get(name, {}), dict) else where
        where[key] = json.loads(item.value_json)
    for item in record.remove:
        into.pop(_keys(item)[0], None)


def _keys(item: Any) -> list[str]:
    return list(item.nested_key) or [item.key]


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One mapping, later parts first; without W&B's own entries."""
    out: dict[str, Any] = {}
    for part in parts:
        out |= part
    return {key: value for key, value in out.items() if key != "_wandb"}


def _record_type() -> Any:
    try:
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]
    except ImportError as error:
        import wandb

        raise ValueError(f"W&B {wandb.__version__} has moved its records, which this reader needs: {error}") from error
    return Record
