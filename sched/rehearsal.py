"""A rehearsal: whole runs with nothing but this folder, for tests and for authors of policies.

The one idea: a source that is written down, and an executor with one counter per request, so slow and obvious that what it
disagrees with is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import DEVICE, Chunk, Copy, Finished, Outcome, Plan, Swap
from .policy import INF
from .ports import Event, EventKind
from .prediction import LengthDistribution
from .request import Request, covers_answers
from .scheduler import Scheduler

Seconds = Callable[[int, int, Sequence[Chunk]], float]  # (rows, context tokens, chunks) -> duration of one step


class Script:
    """A Source that plays written events. A request's `predictions` entry, by rid, is attached at PREDICTION_READY."""

    def __init__(self, events: Iterable[Event], predictions: dict[int, LengthDistribution] | None = None) -> None:
        self._events = sorted(events, key=lambda e: e.time)  # stable: ties in file order
        self._predictions = predictions or {}
        self._next = 0

    def peek(self) -> float:
        return self._events[self._next].time if self._next < len(self._events) else INF

    def pop(self, now: float) -> list[Event]:
        first = self._next
        while self.peek() <= now:
            event = self._events[self._next]
            if event.kind == EventKind.PREDICTION_READY:
                event.request.prediction = self._predictions[event.request.rid]
            self._next += 1
        return self._events[first : self._next]

    def on_finish(self, request: Request, now: float) -> None: ...


class JumpingClock:
    """Virtual seconds; going back is an error."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, until: float) -> None:
        self.advance(until)

    def advance(self, to: float) -> None:
        if to < self.now:
            raise AssertionError(f"the clock stands at {self.now} s and was set to {to} s")
        self.now = to


class PlainExecutor:
    """Executes plans with one counter per request, and raises AssertionError where a plan contradicts them.

    output_lens: true output length in tokens by rid. fast_forward: take `plan.repeat` for granted; off, single steps.
    `token_times`: rid -> the time (s) of every token, as a client would see them. hash_tokens: tokens a named piece; a prefill
    may then begin behind pieces that somebody has computed, or at the last token of one that is copied. swap_seconds: seconds
    of a plan's swaps.
    """

    def __init__(
        self,
        clock: JumpingClock,
        seconds: Seconds,
        output_lens: Sequence[int],
        *,
        fast_forward: bool = True,
        hash_tokens: int = 0,
        swap_seconds: Callable[[Sequence[Swap]], float] = lambda swaps: 0.0,
    ) -> None:
        self._clock, self._seconds, self._output_lens, self._fast_forward = clock, seconds, output_lens, fast_forward
        self._hash_tokens, self._swap_seconds = hash_tokens, swap_seconds
        self._pieces: dict[tuple[int, int], None] = {}  # (place, name) of pieces that somebody has computed
        self._swapped: dict[int, tuple[str, int]] = {}  # rid -> tier, blocks
        self._copied: dict[int, None] = {}  # rids that a piece has been copied for
        self.token_times: dict[int, list[float]] = {}
        self._computed: dict[int, int] = {}  # prompt + generated tokens whose KV there is, as far as chunks told
        self._ready: dict[int, None] = {}  # prefilled: may decode
        self._decoding: dict[Request, None] = {}

    def submit(self, plan: Plan) -> Plan:
        return plan

    def collect(self, ticket: Plan, until: float) -> Outcome:
        plan = ticket
        for req in plan.leaves:
            assert req in self._decoding, f"request {req.rid} leaves a decode set it is not in"
            del self._decoding[req]
        self._copy(plan.moves)
        for req in plan.joins:
            assert req not in self._decoding and req.rid in self._ready, f"request {req.rid} joins, but is not ready to"
            self._decoding[req] = None
        self._examine(plan)
        context, finished, ends, now = plan.context_tokens, [], [], self._clock.now  # type: ignore[var-annotated]
        if plan.swaps:
            now += self._swap_seconds(plan.swaps)
        for _ in range(plan.repeat if self._fast_forward else 1):
            now += self._seconds(plan.num_decode + plan.num_padding, context, plan.chunks)
            ends.append(now)
            emitting = [c.request for c in plan.chunks if c.last]
            if plan.num_decode:
                emitting += self._decoding
            for req in emitting:
                self._emit(req, now, finished)
            context += plan.num_decode
            if finished or now >= until:
                break
        return Outcome(len(ends), ends, len(ends) if plan.num_decode else 0, finished)

    def _emit(self, req: Request, now: float, finished: list[Finished]) -> None:
        times = self.token_times.setdefault(req.rid, [])
        times.append(now)
        self._note_pieces(req, req.prompt_len + len(times) - 1)
        truth, cap = self._output_lens[req.rid], req.max_new_tokens
        if len(times) == min(truth, cap):
            self._decoding.pop(req, None)
            del self._ready[req.rid]
            finished.append(Finished(req, len(times), "stop" if truth <= cap else "length"))

    def _examine(self, plan: Plan) -> None:
        assert plan.repeat >= 1 and (plan.repeat == 1 or not plan.chunks), f"repeat {plan.repeat} with {plan.chunks}"
        assert plan.num_decode or plan.chunks, "an empty plan"
        if plan.num_decode:
            assert plan.num_decode == len(self._decoding), f"num_decode {plan.num_decode}, {len(self._decoding)} in the set"
            context = sum(r.prompt_len + len(self.token_times[r.rid]) for r in self._decoding)
            known = plan.context_tokens == context or (plan.num_padding > 0 and plan.context_tokens > context)
            assert known, f"context_tokens {plan.context_tokens}, counted {context}"
        seen = {c.request.rid for c in plan.chunks}
        assert len(seen) == len(plan.chunks), f"two chunks for one request in {plan.chunks}"
        for req, start, length, last in plan.chunks:
            assert req not in self._decoding, f"request {req.rid} decodes and has a chunk"
            assert req.rid not in self._swapped, f"request {req.rid} is swapped out and has a chunk"
            if start == 0:
                self._ready.pop(req.rid, None)
            elif start != self._computed.get(req.rid) or req.rid in self._ready:
                self._ready.pop(req.rid, None)
                self._examine_hit(req, start)
            self._computed[req.rid] = start + length
            self._note_pieces(req, start + length)
            target = req.prompt_len + len(self.token_times.get(req.rid, ()))
            assert length > 0 and start + length <= target and last == (start + length == target), (req, start, length, last)
            if last:
                self._ready[req.rid] = None

    def _note_pieces(self, req: Request, computed: int) -> None:
        for place, name in enumerate(self._names(req, computed)):
            self._pieces[place, name] = None

    def _names(self, req: Request, tokens: int) -> Sequence[int]:
        """Names of the whole pieces of the first `tokens` tokens."""
        if req.block_hashes is None or not self._hash_tokens:
            return ()
        covered = tokens if covers_answers(req.block_hashes) else min(tokens, req.prompt_len)
        return req.block_hashes[: covered // self._hash_tokens]

    def _examine_hit(self, req: Request, start: int) -> None:
        end = start
        if req.rid in self._copied:
            del self._copied[req.rid]
            end += start % self._hash_tokens > 0
        names = self._names(req, end)
        assert end == len(names) * self._hash_tokens > 0, f"a gap before {start} of {req.rid}"
        assert start < req.prompt_len + len(self.token_times.get(req.rid, ())), f"nothing left to compute of {req.rid}"
        missing = [(place, name) for place, name in enumerate(names) if (place, name) not in self._pieces]
        assert not missing, f"pieces {missing} of {req.rid} are taken for cached and were never computed"

    def _copy(self, moves: Sequence[Swap | Copy]) -> None:
        for move in moves:
            if isinstance(move, Copy):
                assert move.num_blocks > 0 and move.request not in self._decoding, f"{move} is of nothing, or of who decodes"
                self._copied[move.request.rid] = None
                continue
            req, num_blocks, source, target, _ = move
            assert (source == DEVICE) != (target == DEVICE), f"request {req.rid} is copied from {source} to {target}"
            if source == DEVICE:
                away = num_blocks > 0 and req.rid not in self._swapped and req not in self._decoding
                assert away, f"request {req.rid} is swapped out already, or decodes still"
                self._swapped[req.rid] = target, num_blocks
            else:
                tier, blocks = self._swapped[req.rid]
                assert source == tier and 0 <= num_blocks <= blocks, f"request {req.rid} lies in {blocks} blocks of {tier}"
                del self._swapped[req.rid]


@dataclass
class Log:
    """An Observer: what was planned, in single steps, and how each request ended.

    steps: (start, end, chunks, joins, leaves, num_decode, num_padding, context_tokens), requests by rid.
    moves: (start, rid, blocks) of every swap and copy. ended_at: rid -> (tokens, reason, time). max_steps: more than these
    raise AssertionError (a livelock). keep: False for long runs, of which only the ends are wanted.
    """

    max_steps: float = INF
    keep: bool = True
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    moves: list[tuple[float, int, int]] = field(default_factory=list)
    ended_at: dict[int, tuple[int, str, float]] = field(default_factory=dict)
    num_plans: int = 0
    num_steps: int = 0
    watch: Callable[[Scheduler, Plan, Outcome], None] | None = None

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None:
        self.num_plans += 1
        self.num_steps += outcome.num_steps
        assert 1 <= outcome.num_steps == len(outcome.ends) <= plan.repeat, (outcome, plan)
        assert self.num_steps <= self.max_steps, f"{self.num_steps} steps and no end: {list(scheduler.waiting)[:3]} wait"
        if self.watch is not None:
            self.watch(scheduler, plan, outcome)
        if self.keep:
            self._write(start, plan, outcome)

    def _write(self, start: float, plan: Plan, outcome: Outcome) -> None:
        chunks = tuple((c.request.rid, c.start, c.length, c.last) for c in plan.chunks)
        changes = tuple(r.rid for r in plan.joins), tuple(r.rid for r in plan.leaves)
        context = plan.context_tokens
        self.moves += [(start, move.request.rid, move.num_blocks) for move in plan.moves]
        for end in outcome.ends:
            self.steps.append((start, end, chunks, *changes, plan.num_decode, plan.num_padding, context))
            start, changes, context = end, ((), ()), context + plan.num_decode

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        assert request.rid not in self.ended_at, f"request {request.rid} ended twice"
        self.ended_at[request.rid] = (num_tokens, reason, now)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Log):
            return False
        return (self.steps, self.moves, self.ended_at) == (other.steps, other.moves, other.ended_at)
