"""Several workloads as one, such as chat and code on one engine; `part` says which row is whose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate

from ..dataset import Dataset
from ..reshape import merge


def load(parts: Mapping[str, Any], *, name: str = "merged") -> Dataset:
    """parts: name -> workload node (made here: `_recursive_: false`) or Dataset. Raises what `merge` raises."""
    made = {str(key): instantiate(part) if isinstance(part, Mapping) else part for key, part in parts.items()}
    for key, part in made.items():
        if not isinstance(part, Dataset):
            raise ValueError(f"part {key} gave a {type(part).__name__}, not a Dataset")
    return merge(made, name=name)
