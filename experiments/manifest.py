"""The manifest of a study, cells.jsonl: first every planned cell, then a row as each ends."""

from __future__ import annotations

import json
import os
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
    rows: dict[str, Row] = {}
    try:
        lines = (study / MANIFEST).read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["hash"] or row["cell"]] = row
    return list(rows.values())
