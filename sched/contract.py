"""The contract of a policy, as a check its author can call: `check_policy(MyPolicy)`.

The one idea: small hostile runs (tight memory, few slots, aborts, wrong predictions), executed by an executor that is slow,
obvious and suspicious, and compared with runs that must come out the same. A law that fails is named with the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .batching import Batching, Chunked, Mixed, PrefillFirst, Static
from .kv import Contiguous, KVCache, Paged
from .plan import Chunk, Finished, Outcome, Plan
from .policies.fcfs import FCFS
from .policy import INF, Policy
from .ports import Event, EventKind
from .prediction import LengthDistribution
from .preemption import pause, recompute
from .request import Phase, Request
from .scheduler import Scheduler
from .serve import serve

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
    `token_times`: rid -> the time (s) of every token, as a client would see them.
    """

    def __init__(self, clock: JumpingClock, seconds: Seconds, output_lens: Sequence[int], *, fast_forward: bool = True) -> None:
        self._clock, self._seconds, self._output_lens, self._fast_forward = clock, seconds, output_lens, fast_forward
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
        for req in plan.joins:
            assert req not in self._decoding and req.rid in self._ready, f"request {req.rid} joins, but is not ready to"
            self._decoding[req] = None
        self._examine(plan)
        context, finished, ends, now = plan.context_tokens, [], [], self._clock.now  # type: ignore[var-annotated]
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
            if start == 0:
                self._ready.pop(req.rid, None)
            else:
                assert start == self._computed[req.rid] and req.rid not in self._ready, f"a gap before {start} of {req.rid}"
            self._computed[req.rid] = start + length
            target = req.prompt_len + len(self.token_times.get(req.rid, ()))
            assert length > 0 and start + length <= target and last == (start + length == target), (req, start, length, last)
            if last:
                self._ready[req.rid] = None


@dataclass
class Log:
    """An Observer: what was planned, in single steps, and how each request ended.

    steps: (start, end, chunks, joins, leaves, num_decode, num_padding, context_tokens), requests by rid.
    ended_at: rid -> (tokens, reason, time). max_steps: more than these raise AssertionError (a livelock). keep: False for
    long runs, of which only the ends are wanted.
    """

    max_steps: float = INF
    keep: bool = True
    steps: list[tuple[Any, ...]] = field(default_factory=list)
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
        for end in outcome.ends:
            self.steps.append((start, end, chunks, *changes, plan.num_decode, plan.num_padding, context))
            start, changes, context = end, ((), ()), context + plan.num_decode

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        assert request.rid not in self.ended_at, f"request {request.rid} ended twice"
        self.ended_at[request.rid] = (num_tokens, reason, now)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Log) and self.steps == other.steps and self.ended_at == other.ended_at


@dataclass(frozen=True)
class Hostile:
    """One small run: limits, and columns of requests. Times in s, lengths in tokens; `abort` is INF where it never comes."""

    batching: Callable[[], Batching]
    kv: Callable[[], KVCache]
    keeps_kv: bool
    max_num_seqs: int
    token_budget: int
    arrival: list[float]
    prompt_len: list[int]
    output_len: list[int]
    prediction: list[LengthDistribution]
    delay: list[float]
    abort: list[float]


def hostile(rng: np.random.Generator, num: int = 24, *, ample: bool = False, constant: float | None = None) -> Hostile:
    """Draw a run. ample: memory and slots never bind, nobody aborts. constant: everybody's prediction is this point."""
    prompts, outputs = rng.integers(1, 40, num), rng.geometric(1 / 12, num).clip(1, 60)
    pool = 100_000 if ample else int(rng.integers(112, 320))
    paged = (lambda: Paged(pool, 4, 0.0), lambda: Paged(pool, 16, 0.05), lambda: Contiguous(pool))
    guesses = [LengthDistribution.point(float(np.round(8 * x) / 8)) for x in outputs * rng.lognormal(0, 0.8, num)]
    if rng.random() < 0.3:
        levels = np.array([0.1, 0.5, 0.9])
        guesses = [LengthDistribution.from_quantiles(levels, g.mean() * np.array([0.5, 1.0, 2.0])) for g in guesses]
    if constant is not None:
        guesses = [LengthDistribution.point(constant)] * num
    arrival = np.cumsum(rng.exponential(rng.choice([0.01, 0.05, 0.2]), num))
    late = arrival + rng.exponential(0.3, num)
    return Hostile(
        batching=[Chunked, Mixed, PrefillFirst, Static][int(rng.integers(4))],
        kv=paged[int(rng.integers(3))],
        keeps_kv=bool(rng.integers(2)),
        max_num_seqs=int(rng.integers(1, 9)),
        token_budget=int(rng.choice([40, 64, 256])),
        arrival=arrival.tolist(),
        prompt_len=prompts.tolist(),
        output_len=outputs.tolist(),
        prediction=guesses,
        delay=np.where(rng.random(num) < 0.2, rng.exponential(0.05, num), 0.0).tolist(),
        abort=np.where((rng.random(num) < 0.15) & (not ample), late, INF).tolist(),
    )


def rehearse(
    policy: Policy,
    case: Hostile,
    *,
    fast_forward: bool = True,
    output_len: Sequence[int] | None = None,
    watch: Callable[[Scheduler, Plan, Outcome], None] | None = None,
    scheduler: type[Scheduler] = Scheduler,
) -> tuple[Log, Scheduler]:
    """Run `case` under `policy`, all counts checked at every step. Returns what was logged, and the scheduler at the end."""
    clock, events, predictions = JumpingClock(), [], {}
    for rid, arrival in enumerate(case.arrival):
        req = Request(rid, arrival, case.prompt_len[rid], 60, priority=float(rid % 3), client=f"client {rid % 4}")
        events.append(Event(arrival, EventKind.ARRIVAL, req))
        predictions[rid] = case.prediction[rid]
        if case.delay[rid]:
            events.append(Event(arrival + case.delay[rid], EventKind.PREDICTION_READY, req))
        else:
            req.prediction = case.prediction[rid]
        if case.abort[rid] < INF:
            events.append(Event(case.abort[rid], EventKind.ABORT, req))
    engine = scheduler(
        policy, case.batching(), case.kv(), pause() if case.keeps_kv else recompute(),
        max_num_seqs=case.max_num_seqs, token_budget=case.token_budget, check=True,
    )  # fmt: skip
    truth = case.output_len if output_len is None else output_len
    executor = PlainExecutor(clock, _seconds, truth, fast_forward=fast_forward)
    log = Log(max_steps=200 * sum(case.prompt_len) + 200 * sum(truth), watch=watch)
    _guard(policy, log)
    serve(Script(events, predictions), engine, executor, clock, log)
    return log, engine


def _guard(policy: Policy, log: Log) -> None:
    """Turn a plan that never ends into an AssertionError: keys are asked for a bounded number of times per plan."""
    key, calls = policy.key, [0, 0]  # of the current plan, number of plans

    def counted(req: Request, view: Any) -> Any:
        calls[0] = calls[0] + 1 if calls[1] == log.num_plans else 0
        calls[1] = log.num_plans
        assert calls[0] < 100_000, f"a plan that does not end: request {req.rid} and others preempt each other for ever"
        return key(req, view)

    setattr(policy, "key", counted)  # noqa: B010: a method of this one object


def _seconds(rows: int, context: int, chunks: Sequence[Chunk]) -> float:
    return 0.004 + 1e-4 * rows + 1e-6 * context + 2e-5 * sum(c.length for c in chunks)


def check_policy(
    make: Callable[[], Policy], *, seed: int = 0, num_cases: int = 6, constant_is_fcfs: bool | None = None
) -> None:
    """Check that the policy `make()` builds keeps the contract. Raises AssertionError naming the law and the case.

    Conservation of requests and KV at every step; `key` pure, and constant while a request waits unless `key_epoch` moves;
    `may_preempt` never both ways; determinism; fast-forward == single step; non-anticipation; no preemption for a slot unless
    `preemptive`; with equal predictions that nobody outlives, FCFS (constant_is_fcfs; None: where the policy needs
    predictions); the overtaking bound, where the policy has `overtaking_horizon(req, view)`.
    """
    for i in range(num_cases):
        rng = np.random.default_rng([seed, i])
        case = hostile(rng)
        log, scheduler = _law("conservation", i, lambda c=case: _whole(make(), c))  # type: ignore[misc]
        _same("determinism", i, log, rehearse(make(), case)[0])
        _same("fast-forward == single step", i, log, rehearse(make(), case, fast_forward=False)[0])
        _law("keys", i, lambda c=case: rehearse(make(), c, watch=_KeysHold()))  # type: ignore[misc]
        _law("non-anticipation", i, lambda c=case, g=log, r=rng: _blind(make, c, g, r))  # type: ignore[misc]
        if hasattr(scheduler.policy, "overtaking_horizon"):
            _law("overtaking bound", i, lambda c=case: overtaking(make(), c))  # type: ignore[misc]
        roomy = hostile(rng, ample=True)
        if not scheduler.policy.preemptive:
            _, after = rehearse(make(), roomy)
            assert not after.num_preemptions, f"not preemptive, but preempted for a slot; case {i}"
        needs = scheduler.policy.needs
        if constant_is_fcfs or (constant_is_fcfs is None and {"prediction", "distribution"} & needs):
            even = hostile(rng, ample=True, constant=64.0)
            even = Hostile(**{**vars(even), "delay": [0.0] * len(even.delay)})
            _same("constant prediction == FCFS", i, rehearse(FCFS(), even)[0], rehearse(make(), even)[0])


def _law(name: str, case: int, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except AssertionError as error:
        raise AssertionError(f"{name}: case {case}: {error}") from error


def _same(name: str, case: int, one: Log, two: Log) -> None:
    for k, (a, b) in enumerate(zip(one.steps, two.steps, strict=False)):
        assert a == b, f"{name}: case {case}, step {k}: {a} != {b}"
    assert one == two, f"{name}: case {case}: {len(one.steps)} and {len(two.steps)} steps, or other ends"


def _whole(policy: Policy, case: Hostile) -> tuple[Log, Scheduler]:
    log, scheduler = rehearse(policy, case)
    assert len(log.ended_at) == len(case.arrival), "not everybody ended"
    assert scheduler.kv.free == scheduler.kv.num_blocks, "KV blocks are left over"
    for rid, (num, reason, _) in log.ended_at.items():
        wanted = min(case.output_len[rid], 60)
        assert case.abort[rid] < INF or reason.startswith("rejected") or num == wanted, (rid, num, reason, wanted)
    return log, scheduler


def _blind(make: Callable[[], Policy], case: Hostile, log: Log, rng: np.random.Generator) -> None:
    """Lengthen one request: every single step that starts before its shorter finish must stay as it was."""
    rid = int(rng.integers(len(case.output_len)))
    longer = list(case.output_len)
    longer[rid] += int(rng.integers(1, 20))
    other, _ = rehearse(make(), case, output_len=longer)
    num, reason, finish = log.ended_at[rid]
    until = finish if reason == "stop" and num < 60 else INF
    before = [s for s in log.steps if s[0] < until]
    assert before == other.steps[: len(before)], f"plans before the end of request {rid} at {until} s change with its length"


class _KeysHold:
    """Keys are pure and stand still while a request waits, and nobody may preempt whom may preempt it."""

    def __init__(self) -> None:
        self._keys: dict[int, Any] = {}
        self._epoch: object = None

    def __call__(self, scheduler: Scheduler, plan: Plan, outcome: Outcome) -> None:
        policy, waiting = scheduler.policy, list(scheduler.waiting)
        epoch = policy.key_epoch(scheduler)
        old = self._keys if epoch == self._epoch else {}
        self._epoch = epoch
        self._keys = {r.rid: (scheduler.generated(r), policy.key(r, scheduler)) for r in waiting}
        for req in waiting:
            generated, key = self._keys[req.rid]
            assert policy.key(req, scheduler) == key, f"key of request {req.rid} differs between two calls"
            before = old.get(req.rid)
            moved = before is not None and before[0] == generated and before[1] != key
            assert not moved, f"key of request {req.rid} moved from {before} to {key} while it waited"
        for running in scheduler.running:
            for req in waiting:
                mutual = policy.may_preempt(req, running, scheduler) and policy.may_preempt(running, req, scheduler)
                assert not mutual, f"requests {req.rid} and {running.rid} may preempt each other"


def overtaking(policy: Policy, case: Hostile) -> int:
    """Run `case` and assert the bound that `policy` declares. Returns the number of overtakings."""
    watch = Overtaking()
    rehearse(policy, case, watch=watch, scheduler=watch.scheduler)
    return watch.num


class Overtaking:
    """Asserts a declared overtaking bound: j may be first scheduled or resumed while i, which came before it, is eligible and
    off the batch, only if j arrived before i's horizon, frozen when i became eligible. Run it as `watch`, with its `scheduler`.
    """

    def __init__(self) -> None:
        self.num = 0  # overtakings seen
        self._on_batch: dict[Request, None] = {}
        self._horizon = horizon = dict[int, float]()

        class Freezing(Scheduler):
            def _freeze(self, req: Request) -> None:
                if req.phase == Phase.WAITING and req.rid not in horizon:
                    horizon[req.rid] = self.policy.overtaking_horizon(req, self)  # type: ignore[attr-defined]

            def add(self, req: Request) -> str | None:
                refusal = super().add(req)
                self._freeze(req)
                return refusal

            def prediction_ready(self, req: Request) -> None:
                super().prediction_ready(req)
                self._freeze(req)

        self.scheduler = Freezing

    def __call__(self, scheduler: Scheduler, plan: Plan, outcome: Outcome) -> None:
        now = dict.fromkeys([*scheduler.running, *scheduler.prefilling])
        ran = dict.fromkeys([*now, *(f.request for f in outcome.finished)])
        for j in ran:
            for i in scheduler.waiting if j not in self._on_batch else ():
                if j.arrival > i.arrival:
                    self.num += 1
                    bound = self._horizon[i.rid]
                    assert j.arrival < bound, f"request {j.rid} (arrived {j.arrival}) passed {i.rid} past its bound {bound}"
        self._on_batch = now
