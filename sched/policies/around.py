"""Around: a policy that asks another one, and changes what a subclass says."""

from __future__ import annotations

from ..policy import Key, Policy, overrides
from ..ports import View
from ..request import Request

_OWN = ("order", "victim", "admit", "may_preempt", "may_pass", "key_epoch", "turned", "on_steps")  # each costs where it is said


class Around(Policy):
    """`policy`, unchanged. What the inner policy leaves as it is, and the subclass too, costs nothing here either."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs = policy.needs
        self.preemptive = policy.preemptive
        self.backfill = policy.backfill
        self.rekey_decides = policy.rekey_decides
        for name in _OWN:
            if not overrides(self, name) and overrides(policy, name):
                setattr(self, name, getattr(policy, name))

    @property
    def drift(self) -> float:  # type: ignore[override]  # it may change with `key_epoch`
        return self.policy.drift

    def key(self, req: Request, view: View) -> Key:
        return self.policy.key(req, view)

    def rekey_at(self, req: Request, generated: int) -> float:
        return self.policy.rekey_at(req, generated)

    def drifts(self, req: Request, generated: int) -> bool:
        return self.policy.drifts(req, generated)

    def stable(self, view: View) -> tuple[int, float]:
        return self.policy.stable(view)

    def on_arrival(self, req: Request) -> None:
        self.policy.on_arrival(req)

    def on_schedule(self, req: Request, view: View) -> None:
        self.policy.on_schedule(req, view)

    def on_preempt(self, req: Request, view: View) -> None:
        self.policy.on_preempt(req, view)

    def on_refine(self, req: Request) -> None:
        self.policy.on_refine(req)

    def on_finish(self, req: Request) -> None:
        self.policy.on_finish(req)
