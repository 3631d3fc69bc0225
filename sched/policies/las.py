"""Least attained service, or foreground-background: who has generated least goes first; it predicts nothing.

Optimal among policies that know no lengths when the longer a request has run the longer it still runs (decreasing failure
rate; Righter and Shanthikumar 1989), and so what a size-based policy has to beat.
"""

from __future__ import annotations

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request


class LAS(Policy):
    """Key: generated tokens in whole multiples of `quantum`, preemptive. Within a multiple the first to come runs on, so that
    equals take turns of `quantum` tokens; as it goes to one, this is FB."""

    needs = frozenset({"preempt"})
    preemptive = True

    def __init__(self, quantum: int = 32) -> None:
        if quantum < 1 or quantum != int(quantum):
            raise ValueError(f"quantum={quantum} tokens must be a whole number >= 1")
        self.quantum = quantum

    def key(self, req: Request, view: View) -> float:
        return view.generated(req) // self.quantum

    def rekey_at(self, req: Request, generated: int) -> float:
        return (generated // self.quantum + 1) * self.quantum

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF
