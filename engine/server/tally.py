"""Tally: what is counted of a live engine, in plain numbers that cost microseconds a step.

Rows that decode all get their token at once, so that a step adds one gap for all of them; what differs is added apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lengthwise.sched import Outcome, Phase, Plan, Request, Scheduler

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
)
MOMENTS = (1e-5, 2.5e-5, 5e-5, *(x / 10 for x in SECONDS[:9]))  # s
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
RATIOS = (0.05, 0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0, 20.0)
FINISHED = {
    "stop": "stop",
    "length": "length",
    "aborted": "abort",
    "timeout": "timeout",
    "failed": "error",
    "rejected": "error",
}


class Histogram:
    """Counts by upper bound; the last holds what is above all of them."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def num(self) -> int:
        return sum(self.counts)


class Tally:
    """Counts of one engine, written by the step loop's thread alone, but for `num_full` and `num_invalid`, refused before it,
    and for what ends by the fault that ended the step loop: the event loop's thread counts that, when no other writes.

    starved_after: s; who waits longer until it is first scheduled, or gives up, has starved. Latencies and lengths are of
    requests that finish (stop or length), waits of all that end. Predicted lengths are compared, capped at max_new_tokens, with
    the answers that their own end has stopped.
    """

    def __init__(self, starved_after: float = 30.0) -> None:
        self.starved_after = starved_after
        self.prompt_tokens = self.generation_tokens = self.queried_tokens = 0
        self.num_starved = self.num_full = self.num_invalid = 0
        self.reasons = dict.fromkeys(sorted(set(FINISHED.values())), 0)
        self.iteration_tokens = Histogram(TOKENS)
        self.ttft, self.e2e, self.queue, self.prefill, self.decode, self.inference, self.wait = (
            Histogram(SECONDS) for _ in range(7)
        )
        self.itl, self.tpot = Histogram(SECONDS), Histogram(SECONDS)
        self.prompt_len, self.output_len, self.max_new_tokens, self.num_answers = (Histogram(TOKENS) for _ in range(4))
        self.predicted_ratio, self.predicted_error = Histogram(RATIOS), Histogram(TOKENS)
        self.scheduling = Histogram(MOMENTS)
        self._decode_end = 0.0  # s, of the last step with decodes
        self._last_token: dict[Request, float] = {}  # of those that were taken off the batch

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None:
        """One step, already booked."""
        end, num_decode = outcome.ends[-1], plan.num_decode
        failed = {request for request, _ in outcome.failures}
        prefilled = emitted = 0
        for request in plan.leaves:
            if request.phase < Phase.FINISHED:
                self._last_token[request] = self._decode_end
        for request, _, length, last in plan.chunks:
            prefilled += length
            if request._first_scheduled == start and scheduler.kv.indexes:
                self.queried_tokens += request.prompt_len
            if not last:
                continue
            if request in failed:
                failed.remove(request)
            elif request._first_token == end:
                emitted += 1
                self.prompt_tokens += request.prompt_len
                self.ttft.add(end - request.arrival)
            else:  # computed again: not its first token
                emitted += 1
                self.itl.add(end - self._last_token.get(request, request._first_token))
                self._last_token[request] = end
        if num_decode:
            stayed = num_decode - len(failed)  # those of decoding rows are left
            for request in plan.joins:
                if request not in failed:
                    stayed -= 1
                    self.itl.add(end - self._last_token.pop(request, request._first_token))
            self.itl.add(end - self._decode_end, stayed)
            self._decode_end = end
        self.generation_tokens += emitted + num_decode - len(failed)
        self.iteration_tokens.add(prefilled + num_decode)

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        self._last_token.pop(request, None)
        arrival, scheduled, first = request.arrival, request._first_scheduled, request._first_token
        self.reasons[FINISHED[reason.split(":", 1)[0]]] += 1
        wait = (now if scheduled < 0.0 else scheduled) - arrival
        self.wait.add(wait)
        self.num_starved += wait > self.starved_after
        if reason not in ("stop", "length"):
            return
        self.e2e.add(now - arrival)
        self.queue.add(wait)
        self.prefill.add(first - scheduled)
        self.decode.add(now - first)
        self.inference.add(now - scheduled)
        if num_tokens > 1:
            self.tpot.add((now - first) / (num_tokens - 1))
        self.prompt_len.add(request.prompt_len)
        self.output_len.add(num_tokens)
        self.max_new_tokens.add(request.max_new_tokens)
        self.num_answers.add(1)
        prediction = request.prediction
        if reason == "stop" and prediction is not None and not prediction.is_rank_only:
            predicted = min(prediction.mean(), request.max_new_tokens)
            self.predicted_ratio.add(num_tokens / max(predicted, 1.0))
            self.predicted_error.add(abs(num_tokens - predicted))
