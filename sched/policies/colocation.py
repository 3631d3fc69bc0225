"""Co-location: online and offline requests in one engine, the offline ones in what is left (ConServe; HyGen, NeurIPS 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..policy import Policy, overrides
from ..ports import View
from ..request import Request


class Colocation(Policy):
    """Online requests in the order of one policy, then offline ones in that of another; an offline one yields its slot and KV
    to any online one, and never takes either from it. In a class its own policy says whether and whom to preempt.

    offline_from: who has this priority or a greater one is offline. backfill is the lesser of the two. What each policy asks of
    the View (how many wait, say) is of both classes together. Where one of them orders by hand, chooses victims by hand, or has
    keys that drift while a request runs, a victim costs O(batch).

    Left out: ConServe's preemption within a step, between layers, and its copies of offline KV ahead of time; HyGen's budget of
    offline tokens from predicted step times, for a prompt in progress keeps its share of `token_budget`.
    """

    preemptive = True

    def __init__(self, online: Policy, offline: Policy, offline_from: float = 1.0) -> None:
        if offline_from != offline_from:
            raise ValueError(f"offline_from={offline_from} is no priority")
        self.online = online
        self.offline = offline
        self.offline_from = offline_from
        self.needs = online.needs | offline.needs | {"preempt"}
        self.backfill = min(online.backfill, offline.backfill)
        self.rekey_decides = online.rekey_decides or offline.rekey_decides
        both = online, offline
        if orders := any(overrides(policy, "order") for policy in both):
            self.order = self._order  # type: ignore[method-assign]
        if orders or any(policy.drift or overrides(policy, "victim") for policy in both):
            self.victim = self._victim  # type: ignore[method-assign]
            self.needs = self.needs | {"victim"}

    def is_offline(self, req: Request) -> bool:
        return req.priority >= self.offline_from

    def _of(self, req: Request) -> Policy:
        return self.offline if self.is_offline(req) else self.online

    def key(self, req: Request, view: View) -> tuple[float, ...]:
        key = self._of(req).key(req, view)
        return (float(self.is_offline(req)), *(key if isinstance(key, tuple) else (key,)))

    def key_epoch(self, view: View) -> object:
        return self.online.key_epoch(view), self.offline.key_epoch(view)

    def admit(self, req: Request, view: View) -> bool:
        return self._of(req).admit(req, view)

    def may_preempt(self, incoming: Request, victim: Request, view: View) -> bool:
        policy = self._of(incoming)
        if self.is_offline(victim) != self.is_offline(incoming):
            return self.is_offline(victim)
        return policy.preemptive and policy.may_preempt(incoming, victim, view)

    def may_pass(self, req: Request, blocked: Request, view: View) -> bool:
        return self.is_offline(req) != self.is_offline(blocked) or self._of(req).may_pass(req, blocked, view)

    def rekey_at(self, req: Request, generated: int) -> float:
        return self._of(req).rekey_at(req, generated)

    def turned(self, view: View) -> Iterable[Request]:
        return [*self.online.turned(view), *self.offline.turned(view)]

    def stable(self, view: View) -> tuple[int, float]:
        (steps, until), (others, other_until) = self.online.stable(view), self.offline.stable(view)
        return min(steps, others), min(until, other_until)

    def on_arrival(self, req: Request) -> None:
        self._of(req).on_arrival(req)

    def on_schedule(self, req: Request, view: View) -> None:
        self._of(req).on_schedule(req, view)

    def on_preempt(self, req: Request, view: View) -> None:
        self._of(req).on_preempt(req, view)

    def on_refine(self, req: Request) -> None:
        self._of(req).on_refine(req)

    def on_steps(self, num_steps: int, view: View) -> None:
        self.online.on_steps(num_steps, view)
        self.offline.on_steps(num_steps, view)

    def on_finish(self, req: Request) -> None:
        self._of(req).on_finish(req)

    def _order(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
        both = list(waiting) if isinstance(waiting, Iterator) else waiting
        yield from self.online.order((r for r in both if not self.is_offline(r)), view)
        yield from self.offline.order((r for r in both if self.is_offline(r)), view)

    def _victim(self, running: Iterable[Request], view: View) -> Request | None:
        rows = list(running)
        offline = [r for r in rows if self.is_offline(r)]
        return self.offline.victim(offline, view) if offline else self.online.victim(rows, view)
