"""What transformers reads from a folder or the hub: all of it, or one line that says what is wrong.

Weights that a checkpoint lacks, or has in another shape, transformers draws at random; here they are refused.
"""

from __future__ import annotations

import struct
from typing import Any

from safetensors import SafetensorError

UNREADABLE = (OSError, ValueError, KeyError, ImportError, NotImplementedError, RuntimeError, SafetensorError, struct.error)


def read(auto: Any, origin: str, **given: Any) -> Any:
    """auto.from_pretrained(origin). Code that comes with a model is never run. Raises ValueError, in one line."""
    try:
        return auto.from_pretrained(origin, trust_remote_code=False, **given)
    except UNREADABLE as error:
        raise ValueError(first_line(error)) from error


def read_weights(auto: Any, origin: str, **given: Any) -> Any:
    """The model that `auto`, a class for models, reads from `origin`. Raises ValueError as `read`, and for weights that are not
    all there."""
    model, found = read(auto, origin, output_loading_info=True, ignore_mismatched_sizes=True, **given)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{type(model).__name__} has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    if other := sorted(found["mismatched_keys"]):
        name, there, wanted = other[0]
        raise ValueError(
            f"{type(model).__name__} has weights {tuple(there)} for {name}, its configuration says {tuple(wanted)} "
            f"({len(other)} differ in all)"
        )
    return model


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
