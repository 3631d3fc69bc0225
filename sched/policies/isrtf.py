"""ISRTF: iterative shortest remaining time first, ranked anew only at the edges of windows (ELIS, arXiv 2505.09142).

Between two edges all who decode lose one token a step, so that the order at an edge is their order until the next: the keys
of SRPT serve, and only preemption has to wait for the edge.
"""

from __future__ import annotations

from ..policy import FOREVER, INF
from ..ports import View
from ..request import Request
from .srpt import SRPT


class ISRTF(SRPT):
    """Key: predicted tokens to come. A window is `window` decode steps of the whole batch (50 in ELIS); at its edge, and only
    there, somebody who waits may take the slot or the KV of a running request.

    Departures: a slot that comes free within a window is filled at once (in ELIS it stands empty until the edge), and memory
    that runs out within a window still costs somebody its KV.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"window={window} steps must be >= 1")
        super().__init__("clip")
        self.window = window

    def may_preempt(self, incoming: Request, victim: Request, view: View) -> bool:
        return view.step % self.window == 0 and super().may_preempt(incoming, victim, view)

    def stable(self, view: View) -> tuple[int, float]:
        return (self.window - view.step % self.window if view.num_waiting else FOREVER), INF
