"""NativeExecutor: runs plans on a real model. It alone knows the tokens, and so when an answer ends.

Every plan is one step. `submit` does what can be done before the tokens are known: copies, input arrays, the forward; `collect`
takes the tokens and says who has finished. With two steps in flight `collect` first launches the step after, where it can be
foreseen (inflight.py), and `submit` finds it under way: plans, outcomes and tokens are the same, but for rounding where kernels
depend on how many rows there are, as one that has ended may still be computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from lengthwise.sched import Clock, Copy, Finished, Outcome, Plan, Request, Swap
from lengthwise.sched.kv import KVCache
from lengthwise.sched.plan import Failure

from .batch import Batch
from .generation import Generation
from .inflight import Ahead, Computed, InFlight
from .model import ServedModel
from .pool import Pool
from .probing import HiddenProbe
from .rows import Rows
from .sampling import Sampled, Sampler
from .swap import SwapStore


class NativeExecutor:
    """Executes plans for one model, KV cache and clock.

    run: the model's forward, or whatever does the same faster. begin: makes the Generation of a request when it is first seen.
    seconds, swap_seconds: times of a step and of its swaps as told, for a clock that jumps (parity with a simulation); None:
    the clock's own. `generations` holds every request that has started; `forget` one when it has ended, for whatever reason.
    probe: of which layer the rows in plan.probe_rows give back their hidden states, those of them that emit a token; None: the
    last. Outcome.probes is {request: (hidden,) fp32}. depth: steps in flight, 1 or 2. always_ahead: whether depth 2 goes ahead
    wherever it can; else, where that pays. host_seconds, num_steps: time spent around the forwards, and how many there were.
    """

    def __init__(
        self,
        model: ServedModel,
        run: Callable[[Batch], Tensor],
        pools: Sequence[Pool],
        kv: KVCache,
        clock: Clock,
        begin: Callable[[Request], Generation],
        *,
        max_num_seqs: int = 256,
        seconds: Callable[[Plan], float] | None = None,
        swap_seconds: Callable[[Sequence[Swap]], float] | None = None,
        probe: HiddenProbe | None = None,
        depth: int = 1,
        always_ahead: bool = False,
    ) -> None:
        if kv.tables is None:
            kv.keep_tables()
        self.generations: dict[Request, Generation] = {}
        self.host_seconds = 0.0
        self.num_steps = 0
        self._model = model
        self._run = run
        self._clock = clock
        self._begin = begin
        self._seconds = seconds
        self._swap_seconds = swap_seconds
        self._probe = probe
        num_groups = 1 + max(spec.group for spec in model.layers)
        self._rows = Rows(kv.groups, kv.block_size, max_num_seqs, model.device, num_groups)
        self._pools = pools
        self._store = SwapStore(pools)
        self._sampler = Sampler(model.vocab_size, model.eos_ids)
        self.depth = depth
        self.ahead = Ahead(self._rows, always_ahead) if depth == 2 else None

    def submit(self, plan: Plan) -> InFlight:
        begun = time.perf_counter()
        for request in plan.leaves:
            self._rows.leave(request)
        step = self._launch(plan) if self.ahead is None else self.ahead.step(plan, self._launch)
        self.host_seconds += time.perf_counter() - begun
        return step

    def collect(self, ticket: InFlight, until: float) -> Outcome:
        """One step, whatever `until` (s) and plan.repeat say. Nobody goes ahead of what is due by now."""
        begun = time.perf_counter()
        if self.ahead is not None and self._clock.now < until:
            self.ahead.go(ticket, self._compute)
        best = self._wait(ticket)
        plan, emitting, computed, _, order = ticket
        finished: list[Finished] = []
        failures: list[Failure] = []
        if computed.logits is not None:
            sampled = self._sampler.sample(computed.logits, emitting, best)
            self._take(plan.num_decode, emitting, sampled, finished, failures)
        probes = None
        if plan.probe_rows and computed.states is not None:
            asked = set(plan.probe_rows)
            at = {g.request: i if order is None else order[i] for i, g in enumerate(emitting) if g.request in asked}
            probes = dict(zip(at, computed.states[list(at.values())].float().cpu().numpy(), strict=True))
        self.num_steps += 1
        end = self._end(plan)
        self.host_seconds += time.perf_counter() - begun
        return Outcome(1, [end], 1 if plan.num_decode else 0, finished, probes, failures)

    def _launch(self, plan: Plan) -> InFlight:
        begun, rows, generations = time.perf_counter(), self._rows, self.generations
        for move in plan.moves:
            if isinstance(move, Copy):
                for pool in self._pools:
                    pool.copy_blocks(move.sources, move.targets)
            else:
                self._store.copy(move)
        for request in plan.joins:
            rows.join(generations[request])
        texts = []
        for chunk in plan.chunks:
            generation = generations.get(chunk.request)
            if generation is None:
                generation = generations[chunk.request] = self._begin(chunk.request)
            texts.append(generation.tokens)
        batch = rows.batch(plan.num_decode, plan.num_padding, plan.chunks, texts)
        emitting = [*rows.members] if plan.num_decode else []
        emitting += [generations[chunk.request] for chunk in plan.chunks if chunk.last]
        return InFlight(plan, emitting, self._compute(batch), begun)

    def _compute(self, batch: Batch, before: InFlight | None = None) -> Computed:
        """before: the step whose tokens, as they lie on the device, the rows of `batch` feed in. Mutates `batch` then."""
        begun = time.perf_counter()
        if before is not None:
            assert before.computed.greatest is not None  # only a step that decodes is gone ahead of
            token_ids = before.computed.greatest.picked(before.order)
            batch.token_ids[: len(token_ids)].copy_(token_ids)
        hidden = self._run(batch)
        logits = self._model.logits(hidden) if len(batch.emit) else None
        self.host_seconds -= time.perf_counter() - begun
        states = hidden if self._probe is None else self._probe.states
        greatest = None if self.ahead is None or logits is None else self._sampler.greatest(logits)
        return Computed(logits, states, greatest)

    def _wait(self, step: InFlight) -> tuple[list[int], dict[int, str]] | None:
        """What the sampler need not find any more, once the device has it."""
        begun = time.perf_counter()
        if self.ahead is None or (greatest := step.computed.greatest) is None:
            return None
        best = greatest.read(step.order)
        self.host_seconds -= time.perf_counter() - begun
        if not step.plan.chunks:
            self.ahead.pace.note_read(step.begun)
        return best

    def _end(self, plan: Plan) -> float:
        end = self._clock.now
        if self._seconds is not None:
            if plan.swaps and self._swap_seconds is not None:
                end += self._swap_seconds(plan.swaps)
            end += self._seconds(plan)
        return end

    def _take(
        self, num_decode: int, emitting: list[Generation], sampled: Sampled, finished: list[Finished], failures: list[Failure]
    ) -> None:
        tokens = sampled.token_ids
        rows: dict[Request, Finished] = {}
        if num_decode:
            self._rows.advance(tokens[:num_decode])
        for i, (generation, token) in enumerate(zip(emitting, tokens, strict=True)):
            request = generation.request
            if i in sampled.failures:
                failures.append(Failure(request, sampled.failures[i]))  # the scheduler takes it off the batch
                continue
            if (entry := sampled.logprobs[i]) is not None:
                generation.logprobs.append(entry)
            reason = generation.take(token)
            if reason is not None:
                end = Finished(request, generation.num_output, reason)
                if i < num_decode:
                    rows[request] = end
                else:
                    finished.append(end)
        for request in self._rows.by_joining(rows):
            finished.append(rows[request])
            self._rows.leave(request)

    def forget(self, request: Request) -> Generation | None:
        """Drop what is kept of a request that has ended; returns it. None if it never started."""
        self._store.drop(request)
        return self.generations.pop(request, None)
