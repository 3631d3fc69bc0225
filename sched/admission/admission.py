"""Admission: what is reserved before a request may enter, beside that its KV fits now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..policy import FOREVER

if TYPE_CHECKING:
    from ..request import Request
    from ..standing import Standing


class Admission(ABC):
    """One scheduler's rule of admission; no rule at all is `none`.

    It is asked for whoever is to enter the batch, back from a preemption too, once KV and a slot are there, and only while
    somebody else runs: alone, a request that came through the door fits. So nobody waits for ever for a promise that cannot be
    kept. A refusal blocks like KV that does not fit; nobody is preempted for a reservation.
    """

    needs: frozenset[str] = frozenset()

    @abstractmethod
    def admits(self, req: Request, ledger: Standing, without: Sequence[Request]) -> bool:
        """May `req` enter, when those of `without` leave the batch for it?"""

    def steps(self, ledger: Standing) -> int:
        """Decode steps until it may admit somebody whom it refuses now, though nobody comes or ends. Early is always right."""
        return FOREVER

    def on_finish(self, req: Request, generated: int) -> None: ...  # noqa: B027
