"""Where what is made once is kept: built kernels, converted models, compiled graphs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """A folder below LENGTHWISE_CACHE, or below the user's cache folder; made if it is not there."""
    root = os.environ.get("LENGTHWISE_CACHE")
    if root:
        base = Path(root)
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lengthwise"
    path = base.joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path
