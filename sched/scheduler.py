"""Scheduler: order, admission, preemption and KV accounting, in Plans and Outcomes only.

It never sees a tensor, a GPU, a wall clock or a true output length. A plan costs O(what changes), never O(batch).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from typing import Any

from .batching import Batching
from .kv import KVCache
from .plan import Chunk, Outcome, Plan
from .policy import INF, Policy
from .preemption import Preemption
from .request import Phase, Request
from .running import Running
from .waiting import Waiting

PENDING, WAITING, PREFILLING, DECODING, PAUSED = (
    Phase.PENDING, Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.PAUSED,
)  # fmt: skip


class Scheduler:
    """One engine's scheduler: `add` requests, `plan` a step, `book` what came of it. It is also the policy's View.

    max_num_seqs: rows that may prefill or decode at once. token_budget: tokens per step, decodes and chunks together.
    max_model_len: prompt + output tokens. clip: shorten max_new_tokens to max_model_len instead of rejecting.
    check: assert all counts at every step.
    """

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
        check: bool = False,
    ) -> None:
        if not 1 <= max_num_seqs <= token_budget:
            raise ValueError(f"max_num_seqs {max_num_seqs} must be from 1 to token_budget {token_budget}")
        self.policy = policy
        self.batching = batching
        self.kv = kv
        self.preemption = preemption
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.clip = clip
        self.checks = check

        self.now = 0.0
        self.step_time = 0.0
        self.running = Running(policy, self)
        self.waiting = Waiting()  # waiting and paused requests, in one order
        self.prefilling: dict[Request, None] = {}  # in order of admission
        self.paused: dict[Request, None] = {}
        self.pending: dict[Request, None] = {}
        self.counts = dict.fromkeys(("injected", "finished", "rejected", "aborted", "failed"), 0)
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.num_padding = 0  # rows of a static batch that have finished, and their context
        self._padding_context = 0
        self._joins: dict[Request, None] = {}
        self._leaves: list[Request] = []
        self._passed: list[Request] = []
        self._epoch = policy.key_epoch(self)
        kind = type(policy)
        self._custom_order = kind.order is not Policy.order
        self._custom_victim = kind.victim is not Policy.victim
        self._custom_admit = kind.admit is not Policy.admit
        self._tells_steps = kind.on_steps is not Policy.on_steps
        self._has_epoch = kind.key_epoch is not Policy.key_epoch
        self._needs_prediction = "prediction" in policy.needs or "distribution" in policy.needs

    # --- what a policy may know (View) --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.running.step

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running.members) + len(self.prefilling)

    @property
    def free_tokens(self) -> int:
        return self.kv.free_tokens

    def generated(self, req: Request) -> int:
        since = req._decode_from
        return req._generated if since < 0 else req._generated + self.running.step - since

    def computed(self, req: Request) -> int:
        since = req._decode_from
        return req._computed if since < 0 else req._computed + self.running.step - since

    def cached_len(self, req: Request) -> int:
        return self.kv.lookup(req)

    def client_running(self, client: str | None) -> int:
        return sum(r.client == client for group in (self.running.members, self.prefilling) for r in group)

    def future_peak(self) -> float:
        """Sort by remaining, longest first: the peak is the greatest (k x remaining_k + KV of the k longest)."""
        rows = []
        for group in (self.running.members, self.prefilling):
            for r in group:
                if r.prediction is None:
                    raise ValueError(f"request {r.rid} has no prediction; future_peak needs one")
                g = self.generated(r)
                rows.append((r.prediction.expected_remaining(g), r.prompt_len + g))
        peak = held = 0.0
        for k, (left, tokens) in enumerate(sorted(rows, reverse=True), 1):
            held += tokens
            peak = max(peak, held + k * left)
        return peak

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, req: Request) -> str | None:
        """Take a request in. Returns None, or why it was rejected at the door, with the numbers.

        Mutates `req` (its phase; with `clip`, its max_new_tokens)."""
        self.counts["injected"] += 1
        req._entry = self.counts["injected"]
        if refusal := self._refusal(req):
            req._phase = Phase.REJECTED
            self.counts["rejected"] += 1
            return refusal
        if self._needs_prediction and req.prediction is None:
            req._phase = PENDING
            self.pending[req] = None
        else:
            self._enqueue(req)
        return None

    def prediction_ready(self, req: Request) -> None:
        """A pending request has its prediction now. A no-op for one that did not wait for it."""
        if req._phase == PENDING and req in self.pending:
            del self.pending[req]
            self._enqueue(req)

    def abort(self, req: Request, failed: bool = False) -> bool:
        """Drop a request in whatever phase, freeing what it holds. False if it had ended already."""
        phase = req._phase
        if phase == PENDING:
            del self.pending[req]
        elif phase == WAITING:
            self.waiting.remove(req)
        elif phase == PAUSED:
            self.waiting.remove(req)
            del self.paused[req]
            self.kv.release(req, self._capacity(req))
        elif phase in (PREFILLING, DECODING):
            self._off_batch(req)
            self.kv.release(req, self._capacity(req))
        else:
            return False
        if phase != PENDING:
            self.policy.on_finish(req)
        req._phase = Phase.FAILED if failed else Phase.ABORTED
        self.counts["failed" if failed else "aborted"] += 1
        return True

    def _enqueue(self, req: Request) -> None:
        req._phase = WAITING
        self.policy.on_arrival(req)
        self.waiting.push(req, self.policy.key(req, self))

    def _refusal(self, req: Request) -> str | None:
        if req.prompt_len < 1 or req.max_new_tokens < 1:
            return f"prompt_len {req.prompt_len} and max_new_tokens {req.max_new_tokens} must be at least 1"
        total = req.prompt_len + req.max_new_tokens
        if total > self.max_model_len:
            if not self.clip or req.prompt_len >= self.max_model_len:
                return (
                    f"prompt {req.prompt_len} + max_new_tokens {req.max_new_tokens} = {total} tokens, "
                    f"max_model_len is {self.max_model_len}"
                )
            req.max_new_tokens = self.max_model_len - req.prompt_len
        if self.batching.whole_prompts and req.prompt_len > self.token_budget:
            return f"prompt {req.prompt_len} tokens, unchunked prefill takes at most token_budget {self.token_budget}"
        need, limit = self.kv.blocks_at_end(req), self.kv.num_blocks - self.kv.watermark_blocks
        if need > limit:
            return (
                f"prompt {req.prompt_len} + max_new_tokens {req.max_new_tokens} - 1 needs {need} KV blocks, the pool has "
                f"{limit} ({self.kv.num_blocks} less the watermark {self.kv.watermark_blocks})"
            )
        return None

    # --- plan ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Is there work that a plan could be about?"""
        return bool(self.running.members or self.prefilling or len(self.waiting))

    def next_wakeup(self) -> float:
        """The time of the next event this scheduler itself has declared (s): when the policy may decide otherwise."""
        until = self.policy.stable(self)[1] if self.busy else INF
        return until if until > self.now else INF

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can run. Mutates the queues; `book` must follow with the outcome."""
        self.now = now
        running, policy, kv = self.running, self.policy, self.kv
        if running.turns:
            running.turn_keys()
        if self._has_epoch and (epoch := policy.key_epoch(self)) != self._epoch:
            self._epoch = epoch
            self.waiting.rekey(lambda r: policy.key(r, self))
            running.rekey()
        evicted = False  # somebody has yielded: who waits may be better off one step later, so the step is not repeated
        while kv.growth() > kv.free:  # make room for the decoders' next token
            self._evict(self._worst_paused() or self._worst_running())
            evicted = True
        if self.num_padding and not self.num_running:
            self.num_padding = self._padding_context = 0

        chunks: list[Chunk] = []
        budget = self.token_budget
        mixes = self.batching.mixes
        if mixes:
            budget -= len(running.members)
        for req in self.prefilling:
            if budget <= 0:
                break
            budget -= self._add_chunk(chunks, req, budget)
        if not evicted and len(self.waiting):
            evicted = self._admit(chunks, budget)

        num_decode = len(running.members) if mixes or not chunks else 0
        if not num_decode and not chunks:
            return None
        joins: list[Request] = []
        if num_decode and self._joins:
            joins, self._joins = list(self._joins), {}
        leaves: list[Request] = []
        if self._leaves:
            leaves, self._leaves = self._leaves, []
        plan = Plan(chunks, joins, leaves, num_decode)
        if num_decode:
            plan.context_tokens = running.context_tokens + self._padding_context
            plan.num_padding = self.num_padding
        steps, plan.stable_until = policy.stable(self)
        if not chunks and not evicted:
            if policy.rekey_decides:
                steps = min(steps, running.steps_to_turn())  # type: ignore[assignment]
            plan.repeat = int(min(kv.room(), steps))
        return plan

    def _add_chunk(self, chunks: list[Chunk], req: Request, budget: int) -> int:
        target = req.prompt_len + req._generated
        left = target - req._computed
        length = self.batching.chunk(left, budget, not req._computed and not req._generated)
        if length > 0:
            chunks.append(Chunk(req, req._computed, length, length == left))
        return length

    def _admit(self, chunks: list[Chunk], budget: int) -> bool:
        """Admit or resume in policy order while slots, KV and budget last; take a slot or KV only for a lower key.

        Returns whether somebody yielded. Who lost KV in this plan is not let in again by it, nor anybody behind."""
        batching = self.batching
        if not batching.may_admit(self):
            return False
        policy, kv, running, waiting = self.policy, self.kv, self.running, self.waiting
        order = policy.order(list(waiting), self) if self._custom_order else None
        passed = self._passed = []  # those that do not fit and are passed over: out of `waiting` until this plan is made
        evicted: list[Request] = []
        yielded = False
        while budget > 0 or batching.fixed_batch:
            req = next(order, None) if order is not None else waiting.peek()
            if req is None or (evicted and req in evicted):
                break
            if passed and not all(policy.may_pass(req, other, self) for other in passed):
                break
            resumes = req._phase == PAUSED
            decodes = resumes and req._prefilled
            if not decodes and not batching.fixed_batch:
                left = req.prompt_len + req._generated - req._computed
                if not batching.chunk(left, budget, not req._computed and not req._generated):
                    break  # what is left of the budget is not enough for its prompt
            full = len(running.members) + len(self.prefilling) >= self.max_num_seqs
            if full and not policy.preemptive:
                break
            slot_victim = self._worst_running() if full else None
            if slot_victim is not None and not policy.may_preempt(req, slot_victim, self):
                break
            victims = self._victims(req, slot_victim)
            if victims is None or (self._custom_admit and not policy.admit(req, self)):
                if len(passed) >= policy.backfill:
                    break
                passed.append(req)
                waiting.remove(req)
                continue
            for victim, keeps_kv in victims:
                budget += self._take_chunk(victim, chunks)
                if keeps_kv:
                    self._pause(victim)
                else:
                    self._evict(victim)
                    evicted.append(victim)
            waiting.remove(req)
            self._note_scheduled(req)
            if victims:
                yielded = True
                if order is not None:  # those who yielded stand in order again
                    order = policy.order(list(waiting), self)
            if resumes:
                del self.paused[req]
            if decodes:
                self._start_decoding(req)
                budget -= 1
                continue
            if not resumes:
                kv.allocate(req, req.prompt_len + req._generated)
            req._phase = PREFILLING
            self.prefilling[req] = None
            if budget > 0:
                budget -= self._add_chunk(chunks, req, budget)
        for req in passed:
            waiting.push(req, policy.key(req, self))
        self._passed = []
        return yielded

    # --- yielding -----------------------------------------------------------------------------------------------------

    def _victims(self, req: Request, slot_victim: Request | None) -> list[tuple[Request, bool]] | None:
        """Who yields so that `req` can run, each with whether its KV stays; None if KV is short all the same. Mutates nothing.

        slot_victim: whose slot it takes, when there is none. Nobody yields who turns out not to be needed."""
        kv, keeps_kv = self.kv, self.preemption.keeps_kv
        short = kv.growth() - kv.free
        if req._phase != PAUSED:
            short += kv.blocks_to_admit(req, req.prompt_len + req._generated) + kv.watermark_blocks
        elif req._prefilled:
            short += self._next_block(req)
        if slot_victim is None:
            if short <= 0:
                return []
        else:
            short -= self._next_block(slot_victim) if keeps_kv else self._freed(slot_victim)
        evicted: list[Request] = []
        if short > 0:
            for victim in self._yielding_to(req, slot_victim):
                evicted.append(victim)
                short -= self._freed(victim) if victim is not slot_victim else self._blocks(victim)
                if short <= 0:
                    break
            else:
                return None
            for victim in evicted[-2::-1]:
                freed = self._freed(victim) if victim is not slot_victim else self._blocks(victim)
                if short + freed <= 0:
                    evicted.remove(victim)
                    short += freed
            if slot_victim is not None and slot_victim not in evicted and any(v._phase != PAUSED for v in evicted):
                freed = self._next_block(slot_victim) if keeps_kv else self._freed(slot_victim)
                if short + freed <= 0:  # the slot of somebody who yields KV anyway will do
                    slot_victim = None
        out = [(victim, False) for victim in evicted]
        if slot_victim is not None and slot_victim not in evicted:
            out.append((slot_victim, keeps_kv))
        return out

    def _yielding_to(self, req: Request, slot_victim: Request | None) -> Iterator[Request]:
        """Who gives up KV for `req`, last in order first: paused requests later in order (`slot_victim` with them, where it
        would keep its KV), then running ones that `req` may preempt."""
        mine = self._rank(req)
        later = [r for r in self.paused if r is not req and r not in self._passed and self._rank(r) > mine]
        if slot_victim is not None and self.preemption.keeps_kv:
            later.append(slot_victim)
        later.sort(key=self._rank, reverse=True)
        yield from later
        if not self.policy.preemptive:
            return
        for victim in self._worst_first():
            if victim is slot_victim:
                continue
            if not self.policy.may_preempt(req, victim, self):
                return
            yield victim

    def _worst_first(self) -> Iterator[Request]:
        """Running requests, the one to preempt first at the head."""
        if self._custom_victim:
            group = [*self.running.members, *self.prefilling]
            while group and (victim := self.policy.victim(group, self)) is not None:
                group.remove(victim)
                yield victim
        elif self.prefilling:
            prefilling = sorted(self.prefilling, key=self._rank, reverse=True)
            yield from merge(self.running.descending(), prefilling, key=self._rank, reverse=True)
        else:
            yield from self.running.descending()

    def _rank(self, req: Request) -> tuple[Any, float, int]:
        return self.policy.key(req, self), req.arrival, req._entry

    def _worst_paused(self) -> Request | None:
        return max(self.paused, key=self._rank, default=None)

    def _worst_running(self) -> Request | None:
        if self._custom_victim:
            return self.policy.victim([*self.running.members, *self.prefilling], self)
        worst = self.running.greatest()
        if self.prefilling:
            group = [*self.prefilling, worst] if worst is not None else list(self.prefilling)
            worst = max(group, key=self._rank)
        return worst

    def _capacity(self, req: Request) -> int:
        """Tokens the blocks of an off-batch or running request have room for."""
        return self.computed(req) if req._prefilled else req.prompt_len + req._generated

    def _blocks(self, req: Request) -> int:
        return self.kv.held(req, self._capacity(req))

    def _next_block(self, req: Request) -> int:
        """Blocks that `req` needs for its next token, if it decodes (or resumes to)."""
        if not req._prefilled:
            return 0
        held = self.computed(req)
        return self.kv.held(req, held + 1) - self.kv.held(req, held)

    def _freed(self, req: Request) -> int:
        """Blocks that evicting `req` brings: what it holds, and what it would have taken in this step."""
        return self._blocks(req) + (self._next_block(req) if req._phase == DECODING else 0)

    def _take_chunk(self, req: Request, chunks: list[Chunk]) -> int:
        """Drop `req`'s chunk from the plan; returns the budget that comes back (a decoding row gives back its token)."""
        if req._phase == DECODING:
            return 1 if self.batching.mixes else 0
        for i, chunk in enumerate(chunks):
            if chunk.request is req:
                del chunks[i]
                return chunk.length
        return 0

    def _pause(self, req: Request) -> None:
        """Take `req` off the batch, its KV kept."""
        self._off_batch(req)
        self._note_preemption(req)
        req._phase = PAUSED
        self.paused[req] = None
        self.waiting.push(req, self.policy.key(req, self))

    def _evict(self, req: Request | None) -> None:
        """Free the KV of a running or paused request; it waits to be computed again, its generated tokens kept."""
        if req is None:
            raise AssertionError("KV is short and nobody holds any")
        if req._phase == PAUSED:
            self.waiting.remove(req)
            del self.paused[req]
        else:
            self._off_batch(req)
            self._note_preemption(req)
        self.kv.release(req, self._capacity(req))
        self.recomputed_tokens += req._computed
        req._recomputed += req._computed
        req._computed = 0
        req._prefilled = False
        req._phase = WAITING
        self.waiting.push(req, self.policy.key(req, self))

    def _note_preemption(self, req: Request) -> None:
        self.num_preemptions += 1
        req._num_preemptions += 1
        if req._resumes is None:
            req._resumes = []
        req._resumes.append(self.now)

    def _note_scheduled(self, req: Request) -> None:
        if req._first_scheduled < 0.0:
            req._first_scheduled = self.now
        elif req._resumes:
            req._resumes.append(self.now)

    def _off_batch(self, req: Request) -> None:
        if req._phase == DECODING:
            self.running.leave(req)
            self.kv.leave(req._computed)
            if req in self._joins:
                del self._joins[req]
            else:
                self._leaves.append(req)
        else:
            del self.prefilling[req]

    def _start_decoding(self, req: Request) -> None:
        req._phase = DECODING
        self.kv.join(req._computed)
        self.running.join(req)
        self._joins[req] = None

    # --- book ---------------------------------------------------------------------------------------------------------

    def book(self, plan: Plan, outcome: Outcome) -> None:
        """Settle what came of `plan`. Mutates the queues, the requests and the KV accounting."""
        steps, ends = outcome.num_steps, outcome.ends
        end = ends[-1]
        self.step_time = end - (ends[-2] if steps > 1 else self.now)
        self.now = end
        if plan.num_decode:
            self.kv.advance(steps)
            self.running.advance(steps)
        for req, _, length, last in plan.chunks:
            req._computed += length
            if last:
                del self.prefilling[req]
                if req._first_token < 0.0:
                    req._first_token = end
                req._generated += 1
                req._prefilled = True
                self._start_decoding(req)
        if self._tells_steps:
            self.policy.on_steps(steps, self)
        for req, num_tokens, _ in outcome.finished:
            self._finish(req, num_tokens)
        for req, _ in outcome.failures:
            self.abort(req, failed=True)
        if self.checks:
            self.check()

    def _finish(self, req: Request, num_tokens: int) -> None:
        joins = self._joins
        running = self.running
        running.leave(req)
        if req in joins:
            del joins[req]
        if req._generated != num_tokens:
            raise AssertionError(f"request {req.rid}: executor says {num_tokens} tokens, booked {req._generated}")
        self.kv.leave(req._computed)
        self.kv.release(req, req._computed)
        if self.batching.fixed_batch:
            self.num_padding += 1
            self._padding_context += req.prompt_len + req._generated
        req._phase = Phase.FINISHED
        self.counts["finished"] += 1
        self.policy.on_finish(req)

    def check(self) -> None:
        """Assert that every count balances: requests by phase, KV blocks, context."""
        groups = (
            (self.pending, PENDING),
            (self.prefilling, PREFILLING),
            (self.paused, PAUSED),
            (self.running.members, DECODING),
        )
        for group, phase in groups:
            wrong = [r for r in group if r._phase != phase]
            if wrong:
                raise AssertionError(f"{wrong[0]} stands among {phase.name}")
        counts = self.counts
        there = len(self.pending) + len(self.waiting) + self.num_running
        ended = counts["finished"] + counts["rejected"] + counts["aborted"] + counts["failed"]
        if counts["injected"] != there + ended:
            raise AssertionError(f"injected {counts['injected']} != present {there} + ended {ended}")
        in_heap = list(self.waiting)
        if len(in_heap) != len(self.waiting) or sum(r._phase == PAUSED for r in in_heap) != len(self.paused):
            raise AssertionError(
                f"waiting holds {len(in_heap)} entries, counted {len(self.waiting)}, paused {len(self.paused)}"
            )
        holders = [r for group in (self.prefilling, self.paused, self.running.members) for r in group]
        self.kv.check((r, self._capacity(r)) for r in holders)
        context = sum(r.prompt_len + self.generated(r) for r in self.running.members)
        if context != self.running.context_tokens:
            raise AssertionError(f"context {self.running.context_tokens} booked, {context} counted")
        if self.num_running > self.max_num_seqs:
            raise AssertionError(f"{self.num_running} rows run, max_num_seqs is {self.max_num_seqs}")
