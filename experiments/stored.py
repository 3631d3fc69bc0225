"""The config that a stored cell was made from, read cheaply: a study has one per cell."""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped]

from .load_runs import Cell

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the pure one takes tens of milliseconds a cell


def config_of(cell: Cell) -> dict[str, Any]:
    """The cell's resolved config, nested as Hydra composed it; empty where it was not kept."""
    path = cell.folder / ".hydra" / "config.yaml"
    config = yaml.load(path.read_bytes(), Loader=LOADER) if path.exists() else None  # resolved: no interpolation is left
    return config if isinstance(config, dict) else {}
