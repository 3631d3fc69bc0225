"""Yielding: who gives up a slot or KV for whom. It chooses and moves nobody."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from .policy import overrides
from .preemption import Preemption
from .request import Phase, Request
from .standing import Standing
from .victims import VictimRule

DECODING, PAUSED = Phase.DECODING, Phase.PAUSED


class Yielding:
    """Victims by the policy's order: the last in order yields first, and only to a strictly lower key, but for paused
    requests, which yield KV to any request before them in order. A `rule` chooses otherwise among those that may be hit."""

    def __init__(self, ledger: Standing, preemption: Preemption, rule: VictimRule | None = None) -> None:
        self._ledger = ledger
        self._keeps_kv = preemption.keeps_kv
        self.rule = rule
        self._custom = overrides(ledger.policy, "victim")
        self._by_key = not overrides(ledger.policy, "may_preempt")

    def last(self) -> Request:
        """Whose KV goes when the decoders cannot grow: the last paused request, else the last running one."""
        ledger = self._ledger
        if ledger.paused:
            return max(ledger.paused, key=ledger.rank)
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
        if ledger.prefilling:
            group = [*ledger.prefilling, last] if last is not None else list(ledger.prefilling)
            last = max(group, key=ledger.rank)
        return last

    def slot_victim(self, req: Request) -> Request | None:
        """Whose slot `req` may take, where a rule says so."""
        ledger = self._ledger
        may_preempt = ledger.policy.may_preempt
        if self._by_key and (last := self.last_running()) is not None and not may_preempt(req, last, ledger):
            return None  # when the last must not be hit, nobody may
        return next(iter(self._by_rule([r for r in self._running() if may_preempt(req, r, ledger)])), None)

    def victims(self, req: Request, slot_victim: Request | None, passed: list[Request]) -> list[tuple[Request, bool]] | None:
        """Who yields so that `req` can run, each with whether its KV stays; None if KV is short all the same.

        slot_victim: whose slot it takes, when there is no free one. passed: those not to be touched. Nobody yields who turns
        out not to be needed."""
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
            for victim in self._candidates(req, slot_victim, passed):
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

    def _candidates(self, req: Request, slot_victim: Request | None, passed: list[Request]) -> Iterator[Request]:
        """Who may give up KV for `req`, last in order first: paused requests later in order (`slot_victim` with them, where it
        would keep its KV), then running ones that `req` may preempt."""
        ledger = self._ledger
        mine = ledger.rank(req)
        later = [r for r in ledger.paused if r is not req and r not in passed and ledger.rank(r) > mine]
        if slot_victim is not None and self._keeps_kv:
            later.append(slot_victim)
        later.sort(key=ledger.rank, reverse=True)
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
            prefilling = sorted(ledger.prefilling, key=ledger.rank, reverse=True)
            yield from merge(ledger.running.descending(), prefilling, key=ledger.rank, reverse=True)
        else:
            yield from ledger.running.descending()
