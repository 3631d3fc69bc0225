"""SimulatedExecutor: runs plans on a cost model. It alone knows the true output lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np

from lengthwise.sched import INF, Chunk, Finished, Outcome, Phase, Plan, Request, Swap

from .clock import SimulatedClock
from .cost import CostModel


class SimulatedExecutor:
    """Executes plans in virtual time; true lengths are looked up by rid.

    output_lens: true output length in tokens of request rid, EOS included; each at least 1.
    fast_forward: run up to `plan.repeat` steps per plan. Off, every outcome is a single step; results are the same bits.
    swap_seconds: seconds of the copies of one plan, which come before its step (Hardware.swap_seconds); a plan with swaps is
    refused without it. Copies on the device cost nothing here: KV of 512 tokens of an 8B model in bf16 is 64 MiB, to read and
    write it takes an H100 some 40 microseconds.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        cost: CostModel,
        output_lens: Sequence[int],
        *,
        fast_forward: bool = True,
        swap_seconds: Callable[[Sequence[Swap]], float] | None = None,
    ) -> None:
        if len(output_lens) and min(output_lens) < 1:
            rid = int(np.argmin(np.asarray(output_lens)))
            raise ValueError(f"true output length of request {rid} is {output_lens[rid]}, the least is 1")
        self._clock = clock
        self._cost = cost
        self._output_lens = output_lens
        self._fast_forward = fast_forward
        self._swap_seconds = swap_seconds
        self._step = 0  # decode steps taken
        self._left: dict[int, int] = {}  # rid -> decode steps to its finish, while off the decode set
        self._finish_at: dict[int, int] = {}  # rid -> decode step of its finish, while on it
        self._heap: list[tuple[int, int, int, Request]] = []  # (finish step, order of joining, rid, request)
        self._num_joins = 0

    def submit(self, plan: Plan) -> Plan:
        return plan

    def collect(self, ticket: Plan, until: float) -> Outcome:
        """Ends at the first finish, after `repeat` steps, or at the first step boundary at or after `until` (s)."""
        plan = ticket
        finish_at, heap, step = self._finish_at, self._heap, self._step
        for req in plan.leaves:
            left = finish_at.pop(req.rid) - step
            if req.phase < Phase.FINISHED:  # else it is gone for good
                self._left[req.rid] = left
        for req in plan.joins:
            rid = req.rid
            at = finish_at[rid] = step + self._left.pop(rid)
            self._num_joins += 1
            heappush(heap, (at, self._num_joins, rid, req))
        while heap and finish_at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        rows = plan.num_decode + plan.num_padding
        finished: list[Finished] = []
        start = self._clock.now
        if plan.swaps:
            if self._swap_seconds is None:
                raise ValueError(f"{plan.swaps[0]} has no price: give this executor `swap_seconds`")
            start += self._swap_seconds(plan.swaps)
        if plan.chunks:
            ends = [start + self._cost.step(rows, plan.context_tokens, plan.chunks)]
            num_steps = 1
            for chunk in plan.chunks:
                if chunk.last:
                    self._end_prefill(chunk, finished)
        else:
            num_steps = min(plan.repeat, heap[0][0] - step) if self._fast_forward else 1
            ends = self._decode(start, rows, plan.num_decode, plan.context_tokens, num_steps, until)
            num_steps = len(ends)
        if plan.num_decode:
            step = self._step = step + num_steps
            while heap and heap[0][0] <= step:
                at, _, rid, req = heappop(heap)
                if finish_at.get(rid) == at:
                    del finish_at[rid]
                    finished.append(self._finished(req))
        return Outcome(num_steps, ends, num_steps if plan.num_decode else 0, finished)

    def _decode(self, t: float, rows: int, growth: int, context: int, num_steps: int, until: float) -> list[float]:
        """End times of up to `num_steps` pure decode steps from `t` (s) on, each attending `growth` tokens more than before."""
        ends: list[float] = []
        while num_steps > len(ends) and (not ends or t < until):
            a, c, limit = self._cost.decode_line(rows, context)
            first = a + c * context
            piece = num_steps - len(ends)
            if limit < INF:
                piece = min(piece, max(1, -int(-(limit - context) // growth)))
            if until < INF and first * piece > until - t:  # steps only get longer: no more than this many can be needed
                piece = min(piece, max(1, int((until - t) / first) + 1))
            terms = [a + c * s for s in range(context, context + growth * piece, growth)]
            terms[0] += t
            sums = list(accumulate(terms))  # left to right, as k single steps would add
            while len(sums) > 1 and sums[-2] >= until:
                sums.pop()
            ends = ends + sums if ends else sums
            t = sums[-1]
            context += growth * len(sums)
        return ends

    def _end_prefill(self, chunk: Chunk, finished: list[Finished]) -> None:
        req = chunk.request
        if not 0 <= req.rid < len(self._output_lens):
            raise ValueError(f"request {req.rid} has no true length: the executor was given {len(self._output_lens)}")
        emitted = chunk.start + chunk.length - req.prompt_len + 1  # the last chunk of prompt + n emits token n + 1
        left = min(self._output_lens[req.rid], req.max_new_tokens) - emitted
        if left <= 0:
            finished.append(self._finished(req))
        else:
            self._left[req.rid] = left

    def _finished(self, req: Request) -> Finished:
        truth, cap = self._output_lens[req.rid], req.max_new_tokens
        return Finished(req, min(truth, cap), "stop" if truth <= cap else "length")
