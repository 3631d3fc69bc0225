"""Scheduler: order, admission, preemption and KV accounting, in Plans and Outcomes only.

It never sees a tensor, a GPU, a wall clock or a true output length. A plan costs O(what changes), never O(batch).
"""

from __future__ import annotations

from collections.abc import Iterator

from .admission import Admission
from .batching import Batching
from .check import check
from .door import refusal
from .kv import KVCache
from .ledger import Ledger
from .plan import Chunk, Outcome, Plan
from .policy import INF, Policy, overrides
from .prediction import LengthDistribution
from .preemption import Preemption
from .request import Phase, Request
from .standing import DECODING, PAUSED, PENDING, SWAPPED, WAITING
from .victims import VictimRule
from .yielding import Yielding

GIVES = frozenset({
    "prediction", "distribution", "cached_len", "future_peak", "client", "program", "slo", "step_time", "preempt", "victim",
})  # fmt: skip


class Scheduler(Ledger):
    """One engine's scheduler: `add` requests, `plan` a step, `book` what came of it. It is also the policy's View.

    max_num_seqs: rows that may prefill or decode at once. token_budget: tokens per step, decodes and chunks together.
    max_model_len: prompt + output tokens. clip: shorten max_new_tokens to max_model_len instead of rejecting.
    admission: what is reserved before a request may enter; None: who fits now enters. victim: whom a preemption hits; None: the
    policy's last. refine_every: decode steps from one to the next whose rows are to be predicted anew (`Plan.probe_rows`); 0:
    none. check: assert all counts at every step.
    """

    __slots__ = (
        "_custom_admit", "_custom_order", "_epoch", "_has_epoch", "_has_turned", "_needs_prediction", "_padding_context",
        "_tells_steps", "_yielding", "admission", "batching", "checks", "clip", "max_model_len", "needs",
        "num_padding", "refine_every", "token_budget", "turned",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        batching: Batching,
        kv: KVCache,
        preemption: Preemption,
        *,
        max_num_seqs: int = 256,
        token_budget: int = 2048,
        max_model_len: int = 8192,
        clip: bool = False,
        admission: Admission | None = None,
        victim: VictimRule | None = None,
        refine_every: int = 0,
        check: bool = False,
    ) -> None:
        if not 1 <= max_num_seqs <= token_budget:
            raise ValueError(f"max_num_seqs {max_num_seqs} must be from 1 to token_budget {token_budget}")
        for part in (policy, admission, victim):
            if part is not None and (missing := sorted(part.needs - GIVES)):
                raise ValueError(f"{type(part).__name__} needs {missing}; this scheduler gives {sorted(GIVES)}")
        if victim is not None and overrides(policy, "victim"):
            raise ValueError(f"{type(policy).__name__} chooses victims by a rule of its own; leave victim=last")
        if refine_every < 0:
            raise ValueError(f"refine_every={refine_every} decode steps: at least 1, or 0 for never")
        super().__init__(policy, kv, preemption.tiers, max_num_seqs)
        kv.use_chunks(token_budget)
        self.batching = batching
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.clip = clip
        self.refine_every = refine_every
        self.checks = check
        self.num_padding = 0  # rows of a static batch that have finished, and their context
        self._padding_context = 0
        self.admission = admission
        self._yielding = Yielding(self, preemption, victim)
        self._epoch = policy.key_epoch(self)
        self.turned: tuple[Request, ...] = ()  # those whose key was stored anew at the last plan
        self._custom_order = overrides(policy, "order")
        self._custom_admit = overrides(policy, "admit")
        self._tells_steps = overrides(policy, "on_steps")
        self._has_epoch = overrides(policy, "key_epoch")
        self._has_turned = overrides(policy, "turned")
        self.needs = frozenset().union(*(part.needs for part in (policy, admission, victim) if part is not None))
        self._needs_prediction = "prediction" in self.needs or "distribution" in self.needs

    # --- requests come ------------------------------------------------------------------------------------------------

    def add(self, req: Request) -> str | None:
        """Take a request in. Returns None, or why it was rejected at the door, with the numbers.

        Mutates `req` (its phase; with `clip`, its max_new_tokens). Raises ValueError for one that was added before."""
        if req._entry >= 0:
            raise ValueError(f"request {req.rid} was added before: {req!r}")
        self.counts["injected"] += 1
        req._entry = self.counts["injected"]
        refused = refusal(
            req, self.kv, whole_prompts=self.batching.whole_prompts, token_budget=self.token_budget,
            max_model_len=self.max_model_len, clip=self.clip,
        )  # fmt: skip
        if refused:
            req._phase = Phase.REJECTED
            self.counts["rejected"] += 1
        elif self._needs_prediction and req.prediction is None:
            req._phase = PENDING
            self.pending[req] = None
        else:
            self.enqueue(req)
        return refused

    def prediction_ready(self, req: Request) -> None:
        """A pending request has its prediction now. A no-op for one that did not wait for it."""
        if req._phase == PENDING and req in self.pending:
            del self.pending[req]
            self.enqueue(req)

    # --- plan ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Is there work that a plan could be about?"""
        return bool(self.running.members or self.prefilling or len(self.waiting))

    def next_wakeup(self) -> float:
        """The time of the next event this scheduler itself has declared (s): when the policy may decide otherwise, or a lease
        ends."""
        until = min(self.policy.stable(self)[1], self.kv.next_expiry) if self.busy else INF
        return until if until > self.now else INF

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can run. Mutates the queues; `book` must follow with the outcome."""
        self.now = now
        running, policy, kv = self.running, self.policy, self.kv
        self._yielding.begin()
        if kv.indexes:
            kv.expire(now)
        if running.turns:
            running.turn_keys()
        if self._has_epoch and (epoch := policy.key_epoch(self)) != self._epoch:
            self._epoch = epoch
            self.waiting.rekey(lambda r: policy.key(r, self))
            running.rekey()
        if self._has_turned:
            self.turned = tuple(policy.turned(self))
            for req in self.turned:
                self._turn(req)
        yielded = False  # then who waits may be better off one step later, so the step is not repeated
        while kv.growth() > kv.free and kv.short_of(0) > 0:  # make room for the decoders' next token
            self.give_up(self._yielding.last())
            yielded = True
        if self.num_padding and not self.num_running:
            self.num_padding = self._padding_context = 0

        chunks: dict[Request, Chunk] = {}
        budget = self.batching.budget(len(running.members), running.context_tokens, self.token_budget)
        mixes = self.batching.mixes
        if mixes:
            budget -= len(running.members)
        for req in self.prefilling:
            if budget <= 0:
                break
            budget -= self._add_chunk(chunks, req, budget)
        if not yielded and len(self.waiting) and self.batching.may_admit(self):
            yielded = self._admit(chunks, budget)

        num_decode = len(running.members) if mixes or not chunks else 0
        if not num_decode and not chunks:
            return None
        evicted = kv.indexes and num_decode > 0 and kv.ready()
        joins: list[Request] = []
        if num_decode and self.joins:
            joins, self.joins = list(self.joins), {}
        leaves: list[Request] = []
        if self.leaves:
            leaves, self.leaves = self.leaves, []
        plan = Plan([*chunks.values()], joins, leaves, num_decode)
        if num_decode:
            plan.context_tokens = running.context_tokens + self._padding_context
            plan.num_padding = self.num_padding
        steps, plan.stable_until = policy.stable(self)
        if not chunks and not yielded:
            if policy.rekey_decides:
                steps = min(steps, running.steps_to_turn())  # type: ignore[assignment]
            if kv.frees and len(self.waiting):  # room that comes free may be for somebody
                steps = min(steps, kv.steps_to_free())
            if self.admission is not None:
                steps = min(steps, self.admission.steps(self))
            plan.repeat = max(int(min(kv.room(), steps)), 1)
        if kv.indexes or self.swapping.untold:
            self._bound(plan, evicted)
        if self.refine_every and num_decode:
            before = self.refine_every - 1 - running.step % self.refine_every
            plan.repeat = max(min(plan.repeat, before), 1)
            plan.probe_rows = () if before else list(running.members)
        return plan

    def refine(self, req: Request, prediction: LengthDistribution) -> None:
        """A request has another prediction now, of its whole length. Mutates it; its key is stored anew."""
        req.prediction = prediction
        self.policy.on_refine(req)
        self._turn(req)

    def _turn(self, req: Request) -> None:
        """Store the key of a request anew."""
        if req._phase == DECODING:
            self.running.turn(req)
        elif req._phase in (WAITING, PAUSED, SWAPPED):
            self.waiting.remove(req)
            self.waiting.push(req, self.policy.key(req, self))

    def _bound(self, plan: Plan, evicted: bool) -> None:
        """What a prefix cache and swap tiers add: copies are told; the plan is good until a lease ends, and is repeated only
        while no copies stand in it, nor a block goes (or has just been `evicted`) that the policy's order may hang on."""
        plan.stable_until = min(plan.stable_until, self.kv.next_expiry)
        if self.swapping.untold or self.kv.copies:
            plan.swaps, plan.copies = self.swapping.tell(), [*self.kv.copies.values()]
            self.kv.copies.clear()
            plan.repeat = 1
        elif plan.repeat > 1 and "cached_len" in self.policy.needs:
            plan.repeat = 1 if evicted else min(plan.repeat, max(self.kv.room(self.kv.free), 1))

    def _admit(self, chunks: dict[Request, Chunk], budget: int) -> bool:
        """Admit or resume in policy order while slots, KV and budget last; take a slot or KV only for a lower key.

        Returns whether somebody yielded. Who lost KV in this plan is not let in again by it, nor anybody behind."""
        policy, waiting, yielding = self.policy, self.waiting, self._yielding
        fixed_batch = self.batching.fixed_batch
        order: Iterator[Request] | None = None
        passed: list[Request] = []  # those that do not fit and are passed over: out of `waiting` until this plan is made
        evicted: dict[Request, None] = {}
        yielded = False
        while budget > 0 or fixed_batch:
            full = self.num_running >= self.max_num_seqs
            if full and not policy.preemptive:
                break  # before it is asked who is first: that may cost O(waiting)
            if order is None and self._custom_order:
                order = policy.order(waiting, self)
            req = next(order, None) if order is not None else waiting.peek()
            if req is None or req in evicted:
                break
            if passed and not all(policy.may_pass(req, other, self) for other in passed):
                break
            if not req._prefilled and not fixed_batch and not self._chunk_len(req, budget):
                break  # what is left of the budget is not enough for its prompt
            slot_victim = None
            if full:
                slot_victim = yielding.last_running()
                if yielding.rule is not None and slot_victim is not None:
                    slot_victim = yielding.slot_victim(req)
                if slot_victim is None or not policy.may_preempt(req, slot_victim, self):
                    break
            victims = yielding.victims(req, slot_victim)
            if (
                victims is None
                or (self._custom_admit and not policy.admit(req, self))
                or (self.admission is not None and not self._may_enter(req, victims))
            ):
                if len(passed) >= policy.backfill:
                    break
                passed.append(req)
                waiting.remove(req)
                continue
            for victim, keeps_kv in victims:
                budget += self._give_back(victim, chunks)
                if keeps_kv:
                    self.pause(victim)
                else:
                    self.give_up(victim)
                    evicted[victim] = None
            self.schedule(req)
            yielding.enters(req)
            if victims:
                yielded = True
                order = None  # those who yielded stand in order again
            if req._phase == DECODING:
                budget -= 1 if self.batching.mixes else 0
            elif budget > 0:
                budget -= self._add_chunk(chunks, req, budget)
        for req in passed:
            waiting.push(req, policy.key(req, self))
        return yielded

    def _may_enter(self, req: Request, victims: list[tuple[Request, bool]]) -> bool:
        assert self.admission is not None
        leaving = [victim for victim, _ in victims if victim._phase != PAUSED]
        return self.num_running == len(leaving) or self.admission.admits(req, self, leaving)

    def _chunk_len(self, req: Request, budget: int) -> int:
        """Tokens of `req` to prefill in this step."""
        tokens = req.prompt_len + req._generated
        left = tokens - req._computed
        if self.kv.indexes and req._phase == WAITING:
            left -= self.kv.cached(req, tokens)
        return self.batching.chunk(left, budget, req._computed <= req._found and not req._generated)

    def _add_chunk(self, chunks: dict[Request, Chunk], req: Request, budget: int) -> int:
        length = self._chunk_len(req, budget)
        if length > 0:
            last = req._computed + length == req.prompt_len + req._generated
            chunks[req] = Chunk(req, req._computed, length, last)
        return length

    def _give_back(self, req: Request, chunks: dict[Request, Chunk]) -> int:
        """Drop what this plan has for `req`; returns the budget that comes back."""
        if req._phase == PAUSED:
            return 0
        if req._phase == DECODING:
            return 1 if self.batching.mixes else 0
        chunk = chunks.pop(req, None)
        return 0 if chunk is None else chunk.length

    # --- book ---------------------------------------------------------------------------------------------------------

    def book(self, plan: Plan, outcome: Outcome) -> None:
        """Settle what came of `plan`. Mutates the queues, the requests and the KV accounting."""
        steps, ends = outcome.num_steps, outcome.ends
        end = ends[-1]
        self.step_time = end - (ends[-2] if steps > 1 else self.now)
        self.now = end
        kv = self.kv
        self.given_back = 0
        if plan.num_decode:
            kv.advance(steps)
            self.running.advance(steps)
            self.given_back = kv.passed
        failing = [req for req, _ in outcome.failures]
        for req, _, length, last in plan.chunks:
            computed = req._computed + length
            if kv.frees or (kv.indexes and req not in failing):  # what has just failed is not kept for others
                self.given_back += kv.enter(req, computed)
            req._computed = computed
            if last:
                self.end_prefill(req, end)
        if self._tells_steps:
            self.policy.on_steps(steps, self)
        for req, num_tokens, _ in outcome.finished:
            self.finish(req)
            if self.admission is not None:
                self.admission.on_finish(req, num_tokens)
            if req._generated != num_tokens:
                raise AssertionError(f"request {req.rid}: executor says {num_tokens} tokens, booked {req._generated}")
            if self.batching.fixed_batch:
                self.num_padding += 1
                self._padding_context += req.prompt_len + req._generated
        for req, why in outcome.failures:
            if not self.abort(req, failed=True):
                raise AssertionError(f"{req!r} cannot fail any more ({why}): it has ended")
        if self.checks:
            check(self, self.max_num_seqs)
