"""Aging: a starvation guard around any policy whose key counts tokens, with a declared overtaking bound.

The key becomes key + alpha x arrival. Its order is constant in time, so that the guard costs nothing per step, and yet a
request cannot be passed for ever: whoever arrives beta x key later is behind it, whatever its length.
"""

from __future__ import annotations

import math

from ..policy import Policy
from ..ports import View
from ..request import Request


class Aging(Policy):
    """`policy` with `alpha` tokens of credit for each second of age, alpha > 0.

    Declared bound: a request i is passed only by requests j with a_j < a_i + (key_i - 1) / alpha, where key_i is i's key when
    it became eligible; no key counts for less than 1 token. Past it, i blocks the queue. Raises ValueError around a policy
    whose keys may rise while a request runs, or that orders otherwise than by key: the bound would not hold.
    """

    def __init__(self, policy: Policy, alpha: float) -> None:
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha={alpha} tokens/s must be > 0 and finite")
        kind = type(policy)
        for method in ("order", "may_preempt", "victim"):
            if getattr(kind, method) is not getattr(Policy, method):
                raise ValueError(f"Aging works on keys; {kind.__name__} overrides {method}")
        if policy.rekey_decides and kind.rekey_at is not Policy.rekey_at:
            raise ValueError(f"Aging bounds overtaking by the key at arrival; that of this {kind.__name__} may rise later")
        if policy.drift > 0:
            raise ValueError(f"Aging bounds overtaking by the key at arrival; that of {kind.__name__} rises as it runs")
        self.policy = policy
        self.alpha = alpha
        self.needs = policy.needs
        self.preemptive = policy.preemptive
        self.backfill = policy.backfill
        self.drift = policy.drift
        self.rekey_decides = policy.rekey_decides

    def key(self, req: Request, view: View) -> float:
        key = self.policy.key(req, view)
        if isinstance(key, tuple):
            raise ValueError(f"Aging needs a key in tokens; {type(self.policy).__name__} gives a tuple")
        if key < 0:
            raise ValueError(f"Aging needs a key in tokens; request {req.rid} has the key {key}")
        if req.prediction is not None and req.prediction.is_rank_only:
            raise ValueError(f"Aging needs a key in tokens; request {req.rid} has a rank-only prediction")
        return max(key, 1.0) + self.alpha * req.arrival

    def key_epoch(self, view: View) -> object:
        return self.policy.key_epoch(view)

    def overtaking_horizon(self, req: Request, view: View) -> float:
        """The arrival time (s) from which on nobody may pass `req` any more."""
        return (self.key(req, view) - 1.0) / self.alpha

    def admit(self, req: Request, view: View) -> bool:
        return self.policy.admit(req, view)

    def may_pass(self, req: Request, blocked: Request, view: View) -> bool:
        return self.policy.may_pass(req, blocked, view) and req.arrival < self.overtaking_horizon(blocked, view)

    def rekey_at(self, req: Request, generated: int) -> float:
        return self.policy.rekey_at(req, generated)

    def drifts(self, req: Request, generated: int) -> bool:
        return self.policy.drifts(req, generated)

    def stable(self, view: View) -> tuple[int, float]:
        return self.policy.stable(view)

    def on_arrival(self, req: Request) -> None:
        self.policy.on_arrival(req)

    def on_steps(self, num_steps: int, view: View) -> None:
        self.policy.on_steps(num_steps, view)

    def on_finish(self, req: Request) -> None:
        self.policy.on_finish(req)
