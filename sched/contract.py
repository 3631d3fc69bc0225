"""The contract of a policy, as a check its author can call: `check_policy(MyPolicy)`.

The one idea: small hostile runs (tight memory, few slots, aborts, wrong predictions), compared with runs that must come out
the same. A law that fails is named with the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .batching import Batching, Chunked, Mixed, PrefillFirst, Static
from .kv import Contiguous, KVCache, Paged, Prefix
from .plan import Chunk, Outcome, Plan, Swap
from .policies.fcfs import FCFS
from .policy import INF, Policy
from .ports import Event, EventKind
from .prediction import LengthDistribution
from .preemption import Preemption
from .rehearsal import JumpingClock, Log, PlainExecutor, Script
from .request import Phase, Request
from .scheduler import Scheduler
from .serve import serve


@dataclass(frozen=True)
class Hostile:
    """One small run: limits, and columns of requests. Times in s, lengths in tokens; `abort` is INF where it never comes.
    hash_tokens: tokens of a piece that `hashes` names; 0: nobody's prompt is named."""

    batching: Callable[[], Batching]
    kv: Callable[[], KVCache]
    preemption: Preemption
    max_num_seqs: int
    token_budget: int
    arrival: list[float]
    prompt_len: list[int]
    output_len: list[int]
    prediction: list[LengthDistribution]
    delay: list[float]
    abort: list[float]
    hash_tokens: int = 0
    hashes: Sequence[Sequence[int]] = ()


def hostile(
    rng: np.random.Generator, num: int = 24, *, ample: bool = False, constant: float | None = None, reuse: bool = False
) -> Hostile:
    """Draw a run. ample: memory never binds, nobody aborts. constant: everybody's prediction is this point. reuse: with a
    prefix cache and swap tiers."""
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
    case = Hostile(
        batching=[Chunked, Mixed, PrefillFirst, Static][int(rng.integers(4))],
        kv=paged[int(rng.integers(3))],
        preemption=Preemption(bool(rng.integers(2))),
        max_num_seqs=int(rng.integers(1, 9)),
        token_budget=int(rng.choice([40, 64, 256])),
        arrival=arrival.tolist(),
        prompt_len=prompts.tolist(),
        output_len=outputs.tolist(),
        prediction=guesses,
        delay=np.where(rng.random(num) < 0.2, rng.exponential(0.05, num), 0.0).tolist(),
        abort=np.where((rng.random(num) < 0.15) & (not ample), late, INF).tolist(),
    )
    return case if not reuse else _reusing(rng, case, pool)


def _reusing(rng: np.random.Generator, case: Hostile, pool: int) -> Hostile:
    """The same with a prefix cache that five conversations share, and in most cases with swap tiers."""
    size, watermark = ((4, 0.0), (8, 0.05))[int(rng.integers(2))]
    hashes: list[Sequence[int]] = []
    for i, k in enumerate(rng.integers(0, 5, len(case.arrival)).tolist()):  # two of them name their answers too
        hashes.append(range(100 * k, 100 * k + 100) if k % 2 else [*range(100 * k, 100 * k + 5), 1000 + i])
    tiers = ({}, {"cpu": 64, "disk": 32}, {"cpu": 200})[int(rng.integers(3))]
    preemption = Preemption(case.preemption.keeps_kv, tiers)
    copies = bool(rng.integers(2))
    return replace(
        case, kv=lambda: Prefix(pool, size, watermark, copies), preemption=preemption, hash_tokens=size, hashes=hashes
    )


def rehearse(
    policy: Policy,
    case: Hostile,
    *,
    fast_forward: bool = True,
    output_len: Sequence[int] | None = None,
    watch: Callable[[Scheduler, Plan, Outcome], None] | None = None,
    scheduler: Callable[..., Scheduler] = Scheduler,
    refine_every: int = 0,
) -> tuple[Log, Scheduler]:
    """Run `case` under `policy`, all counts checked at every step. refine_every: decode steps after which those who decode are
    predicted anew, at random. Returns what was logged, and the scheduler at the end."""
    clock, events, predictions = JumpingClock(), [], {}
    for rid, arrival in enumerate(case.arrival):
        req = Request(rid, arrival, case.prompt_len[rid], 60, priority=float(rid % 3), client=f"client {rid % 4}")
        if case.hash_tokens:
            req.block_hashes = case.hashes[rid]
        events.append(Event(arrival, EventKind.ARRIVAL, req))
        predictions[rid] = case.prediction[rid]
        if case.delay[rid]:
            events.append(Event(arrival + case.delay[rid], EventKind.PREDICTION_READY, req))
        else:
            req.prediction = case.prediction[rid]
        if case.abort[rid] < INF:
            events.append(Event(case.abort[rid], EventKind.ABORT, req))
    kv = case.kv()
    if case.hash_tokens:
        kv.use_hashes(case.hash_tokens)
    engine = scheduler(
        policy, case.batching(), kv, case.preemption,
        max_num_seqs=case.max_num_seqs, token_budget=case.token_budget,
        refine_every=refine_every, check=True,
    )  # fmt: skip
    truth = case.output_len if output_len is None else output_len
    executor = PlainExecutor(
        clock, _seconds, truth, fast_forward=fast_forward, hash_tokens=case.hash_tokens, swap_seconds=_copy_seconds
    )
    log = Log(max_steps=200 * sum(case.prompt_len) + 200 * sum(truth), watch=watch)
    _guard(policy, log)
    serve(Script(events, predictions), engine, executor, clock, log, _Anew())
    return log, engine


class _Anew:
    """Says something else of each request at each number of tokens, and nothing of the truth."""

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution]:
        return [LengthDistribution.point(g + 1.0 + (7 * r.rid + 5 * g) % 23) for r, g in zip(requests, generated, strict=True)]


def _guard(policy: Policy, log: Log) -> None:
    """Turn a plan that never ends into an AssertionError: keys are asked for a bounded number of times per plan."""
    key, calls = policy.key, [0, 0]  # of the current plan, number of plans

    def counted(req: Request, view: Any) -> Any:
        calls[0] = calls[0] + 1 if calls[1] == log.num_plans else 0
        calls[1] = log.num_plans
        assert calls[0] < 100_000, f"a plan that does not end: request {req.rid} and others preempt each other for ever"
        return key(req, view)

    policy.key = counted  # type: ignore[method-assign]


def _seconds(rows: int, context: int, chunks: Sequence[Chunk]) -> float:
    return 0.004 + 1e-4 * rows + 1e-6 * context + 2e-5 * sum(c.length for c in chunks)


def _copy_seconds(swaps: Sequence[Swap]) -> float:
    return 1e-4 * sum(copy.num_blocks for copy in swaps)


def check_policy(
    make: Callable[[], Policy],
    *,
    seed: int = 0,
    num_cases: int = 6,
    constant_is_fcfs: bool | None = None,
    scheduler: Callable[..., Scheduler] = Scheduler,
) -> None:
    """Check that the policy `make()` builds keeps the contract. Raises AssertionError naming the law and the case.

    Conservation of requests and KV at every step; `key` pure, and constant while a request waits unless `key_epoch` moves or
    `turned` names it; `may_preempt` never both ways; determinism; fast-forward == single step; non-anticipation; no preemption
    for a slot unless `preemptive`; with equal predictions that nobody outlives, FCFS (constant_is_fcfs; None: where the policy
    needs predictions, and no objectives, step times or clients beside); conservation and fast-forward again with predictions
    that are refined; the overtaking bound, where the policy has `overtaking_horizon(req, view)`. Conservation, fast-forward
    and non-anticipation again with a prefix cache and swap tiers. scheduler: one with other parts, made anew for every run.
    """

    def run(policy: Policy, case: Hostile, **how: Any) -> tuple[Log, Scheduler]:
        return rehearse(policy, case, scheduler=scheduler, **how)

    for i in range(num_cases):
        rng = np.random.default_rng([seed, i])
        case = hostile(rng)
        log, engine = _law("conservation", i, lambda c=case: _whole(run, make(), c))  # type: ignore[misc]
        _same("determinism", i, log, run(make(), case)[0])
        _same("fast-forward == single step", i, log, run(make(), case, fast_forward=False)[0])
        _law("keys", i, lambda c=case: run(make(), c, watch=_KeysHold()))  # type: ignore[misc]
        _law("non-anticipation", i, lambda c=case, g=log, r=rng: _blind(run, make, c, g, r))  # type: ignore[misc]
        if hasattr(engine.policy, "overtaking_horizon"):
            _law("overtaking bound", i, lambda c=case: overtaking(make(), c))  # type: ignore[misc]
        roomy = hostile(rng, ample=True)
        if not engine.policy.preemptive:
            _, after = run(make(), roomy)
            assert not after.num_preemptions, f"not preemptive, but preempted for a slot; case {i}"
        needs = engine.policy.needs
        predicts = bool({"prediction", "distribution"} & needs)
        if constant_is_fcfs or (constant_is_fcfs is None and predicts and not {"slo", "step_time", "client"} & needs):
            even = hostile(rng, ample=True, constant=64.0)
            even = Hostile(**{**vars(even), "delay": [0.0] * len(even.delay)})
            _same("constant prediction == FCFS", i, run(FCFS(), even)[0], run(make(), even)[0])
        if predicts:
            log, _ = _law("conservation, refined", i, lambda c=case: _whole(run, make(), c, 3))  # type: ignore[misc]
            single, _ = run(make(), case, fast_forward=False, refine_every=3)
            _same("fast-forward == single step, refined", i, log, single)
        case = hostile(rng, reuse=True)
        log, _ = _law("conservation with reuse", i, lambda c=case: _whole(run, make(), c))  # type: ignore[misc]
        _same("fast-forward == single step with reuse", i, log, run(make(), case, fast_forward=False)[0])
        _law("non-anticipation with reuse", i, lambda c=case, g=log, r=rng: _blind(run, make, c, g, r))  # type: ignore[misc]


def _law(name: str, case: int, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except AssertionError as error:
        raise AssertionError(f"{name}: case {case}: {error}") from error


def _same(name: str, case: int, one: Log, two: Log) -> None:
    for k, (a, b) in enumerate(zip(one.steps, two.steps, strict=False)):
        assert a == b, f"{name}: case {case}, step {k}: {a} != {b}"
    assert one == two, f"{name}: case {case}: {len(one.steps)} and {len(two.steps)} steps, or other ends"


def _whole(
    run: Callable[..., tuple[Log, Scheduler]], policy: Policy, case: Hostile, refine_every: int = 0
) -> tuple[Log, Scheduler]:
    log, scheduler = run(policy, case, refine_every=refine_every)
    assert len(log.ended_at) == len(case.arrival), "not everybody ended"
    assert not scheduler.kv.in_use, "KV blocks are left over"
    for rid, (num, reason, _) in log.ended_at.items():
        wanted = min(case.output_len[rid], 60)
        assert case.abort[rid] < INF or reason.startswith("rejected") or num == wanted, (rid, num, reason, wanted)
    return log, scheduler


def _blind(
    run: Callable[..., tuple[Log, Scheduler]], make: Callable[[], Policy], case: Hostile, log: Log, rng: np.random.Generator
) -> None:
    """Lengthen one request: every single step that starts before its shorter finish must stay as it was."""
    rid = int(rng.integers(len(case.output_len)))
    longer = list(case.output_len)
    longer[rid] += int(rng.integers(1, 20))
    other, _ = run(make(), case, output_len=longer)
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
        policy, waiting, turned = scheduler.policy, list(scheduler.waiting), scheduler.turned
        epoch = policy.key_epoch(scheduler)
        old = self._keys if epoch == self._epoch else {}
        self._epoch = epoch
        self._keys = {r.rid: (scheduler.generated(r), policy.key(r, scheduler)) for r in waiting}
        for req in waiting:
            generated, key = self._keys[req.rid]
            assert policy.key(req, scheduler) == key, f"key of request {req.rid} differs between two calls"
            before = old.get(req.rid)
            moved = before is not None and before[0] == generated and before[1] != key and req not in turned
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
