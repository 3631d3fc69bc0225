"""Guard: any policy, with some requests put before all others, so that nobody waits for ever.

Who is due, and where among the promoted, is for a subclass to say; everybody else stands as the inner policy has it.
A promotion costs O(log waiting), a plan without one nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from ..policy import INF, Key, Policy, overrides
from ..ports import View
from ..request import Request
from .around import Around

FRONT = -float(1 << 40)  # before any key that a policy gives; a place is told from another by 0.25 ms, a whole number exactly


class Guard(Around):
    """`policy`, but for those that `due` has named. Keys of the inner policy are numbers, or tuples that begin with one."""

    def __init__(self, policy: Policy) -> None:
        if isinstance(policy, Guard):
            raise ValueError(
                f"{type(self).__name__} around {type(policy).__name__}: both put some before all others; guard what is within"
            )
        super().__init__(policy)
        self._place: dict[Request, float] = {}  # the keys of the promoted
        if overrides(policy, "order"):
            self.order = self._order  # type: ignore[method-assign]
        if overrides(policy, "victim"):
            self.victim = self._victim  # type: ignore[method-assign]

    @abstractmethod
    def due(self, view: View) -> Iterable[tuple[float, Request]]:
        """Those to promote now, each once, on the batch or not, with their place among the promoted: lower runs first."""

    @abstractmethod
    def next_due(self) -> float:
        """The time (s) at which `due` names somebody next, unless somebody arrives, is scheduled or preempted before."""

    def is_promoted(self, req: Request) -> bool:
        return req in self._place

    def demote(self, req: Request) -> None:
        """Put a promoted request back among the others; its key is stored anew by whoever calls."""
        del self._place[req]

    def key(self, req: Request, view: View) -> Key:
        key = self.policy.key(req, view)
        place = self._place.get(req)
        if place is None:
            return key
        return (place,) if isinstance(key, tuple) else place

    def turned(self, view: View) -> Iterable[Request]:
        out = dict.fromkeys(self.policy.turned(view))
        for place, req in self.due(view):
            self._place[req] = FRONT + place
            out[req] = None
        return out

    def may_preempt(self, incoming: Request, victim: Request, view: View) -> bool:
        mine, its = self._place.get(incoming), self._place.get(victim)
        if mine is not None:
            return its is None or mine < its
        return its is None and self.policy.may_preempt(incoming, victim, view)

    def may_pass(self, req: Request, blocked: Request, view: View) -> bool:
        return blocked not in self._place and self.policy.may_pass(req, blocked, view)

    def rekey_at(self, req: Request, generated: int) -> float:
        return INF if req in self._place else self.policy.rekey_at(req, generated)

    def drifts(self, req: Request, generated: int) -> bool:
        return req not in self._place and self.policy.drifts(req, generated)

    def stable(self, view: View) -> tuple[int, float]:
        steps, until = self.policy.stable(view)
        return steps, min(until, self.next_due())

    def on_finish(self, req: Request) -> None:
        self._place.pop(req, None)
        super().on_finish(req)

    def _order(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
        rows = list(waiting)
        yield from sorted((r for r in rows if r in self._place), key=self._rank)
        yield from self.policy.order([r for r in rows if r not in self._place], view)

    def _victim(self, running: Iterable[Request], view: View) -> Request | None:
        rows = list(running)
        others = [r for r in rows if r not in self._place]
        return self.policy.victim(others, view) if others else max(rows, key=self._rank, default=None)

    def _rank(self, req: Request) -> tuple[float, float, int]:
        return self._place[req], req.arrival, req._entry
