"""Aging: a starvation guard around any policy whose key counts tokens, with a declared overtaking bound.

The key becomes key + alpha x arrival. Its order is constant in time, so that the guard costs nothing per step, and yet a
request cannot be passed for ever: whoever arrives beta x key later is behind it, whatever its length.
"""

from __future__ import annotations

import math

from ..policy import Policy, overrides
from ..ports import View
from ..request import Request
from .around import Around


class Aging(Around):
    """`policy` with `alpha` tokens of credit for each second of age, alpha > 0.

    Declared bound: a request i is passed only by requests j with a_j < a_i + (key_i - 1) / alpha, where key_i is i's key when
    it became eligible: one that a refined prediction would raise stays as it was. No key counts for less than 1 token. Past the
    bound, i blocks the queue. Raises ValueError around a policy
    whose keys may rise while a request runs or waits, or that orders otherwise than by key: the bound would not hold.
    """

    def __init__(self, policy: Policy, alpha: float) -> None:
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha={alpha} tokens/s must be > 0 and finite")
        name = type(policy).__name__
        for method in ("order", "may_preempt", "victim", "turned"):
            if overrides(policy, method):
                raise ValueError(f"Aging works on keys; {name} overrides {method}")
        if policy.rekey_decides and overrides(policy, "rekey_at"):
            raise ValueError(f"Aging bounds overtaking by the key at arrival; that of this {name} may rise later")
        if policy.drift > 0:
            raise ValueError(f"Aging bounds overtaking by the key at arrival; that of {name} rises as it runs")
        super().__init__(policy)
        self.alpha = alpha
        self._first: dict[Request, float] = {}  # its key when it became eligible

    def key(self, req: Request, view: View) -> float:
        key = self.policy.key(req, view)
        if isinstance(key, tuple):
            raise ValueError(f"Aging needs a key in tokens; {type(self.policy).__name__} gives a tuple")
        if key < 0:
            raise ValueError(f"Aging needs a key in tokens; request {req.rid} has the key {key}")
        if req.prediction is not None and req.prediction.is_rank_only:
            raise ValueError(f"Aging needs a key in tokens; request {req.rid} has a rank-only prediction")
        return max(min(key, self._first.setdefault(req, key)), 1.0) + self.alpha * req.arrival

    def on_finish(self, req: Request) -> None:
        self._first.pop(req, None)
        super().on_finish(req)

    def overtaking_horizon(self, req: Request, view: View) -> float:
        """The arrival time (s) from which on nobody may pass `req` any more."""
        return (self.key(req, view) - 1.0) / self.alpha

    def may_pass(self, req: Request, blocked: Request, view: View) -> bool:
        return self.policy.may_pass(req, blocked, view) and req.arrival < self.overtaking_horizon(blocked, view)
