"""Policy: WHO goes first. One number (or tuple) per request, lower first; everything else has a default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ports import View
    from .request import Request

Key = float | tuple[float, ...]
FOREVER = 1 << 40  # steps
INF = float("inf")


class Policy(ABC):
    """A scheduling policy. Subclass, give `key`, and name what you need; the scheduler never asks which policy it runs.

    needs: of prediction, distribution, cached_len, future_peak, client, program, slo, step_time, probe, preempt, victim;
    composition refuses what a host cannot give. preemptive: may take a slot or KV from a running request.
    backfill: how many requests that do not fit may be passed over in one plan (0 none, FOREVER all).
    drift: change of a key per generated token while decoding, so that heaps over running requests stay valid.
    """

    needs: frozenset[str] = frozenset()
    preemptive: bool = False
    backfill: int = 0
    drift: float = 0.0
    rekey_decides: bool = True  # False: what happens at `rekey_at` never makes anybody preemptible or first

    @abstractmethod
    def key(self, req: Request, view: View) -> Key:
        """Lower runs first; ties by arrival, then order of entry. Pure; constant while `req` waits, but for `key_epoch` and
        `turned`."""

    def order(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
        """Requests in the order they are to be tried. Override only for orders that no key expresses; read `waiting` before the
        first is given, for those who are let in leave it: sorting it costs O(waiting), not reading it costs nothing."""
        return iter(sorted(waiting, key=lambda r: (self.key(r, view), r.arrival, r._entry)))

    def key_epoch(self, view: View) -> object:
        """A change of this value invalidates all stored keys."""
        return None

    def admit(self, req: Request, view: View) -> bool:
        """A further condition on admission, beside that its KV fits now. False blocks like KV that does not fit."""
        return True

    def may_preempt(self, incoming: Request, victim: Request, view: View) -> bool:
        """May `incoming` take the slot or the KV of `victim`? Only with a strictly lower key."""
        return self.key(incoming, view) < self.key(victim, view)  # type: ignore[operator]

    def may_pass(self, req: Request, blocked: Request, view: View) -> bool:
        """May `req` be admitted while `blocked`, before it in order, does not fit?"""
        return True

    def victim(self, running: Iterable[Request], view: View) -> Request | None:
        """Whom to preempt. Override to choose otherwise than by the greatest key; then name `victim` in `needs`."""
        return max(running, key=lambda r: (self.key(r, view), r.arrival, r._entry), default=None)

    def rekey_at(self, req: Request, generated: int) -> float:
        """The number of generated tokens > `generated` at which `req`'s key stops moving as it does now; infinity: never."""
        return INF

    def drifts(self, req: Request, generated: int) -> bool:
        """Whether `req`'s key follows `drift` from here to `rekey_at`, or stands still."""
        return True

    def turned(self, view: View) -> Iterable[Request]:
        """Those whose key has changed since this was last asked, otherwise than by `drift`, `rekey_at` and `key_epoch`: who was
        promoted, say. Asked once a plan; `stable` ends where it would name somebody."""
        return ()

    def stable(self, view: View) -> tuple[int, float]:
        """(decode steps, absolute time) until any decision may change for another reason than an arrival, a finish, KV, or
        `rekey_at`. Early is always right, late is a bug."""
        return 1, INF

    def on_arrival(self, req: Request) -> None: ...  # noqa: B027
    def on_schedule(self, req: Request, view: View) -> None: ...  # noqa: B027 - on the batch now: admitted, or back on it
    def on_preempt(self, req: Request, view: View) -> None: ...  # noqa: B027 - off the batch again; its key is asked next
    def on_steps(self, num_steps: int, view: View) -> None: ...  # noqa: B027
    def on_refine(self, req: Request) -> None: ...  # noqa: B027 - it has another `prediction` now
    def on_finish(self, req: Request) -> None: ...  # noqa: B027


def overrides(policy: Policy, method: str) -> bool:
    """Whether `policy` has its own `method`: by its class, or, for one that wraps another, by the object."""
    return getattr(getattr(policy, method), "__func__", None) is not getattr(Policy, method)
