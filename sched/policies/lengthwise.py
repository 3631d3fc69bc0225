"""Lengthwise: least engine time to come first, as many as memory will bear until they end (this project's own policy).

What a request still costs is not its tokens to come alone. A step takes about as long whether it decodes one row or all, and
tokens that are computed hold up every slot: in slot-steps a token to decode costs 1, and one to compute max_num_seqs / ridge.
By this measure a long prompt is a long job, and to take up again what lost its KV costs what its KV did: a switch that does not
pay is not made, without a rule or a constant of its own. Whoever enters stays, as far as predictions go: admission asks whether
all that run will still fit when they hold the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..admission.estimates import Predicted
from ..ports import View
from ..request import Phase, Request
from .srpt import SRPT

if TYPE_CHECKING:
    from ..outlook import Outlook

ON_BATCH = (Phase.PREFILLING, Phase.DECODING)


class Lengthwise(SRPT):
    """Key: predicted slot-steps still to come, preemptive; those on the batch have paid for what is to be computed.

    ridge: tokens computed in the time of one decode step, where the hardware's roofline has its ridge (FLOP/s over byte/s, 150
    to 300 of a GPU with weights of 16 bits); infinity: computing costs nothing, and the order is SRPT's. `quantile`: of the
    predicted length, for what is taken to be held at the end; None: its mean. Alone, a request enters anyway. ahead=False: who
    fits now enters. What others have cached of a prompt is not looked up.
    """

    needs = SRPT.needs | {"future_peak"}

    def __init__(self, ridge: float = 256.0, quantile: float | None = None, ahead: bool = True) -> None:
        if not ridge > 0.0:
            raise ValueError(f"ridge={ridge} tokens must be > 0; infinity where computing them costs nothing")
        super().__init__()
        self.ridge, self.ahead = ridge, ahead
        self.total = Predicted(quantile).total  # output tokens that a request is taken to end with
        self._outlook: Outlook | None = None
        self._refused = False  # somebody, when last asked

    def key(self, req: Request, view: View) -> float:
        key = super().key(req, view)
        if req.phase in ON_BATCH:
            return key
        return key + (req.prompt_len + view.generated(req) - view.computed(req)) * view.max_num_seqs / self.ridge

    def admit(self, req: Request, view: View) -> bool:
        if not self.ahead:
            return True
        if self._outlook is None:
            self._outlook = view.outlook(self.total)
        self._refused = view.num_running > 0 and self._outlook.peak(req) > view.pool_tokens
        return not self._refused

    def stable(self, view: View) -> tuple[int, float]:
        steps, until = super().stable(view)
        return (1 if self._refused and view.num_waiting else steps), until  # with each step more may fit
