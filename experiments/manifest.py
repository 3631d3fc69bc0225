"""The manifest of a study, cells.jsonl: first every planned cell, then a row as each ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .paths import MANIFEST

Row = dict[str, Any]


def append(study: Path, row: Row) -> None:
    """Add a row to the manifest: one write to a file opened for appending, so that workers do not mix their lines."""
    line = json.dumps(row, sort_keys=True) + "\n"
    handle = os.open(study / MANIFEST, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read_manifest(study: Path) -> list[Row]:
    """The rows of the manifest, a cell's last row in the place of its first; a line cut off by a kill is left out."""
    return list(merged(_lines(study)).values())


def merged(lines: Iterable[str], rows: dict[str, Row] | None = None) -> dict[str, Row]:
    """`rows` (changed in place) with those of `lines`: hash, or name where there is none -> a cell's last row."""
    rows = {} if rows is None else rows
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["hash"] or row["cell"]] = row
    return rows


def find_row(study: Path, config: str) -> Row | None:
    """The last row whose `config` is that hash: a look through the text, since every job of a sweep looks for its own."""
    rows = merged(line for line in _lines(study) if config in line)
    return next((row for row in rows.values() if row.get("config") == config), None)


def _lines(study: Path) -> list[str]:
    try:
        return (study / MANIFEST).read_text().splitlines()
    except FileNotFoundError:
        return []
