"""Past-Future admission: look at the greatest memory that is to come, not at what is free now (LightLLM; ASPLOS 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..policy import FOREVER
from .admission import Admission
from .estimates import Estimate, Predicted

if TYPE_CHECKING:
    from ..outlook import Outlook
    from ..request import Request
    from ..standing import Standing


class FuturePeak(Admission):
    """A request enters when max over k of (left_k x k + KV of the k that last longest) stays below the pool.

    estimate: where `left` comes from: `Predicted` (default), or `History`, the paper's. LightLLM's limit on the prompt tokens
    of one batch is the token budget here, and its limit on requests is max_num_seqs.
    """

    def __init__(self, estimate: Estimate | None = None) -> None:
        self._estimate = estimate or Predicted()
        self.needs = self._estimate.needs
        self._outlook: Outlook | None = None

    def admits(self, req: Request, ledger: Standing, without: Sequence[Request]) -> bool:
        if self._outlook is None:
            self._outlook = ledger.outlook(self._estimate.total, self._estimate.renews)
        return self._outlook.peak(req, without) < ledger.pool_tokens

    def steps(self, ledger: Standing) -> int:
        return 1 if ledger.num_waiting else FOREVER  # who runs comes nearer to its end with every step

    def on_finish(self, req: Request, generated: int) -> None:
        self._estimate.on_finish(req, generated)
