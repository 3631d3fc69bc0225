"""Where a named data file lies: below LENGTHWISE_DATA, or below the current folder; nothing is ever downloaded."""

from __future__ import annotations

import os
from pathlib import Path


def find_file(path: str | Path) -> Path:
    """The file `path` names: absolute, or relative to the folder LENGTHWISE_DATA (when set), else to the current folder.

    Raises FileNotFoundError naming the path and every place that was looked at.
    """
    asked = Path(path).expanduser()
    folder = os.environ.get("LENGTHWISE_DATA")
    places = [asked] if asked.is_absolute() or not folder else [Path(folder).expanduser() / asked, asked]
    for place in places:
        if place.is_file():
            return place
    hint = "" if folder or asked.is_absolute() else " (LENGTHWISE_DATA is not set)"
    raise FileNotFoundError(f"no file {str(path)!r}: looked at {', '.join(str(p.absolute()) for p in places)}{hint}")
