"""Yielding: who gives up a slot or KV for whom. It chooses and moves nobody.

A victim costs O(log n): each of the three sets that it may come from has a heap with the last in order on top (last.py). Only a
policy that names its victims by hand, or a rule, looks at the whole batch for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import takewhile

from .last import Last
from .policy import overrides
from .preemption import Preemption
from .request import Phase, Request
from .standing import Standing
from .victims import VictimRule

PREFILLING, DECODING, PAUSED = Phase.PREFILLING, Phase.DECODING, Phase.PAUSED


class Yielding:
    """Victims by the policy's order: the last in order yields first, and only to a strictly lower key, but for paused
    requests, which yield KV to any request before them in order. A `rule` chooses otherwise among those that may be hit."""

    def __init__(self, ledger: Standing, preemption: Preemption, rule: VictimRule | None = None) -> None:
        self._ledger = ledger
        self._keeps_kv = preemption.keeps_kv
        self.rule = rule
        self._custom = overrides(ledger.policy, "victim")
        self._by_key = not overrides(ledger.policy, "may_preempt")
        self._prefilling: Last | None = None  # of this plan, once somebody has asked

    def begin(self) -> None:
        """Another plan is made. Within one, nobody in mid-prefill changes its key."""
        self._prefilling = None

    def enters(self, req: Request) -> None:
        """`req` has come on the batch in this plan."""
        if self._prefilling is not None and req._phase == PREFILLING:
            self._prefilling.push(req, self._ledger.policy.key(req, self._ledger))

    def last(self) -> Request:
        """Whose KV goes when the decoders cannot grow: the last paused request, else the last running one."""
        ledger = self._ledger
        if (paused := ledger.waiting.paused.top()) is not None:
            return paused
        victim = self.last_running() if self.rule is None else next(iter(self._by_rule(self._running())), None)
        if victim is None:
            raise AssertionError(f"KV is short and {type(ledger.policy).__name__} names nobody to yield")
        return victim

    def last_running(self) -> Request | None:
        """The running request (decoding or prefilling) to preempt first."""
        ledger = self._ledger
        if self._custom:
            return ledger.policy.victim([*ledger.running.members, *ledger.prefilling], ledger)
        last = ledger.running.greatest()
        if ledger.prefilling and (other := self._prefilling_last_first().top()) is not None:
            return other if last is None or ledger.rank(other) > ledger.rank(last) else last
        return last

    def slot_victim(self, req: Request) -> Request | None:
        """Whose slot `req` may take, where a rule says so."""
        ledger = self._ledger
        may_preempt = ledger.policy.may_preempt
        if self._by_key and (last := self.last_running()) is not None and not may_preempt(req, last, ledger):
            return None  # when the last must not be hit, nobody may
        return next(iter(self._by_rule([r for r in self._running() if may_preempt(req, r, ledger)])), None)

    def victims(self, req: Request, slot_victim: Request | None) -> list[tuple[Request, bool]] | None:
        """Who yields so that `req` can run, each with whether its KV stays; None if KV is short all the same.

        slot_victim: whose slot it takes, when there is no free one. Nobody yields who turns out not to be needed."""
        ledger, keeps_kv = self._ledger, self._keeps_kv
        kv = ledger.kv
        incoming = None
        if req._phase == PAUSED:
            short = kv.short_of(ledger.next_block(req))
        else:  # who comes back from a tier decodes at once, and needs the block of its next token beside
            incoming = req, ledger.capacity(req)
            short = kv.short_of(kv.blocks_to_admit(*incoming) + ledger.next_block(req) + kv.watermark_blocks)
        evicted: list[Request] = []

        def brings(victim: Request) -> int:
            """Blocks that `victim` brings beside the others who yield: what it holds, and what it would have taken in this
            step. Off the batch it does not grow; a slot victim's growth counts from the start."""
            others: list[Request] = []
            if kv.indexes:
                others = [r for r in evicted if r is not victim]
                if slot_victim is not None and not keeps_kv and victim is not slot_victim:
                    others.append(slot_victim)
            blocks = kv.brings(victim, ledger.capacity(victim), others, incoming)
            grows = victim._phase == DECODING and not (keeps_kv and victim is slot_victim)
            return blocks + ledger.next_block(victim) if grows else blocks

        slot_brings = 0
        if slot_victim is not None:
            slot_brings = ledger.next_block(slot_victim) if keeps_kv else brings(slot_victim)
            short -= slot_brings
        elif short <= 0:
            return []

        if short > 0:
            for victim in self._candidates(req, slot_victim):
                evicted.append(victim)
                short -= brings(victim)
                if short <= 0:
                    break
            else:
                return None
            for victim in evicted[-2::-1]:
                if short + brings(victim) <= 0:
                    evicted.remove(victim)
                    short += brings(victim)
            a_slot_comes_free = slot_victim not in evicted and any(v._phase != PAUSED for v in evicted)
            if a_slot_comes_free and slot_victim is not None:
                slot_brings = ledger.next_block(slot_victim) if keeps_kv else brings(slot_victim)
                if short + slot_brings <= 0:  # the slot of somebody who yields KV anyway will do
                    slot_victim = None
        out = [(victim, False) for victim in evicted]
        if slot_victim is not None and slot_victim not in evicted:
            out.append((slot_victim, keeps_kv))
        return out

    def _candidates(self, req: Request, slot_victim: Request | None) -> Iterator[Request]:
        """Who may give up KV for `req`, last in order first: paused requests later in order (`slot_victim` with them, where it
        would keep its KV; not those who were passed over), then running ones that `req` may preempt."""
        ledger = self._ledger
        mine = ledger.rank(req)
        later = takewhile(lambda r: ledger.rank(r) > mine, ledger.waiting.paused.descending())
        if slot_victim is not None and self._keeps_kv:
            later = merge(later, [slot_victim], key=ledger.rank, reverse=True)  # type: ignore[assignment]
        yield from later
        if not ledger.policy.preemptive:
            return
        if self.rule is not None:
            group = [r for r in self._running() if r is not slot_victim and ledger.policy.may_preempt(req, r, ledger)]
            yield from self._by_rule(group)
            return
        for victim in self._running_last_first():
            if victim is slot_victim:
                continue
            if not ledger.policy.may_preempt(req, victim, ledger):
                return
            yield victim

    def _running(self) -> list[Request]:
        return [*self._ledger.running.members, *self._ledger.prefilling]

    def _by_rule(self, group: list[Request]) -> list[Request]:
        """Who yields first, first."""
        assert self.rule is not None
        cost, ledger = self.rule.cost, self._ledger
        return sorted(sorted(group, key=ledger.rank, reverse=True), key=lambda r: cost(r, ledger))

    def _running_last_first(self) -> Iterator[Request]:
        ledger = self._ledger
        if self._custom:
            group = [*ledger.running.members, *ledger.prefilling]
            while group and (victim := ledger.policy.victim(group, ledger)) is not None:
                group.remove(victim)
                yield victim
        elif ledger.prefilling:
            prefilling = self._prefilling_last_first().descending()
            yield from merge(ledger.running.descending(), prefilling, key=ledger.rank, reverse=True)
        else:
            yield from ledger.running.descending()

    def _prefilling_last_first(self) -> Last:
        """Those in mid-prefill: O(prefilling), once a plan, whose chunks cost as much."""
        if self._prefilling is None:
            self._prefilling, ledger = Last(), self._ledger
            for req in ledger.prefilling:
                self._prefilling.push(req, ledger.policy.key(req, ledger))
        return self._prefilling
