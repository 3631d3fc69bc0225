"""Aging: a starvation guard around any policy whose key counts tokens, with a declared overtaking bound.

The key becomes key + alpha x arrival. Its order is constant in time, so that the guard costs nothing per step, and yet a
request cannot be passed for ever: whoever arrives beta x key later is behind it, whatever its length.
"""

from __future__ import annotations

from ..policy import Policy
from ..ports import View
from ..request import Request


class Aging(Policy):
    """`policy` with `alpha` tokens of credit for each second of age, alpha > 0.

    Declared bound: a request i is passed only by requests j with a_j < a_i + (key_i - least) / alpha, where key_i is i's
    key when it became eligible and `least` the least key there is (1 token). Past it, i blocks the queue.
    """

    def __init__(self, policy: Policy, alpha: float) -> None:
        if not alpha > 0:
            raise ValueError(f"alpha={alpha} tokens/s must be > 0")
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
        return key + self.alpha * req.arrival

    def overtaking_horizon(self, req: Request, view: View) -> float:
        """The arrival time (s) from which on nobody may pass `req` any more."""
        return req.arrival + (float(self.policy.key(req, view)) - 1.0) / self.alpha  # type: ignore[arg-type]

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
