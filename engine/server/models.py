"""Models: the one model that is served here, as /v1/models shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .errors import Refused


class Models:
    """name: the model's. max_model_len: tokens. about: policy, predictor and what marks them."""

    def __init__(self, name: str, max_model_len: int, about: Mapping[str, Any]) -> None:
        self._name = name
        self.card = {
            "id": name, "object": "model", "created": int(time.time()), "owned_by": "lengthwise", "root": name, "parent": None,
            "max_model_len": max_model_len, "metadata": dict(about),
        }  # fmt: skip

    def check(self, asked: str | None) -> None:
        """Raises Refused for another model than this; who names none means this one."""
        if asked not in (None, self._name):
            raise Refused(f"no such model; this server has {self._name!r}", 404, "model", "model_not_found")
