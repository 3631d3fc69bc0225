"""Profile: how long an engine's steps take, over states of the batch drawn at random, and how much of it around the forward.

Scheduler, executor and recorder are the real ones, so that what is timed is what a run does. Only the way there is cut short:
the KV cache takes the beginning of every prompt for cached, so that a state of any context costs no prefill to reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.engine.simulated.kernels import Batch
from lengthwise.engine.simulated.steps import Draw
from lengthwise.sched import INF, Plan, Request, Scheduler
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS
from lengthwise.sched.preemption import recompute

from .recorder import Recorder

Track = Callable[[Sequence[Batch]], Iterable[Batch]]
UNMEASURED = 1  # steps of each state that only fill caches


class Pretended(Paged):
    """Paged KV that says of the first `starts[rid]` tokens of a request that they are cached. What lies there is not theirs,
    but takes as long to attend."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        super().__init__(num_tokens, block_size, 0.0)
        self.indexes = True
        self.starts: dict[int, int] = {}

    def cached(self, req: Request, tokens: int) -> int:
        return self.starts[req.rid]

    def lookup(self, req: Request) -> int:
        return self.starts[req.rid]

    def allocate(self, req: Request, tokens: int) -> int:
        super().allocate(req, tokens)
        return self.starts[req.rid]


@dataclass(frozen=True)
class Timed:
    """States and their median times (N,) in s: total, a whole turn of the step loop; host, the part around the forward.
    num_samples: steps timed for each state; spread: median over states of (p90 - p10) / median of its totals."""

    batches: list[Batch]
    total: NDArray[np.float64]
    host: NDArray[np.float64]
    num_samples: int
    spread: float

    @property
    def forward(self) -> NDArray[np.float64]:
        return np.asarray(self.total - self.host)


def time_steps(
    engine: Any, draw: Draw, *, passes: int = 2, repeats: int = 3, block_size: int = 16, track: Track | None = None
) -> Timed:
    """Time the states of `draw` and the corners of its range on `engine`, each `repeats` times in each of `passes` orders, so
    that a slow minute of the machine falls on all alike. `track` wraps the long loop.

    Raises ValueError when a state does not fit the model or its KV memory.
    """
    batches = [*corners(draw), *draw.batches()]
    longest = max(most_context(batch) for batch in batches) + repeats + UNMEASURED + 2
    if longest > engine.model.max_positions:
        raise ValueError(
            f"{engine.model.name} takes {engine.model.max_positions} tokens, a state to be timed has {longest} in a request"
        )
    room = max(pool_need(batch, block_size, repeats) for batch in batches)
    if room > engine.pool_tokens():
        raise ValueError(f"memory holds {engine.pool_tokens()} tokens of KV, a state to be timed needs {room}")
    bench = Bench(engine, room, max(b.num_rows + len(b.chunks) for b in batches), block_size)
    samples: list[list[tuple[float, float]]] = [[] for _ in batches]
    order = [i for n in range(passes) for i in np.random.default_rng([draw.seed, n]).permutation(len(batches)).tolist()]
    for i, _ in zip(order, track([batches[i] for i in order]) if track else order, strict=True):
        samples[i] += bench.time(batches[i], repeats)
    table = np.array(samples)  # (N, passes * repeats, 2)
    total, host = np.median(table, axis=1).T
    low, high = np.quantile(table[:, :, 0], [0.1, 0.9], axis=1)
    return Timed(batches, total, host, passes * repeats, float(np.median((high - low) / total)))


def corners(draw: Draw) -> list[Batch]:
    """The ends of the range: fewest and most rows at little and at much context, shortest and longest chunk."""
    most = min(draw.context_per_row, draw.context // draw.rows)
    states = [(1, 16), (1, draw.context_per_row), (draw.rows, 16 * draw.rows), (draw.rows, most * draw.rows)]
    decodes = [Batch(rows, context, ()) for rows, context in states]
    return [*decodes, *(Batch(0, 0, ((0, length),)) for length in (16, min(draw.prefill_tokens, draw.context_per_row)))]


def most_context(batch: Batch) -> int:
    return max([*row_contexts(batch), *(start + length for start, length in batch.chunks), 1])


def row_contexts(batch: Batch) -> list[int]:
    """Tokens that each decoding row attends, from half to one and a half of the mean, as rows differ in a run; their sum is
    the batch's, but for what a row must have at least."""
    n = batch.num_rows
    if not n:
        return []
    shares = np.linspace(0.5, 1.5, n) if n > 1 else np.ones(1)
    whole = np.floor(shares * batch.context / n)
    whole[: int(batch.context - whole.sum())] += 1  # the first ones, which are the shortest
    return [max(int(x), 2) for x in whole]


def pool_need(batch: Batch, block_size: int, repeats: int) -> int:
    """Tokens of KV, in whole blocks, that timing `batch` takes."""
    rows = [context + repeats + UNMEASURED + 2 for context in row_contexts(batch)]
    lens = [*rows, *(start + length + 1 for start, length in batch.chunks)]
    return sum(-(-length // block_size) + 1 for length in lens) * block_size


class Turn(NamedTuple):
    """One turn of the step loop in s: total, all of it; of that planning, executor (what it does around the forward) and
    booking, the recorder's included."""

    plan: Plan
    total: float
    planning: float
    executor: float
    booking: float

    @property
    def host(self) -> float:
        """The part around the forward."""
        return self.planning + self.executor + self.booking


class Bench:
    """An engine with scheduler, executor and recorder of its own, one state at a time."""

    def __init__(self, engine: Any, num_tokens: int, max_num_seqs: int, block_size: int) -> None:
        from lengthwise.engine.native.clock import WallClock

        self._kv = Pretended(num_tokens, block_size)
        self._scheduler = Scheduler(
            FCFS(), Chunked(), self._kv, recompute(), max_num_seqs=max_num_seqs, token_budget=1 << 30, max_model_len=1 << 30
        )
        self._clock, self._recorder = WallClock(), Recorder()
        self._answer_lens: dict[int, int] = {}
        self._executor = engine.executor(  # a step alone is timed: depth 1
            self._kv, self._clock, answer_lens=self._answer_lens, max_num_seqs=max_num_seqs, depth=1
        )
        self._vocab_size = engine.model.vocab_size
        self._num_born = 0

    def time(self, batch: Batch, repeats: int) -> list[tuple[float, float]]:
        """(whole turn, part of it around the forward) in s, `repeats` times, of steps that compute `batch`."""
        return [(turn.total, turn.host) for turn in self.turns(batch, repeats)]

    def turns(self, batch: Batch, repeats: int) -> list[Turn]:
        """`repeats` steps that compute `batch`; contexts of decoding rows grow by a token with each."""
        rows = [self._ask(context - 1, context - 2, UNMEASURED + repeats + 8) for context in row_contexts(batch)]
        if rows:
            self._turn()  # the last token of each prompt: from here on they decode
        out = []
        for n in range(UNMEASURED + repeats):
            for start, length in batch.chunks:
                self._ask(start + length, start, 1)
            turn = self._turn()
            plan = turn.plan
            if plan.num_decode != batch.num_rows or [(c.start, c.length) for c in plan.chunks] != list(batch.chunks):
                raise RuntimeError(f"the plan is not the state that was to be timed: {batch}")
            if n >= UNMEASURED:
                out.append(turn)
        for request in rows:
            self._scheduler.abort(request)
            self._ended(request)
        return out

    def _ask(self, prompt_len: int, start: int, answer_len: int) -> Request:
        rid = self._num_born
        self._num_born += 1
        self._kv.starts[rid], self._answer_lens[rid] = start, answer_len
        ids = np.random.default_rng([rid]).integers(0, self._vocab_size, prompt_len).tolist()
        request = Request(rid, self._clock.now, prompt_len, answer_len + 1, prompt_ids=ids)
        refusal = self._scheduler.add(request)
        if refusal:
            raise RuntimeError(f"a state to be timed does not fit: {refusal}")
        return request

    def _turn(self) -> Turn:
        scheduler, executor, clock = self._scheduler, self._executor, self._clock
        begun = time.perf_counter()
        now, own = clock.now, executor.host_seconds
        plan = scheduler.plan(now)
        assert plan is not None
        planned = time.perf_counter()
        outcome = executor.collect(executor.submit(plan), INF)
        done = time.perf_counter()
        scheduler.book(plan, outcome)
        self._recorder.step(now, plan, outcome, scheduler)
        for request, *_ in outcome.finished:
            self._ended(request)
        end = time.perf_counter()
        return Turn(plan, end - begun, planned - begun, executor.host_seconds - own, end - done)

    def _ended(self, request: Request) -> None:
        self._executor.forget(request)
        del self._kv.starts[request.rid], self._answer_lens[request.rid]


def described(timed: Timed) -> Mapping[str, Any]:
    """What was timed, in numbers."""
    return {
        "states": len(timed.batches), "steps_each": timed.num_samples, "spread": round(timed.spread, 4),
        "host_share": round(float((timed.host / timed.total).mean()), 4),
    }  # fmt: skip
