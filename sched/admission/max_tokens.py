"""Reserve the longest possible answer (Orca, OSDI 2022): nobody admitted is ever preempted for memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .admission import Admission

if TYPE_CHECKING:
    from ..outlook import Outlook
    from ..request import Request
    from ..standing import Standing


class MaxTokens(Admission):
    """prompt + max_new_tokens of all that run and of who enters fit the pool.

    Orca takes that memory; here only the count is kept, and the KV cache goes on giving blocks as they are needed.
    """

    _outlook: Outlook | None = None

    def total(self, req: Request, generated: int) -> float:
        """Output tokens that are reserved for `req`."""
        return req.max_new_tokens

    def admits(self, req: Request, ledger: Standing, without: Sequence[Request]) -> bool:
        if self._outlook is None:
            self._outlook = ledger.outlook(self.total)
        return self._outlook.at_ends(req, without) <= ledger.pool_tokens
