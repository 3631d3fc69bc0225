"""Victims: whom a preemption hits, apart from the policy; any policy works with any rule.

A rule orders those who may be hit. It gives nobody the right to hit: a slot, and KV for who enters, are still taken only from a
request with a strictly greater key, so that within one plan nobody is preempted again by whom it preempted. Only where the
decoders cannot grow may the rule name anybody, the first in order too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .policy import INF
from .request import predicted

if TYPE_CHECKING:
    from .request import Request
    from .standing import Standing


class VictimRule(ABC):
    """needs: as a policy's. No rule at all is `last`: the policy's last in order yields first."""

    needs: frozenset[str] = frozenset()

    @abstractmethod
    def cost(self, req: Request, ledger: Standing) -> float:
        """What it costs that `req` yields: the least yields first, ties by the policy's order, last first. Pure."""


class LeastComputed(VictimRule):
    """Who has computed the fewest tokens has the least to lose, whatever room it gives."""

    def cost(self, req: Request, ledger: Standing) -> float:
        return ledger.computed(req)


class LeastGenerated(VictimRule):
    """Who has generated the fewest tokens, of those the longest prompt (SGLang's retraction)."""

    def cost(self, req: Request, ledger: Standing) -> float:
        return ledger.generated(req) - req.prompt_len / (1 << 30)


class MostRemaining(VictimRule):
    """Who is predicted to have the most tokens to come would hold its memory longest."""

    needs = frozenset({"prediction"})

    def cost(self, req: Request, ledger: Standing) -> float:
        return -predicted(req).expected_remaining(ledger.generated(req))


class LeastWaste(VictimRule):
    """The fewest tokens to compute again for each block that comes back: who is in mid-prefill, or has just opened a block, or
    shares what it holds with nobody."""

    def cost(self, req: Request, ledger: Standing) -> float:
        blocks = ledger.kv.brings(req, ledger.capacity(req))
        return ledger.computed(req) / blocks if blocks else INF
