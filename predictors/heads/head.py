"""Head: what an encoder is taught to say about a length: how many numbers, the loss, and how the numbers become predictions."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..predictions import Predictions
from ..predictor import State

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Head(ABC):
    """Used in this order: `learn_labels`, then `num_outputs` and `loss` while training, `calibrate` on rows not trained on
    where `sets_rows_aside`, `predictions`. Outputs are (B, num_outputs); a censored length is a lower bound.
    """

    sets_rows_aside: ClassVar[bool] = False

    @property
    @abstractmethod
    def num_outputs(self) -> int: ...

    def learn_labels(self, lengths: Floats, censored: Bools) -> None:  # noqa: B027
        """See the training lengths (N,) before training."""

    @abstractmethod
    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        """The scalar to make small over one batch: outputs (B, num_outputs), lengths (B,) tokens, censored (B,) bool."""

    def calibrate(self, outputs: Floats, lengths: Floats, censored: Bools) -> None:  # noqa: B027
        """Learn from rows that were not trained on what outputs (N, num_outputs) mean in tokens."""

    @abstractmethod
    def predictions(self, outputs: Floats) -> Predictions:
        """(N, num_outputs) -> N predictions; rows do not depend on each other."""

    def state(self) -> State:
        """Values and arrays that `restore` needs."""
        return State()

    def restore(self, state: State) -> None:  # noqa: B027
        """Become the head of `state`."""

    def settings(self) -> dict[str, Any]:
        """The node that makes this head: `_target_` and the constructor's arguments, kept as attributes of the same names."""
        cls = type(self)
        given = {name: getattr(self, name) for name in inspect.signature(cls).parameters}
        given = {name: value.settings() if isinstance(value, Head) else value for name, value in given.items()}
        return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **given}


def made(node: Head | Mapping[str, Any]) -> Head:
    """The head of a node as `settings` gives it; a head is returned as it is. Raises ValueError when it is no head's."""
    if isinstance(node, Head):
        return node
    module, _, name = str(node.get("_target_")).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError as error:
        raise ValueError(f"the head {module}.{name} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Head)):
        raise ValueError(f"{node.get('_target_')} is not a head")
    given = {key: made(value) if isinstance(value, Mapping) else value for key, value in node.items() if key != "_target_"}
    return found(**given)
