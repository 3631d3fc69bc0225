"""Reserve a quantile of the predicted answer: room for all but the few that are longer than foretold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .estimates import Predicted
from .max_tokens import MaxTokens

if TYPE_CHECKING:
    from ..request import Request


class Quantile(MaxTokens):
    """prompt + the `level` quantile of the predicted length, at most max_new_tokens, of all that run and of who enters fit the
    pool. Who outlives it counts as it grows (S3, NeurIPS 2023, reserves anew, twice as much). Raises ValueError unless level is
    within (0, 1)."""

    needs = frozenset({"distribution"})

    def __init__(self, level: float = 0.9) -> None:
        self._predicted = Predicted(level)

    def total(self, req: Request, generated: int) -> float:
        return self._predicted.total(req, generated)
