"""Refusals at the door: a number a cost model cannot work with is named before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def not_negative(**values: Any) -> None:
    """Raises ValueError, naming it, at the first value that is no finite number >= 0: time would run backwards, or stop."""
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ValueError(f"{name}={value} must be a finite number >= 0")


def positive(**values: Any) -> None:
    """Raises ValueError, naming it, at the first value that is no number above 0."""
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and value > 0):
            raise ValueError(f"{name}={value} must be above 0")


def fields(name: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises ValueError unless `values` has exactly the `known` fields, each a finite number >= 0; names the odd one."""
    missing, unknown = [f for f in known if f not in values], sorted(set(values) - set(known))
    if missing or unknown:
        raise ValueError(f"{name} lacks {missing}" if missing else f"{name} has {unknown}; known are {list(known)}")
    not_negative(**{f"{name}.{field}": values[field] for field in known})
