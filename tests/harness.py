"""Runs in one call: a Case says everything about a small run, `play` runs it, a Result holds what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.cost import CostModel
from lengthwise.sched import Chunk, Event, EventKind, LengthDistribution, Policy, Preemption, Request, Scheduler, Swap, serve
from lengthwise.sched.batching import Adaptive, Batching, Chunked, Mixed, PrefillFirst, Static
from lengthwise.sched.kv import Contiguous, KVCache, Paged, Prefix
from lengthwise.sched.policies import (
    DRR,
    EDF,
    FCFS,
    HRRN,
    ISRTF,
    LAS,
    LCF,
    LLF,
    LPM,
    LTR,
    MCSF,
    MLFQ,
    PSJF,
    SJF,
    SRPT,
    TIE,
    TRAIL,
    VTC,
    WRR,
    Aging,
    AMin,
    Andes,
    Colocation,
    DeadlineGuard,
    DFSWeight,
    Gittins,
    IdleGuard,
    JITServe,
    OvertakingGuard,
    Priority,
    ResponseRatio,
    Scorpio,
    SoftBoost,
    VTCPredicted,
    Wait,
    WorkGuard,
)  # fmt: skip
from lengthwise.sched.rehearsal import Log, PlainExecutor, Script

INF = float("inf")

CORE: dict[str, Callable[[], Policy]] = {
    "fcfs": FCFS,
    "sjf": SJF,
    "psjf": PSJF,
    "srpt": SRPT,
    "srpt_reestimate": lambda: SRPT("reestimate"),
    "priority": Priority,
    "priority_calm": lambda: Priority(preemptive=False),
    "aging_srpt": lambda: Aging(SRPT(), 40.0),
    "aging_sjf": lambda: Aging(SJF(), 40.0),
}
POLICIES: dict[
    str, Callable[[], Policy]
] = {  # parameters as small as the runs, so that guards, refreshes and gates come into play
    **CORE,
    "ltr": LTR,
    "ltr_guarded": lambda: LTR(7, 3),
    "trail": lambda: TRAIL(0.5),
    "isrtf": lambda: ISRTF(7),
    "hrrn": HRRN,
    "gittins": lambda: Gittins(4),
    "tie": lambda: TIE(batch=2, interval=0.3),
    "soft_boost": lambda: SoftBoost(2.0),
    "las": lambda: LAS(5),
    "mlfq": lambda: MLFQ(0.03, 1.5, 0.01, 2e-4, promote_after=None),  # promoted within a prefill, each would undo the others'
    "edf": lambda: EDF(0.2, 1.0),
    "llf": lambda: LLF(0.2, 0.02, 1.0, margin=0.05),
    "scorpio": lambda: Scorpio(0.3, 2000.0),
    "jitserve": lambda: JITServe(0.2, 0.02, every=7),
    "andes": lambda: Andes(0.2, 0.02, horizon=1.0, token_time=0.02, tight=0.5),
    "mc_sf": MCSF,
    "a_min": AMin,
    "wait": lambda: Wait(3),
    "vtc": VTC,
    "vtc_predicted": lambda: VTCPredicted(window=2),
    "lcf": LCF,
    "drr": lambda: DRR(30.0),
    "wrr": lambda: WRR("priority", {0.0: 3, 2.0: 0.5}),
    "lpm": lambda: LPM(max_waiting=8, shared=8, piece=4),
    "dfs_weight": lambda: DFSWeight(4),
    "response_ratio": lambda: ResponseRatio(max_waiting=8, shared=8, piece=4),
    "colocation": lambda: Colocation(FCFS(), SRPT()),
    "deadline_srpt": lambda: DeadlineGuard(SRPT(), 0.2, 0.01),
    "bounded_srpt": lambda: OvertakingGuard(SRPT(), 3),
    "idle_srpt": lambda: IdleGuard(SRPT(), 0.15, 4),
    "work_srpt": lambda: WorkGuard(SRPT(), 1.0, 20.0),
}
DRAWN = (*CORE, *CORE, *CORE, *POLICIES)  # for the laws of the core: every other run is of a policy that it was built on
PREEMPTIVE = tuple(name for name in POLICIES if POLICIES[name]().preemptive)
BATCHING: dict[str, Callable[[], Batching]] = {
    "chunked": Chunked,
    "mixed": Mixed,
    "prefill_first": PrefillFirst,
    "static": Static,
    "prefill_chunks": lambda: PrefillFirst(chunks=True),
    "adaptive": lambda: Adaptive(0.03, 8e-3, 2.3e-4, 1.7e-5, 6.1e-4, 2),
}
TICK = 1 / 64  # s, exact in binary: arrivals can meet step boundaries exactly


class Pieces(CostModel):
    """Linear in the context, in pieces of 100 tokens, as a table is."""

    def decode_line(self, num_rows: int, context: float) -> tuple[float, float, float]:
        piece = context // 100
        return 7e-3 + 1e-4 * num_rows + 3e-4 * (piece % 3), 1.3e-6 * (1 + piece % 5), 100 * (piece + 1)

    def step(self, num_rows: int, context: float, chunks: Sequence[Chunk]) -> float:
        a, c, _ = self.decode_line(num_rows, context)
        return a + c * context + 6e-5 * sum(chunk.length for chunk in chunks)


COSTS: dict[str, Callable[[], CostModel]] = {
    "tick": lambda: Affine(0.0, 0.0, 0.0, 0.0, decode_base=TICK),  # constant step, free prefill
    "even": lambda: Affine(TICK, TICK / 16, 0.0, TICK / 64),
    "odd": lambda: Affine(8e-3, 2.3e-4, 1.7e-5, 6.1e-5, 3e-8),
    "pieces": Pieces,
}


@dataclass(frozen=True)
class Ask:
    """One request and what befalls it. Times in s (None: never; ready_delay 0: predicted on arrival), lengths in tokens."""

    arrival: float
    prompt_len: int
    output_len: int
    max_new_tokens: int = 4096
    prediction: LengthDistribution | None = None
    priority: float = 0.0
    ready_delay: float = 0.0
    abort_after: float | None = None
    abort_kind: EventKind = EventKind.ABORT
    block_hashes: Sequence[int] | None = None
    client: str | None = None


@dataclass(frozen=True)
class Case:
    """Everything about one run. pool: KV tokens. prefix: a prefix cache, with pieces of hash_tokens tokens (0: nobody's are
    named); copy_on_write: its option. cpu, disk: tokens of swap tiers; None: nobody is swapped."""

    asks: tuple[Ask, ...]
    policy: str = "fcfs"
    batching: str = "chunked"
    paged: bool = True
    prefix: bool = False
    copy_on_write: bool = False
    hash_tokens: int = 0
    cpu: int | None = None
    disk: int = 0
    pool: int = 1 << 20
    block_size: int = 16
    watermark: float = 0.0
    keeps_kv: bool = False
    max_num_seqs: int = 256
    token_budget: int = 2048
    max_model_len: int = 8192
    clip: bool = False
    cost: str | CostModel = "odd"

    def with_lengths(self, output_lens: Sequence[int]) -> Case:
        asks = tuple(replace(a, output_len=n) for a, n in zip(self.asks, output_lens, strict=True))
        return replace(self, asks=asks)

    def requests(self) -> tuple[list[Request], list[Event], dict[int, LengthDistribution]]:
        requests, events, predictions = [], [], {}
        for rid, a in enumerate(self.asks):
            req = Request(
                rid,
                a.arrival,
                a.prompt_len,
                a.max_new_tokens,
                priority=a.priority,
                block_hashes=a.block_hashes,
                client=a.client,
            )
            requests.append(req)
            events.append(Event(a.arrival, EventKind.ARRIVAL, req))
            if a.prediction is not None and a.ready_delay:
                predictions[rid] = a.prediction
                events.append(Event(a.arrival + a.ready_delay, EventKind.PREDICTION_READY, req))
            else:
                req.prediction = a.prediction
            if a.abort_after is not None:
                events.append(Event(a.arrival + a.abort_after, a.abort_kind, req))
        return requests, events, predictions

    def kv(self) -> KVCache:
        if self.prefix:
            kv = Prefix(self.pool, self.block_size, self.watermark, self.copy_on_write)
            if self.hash_tokens:
                kv.use_hashes(self.hash_tokens)
            return kv
        return Paged(self.pool, self.block_size, self.watermark) if self.paged else Contiguous(self.pool, self.watermark)


def copy_seconds(swaps: Sequence[Swap]) -> float:
    return sum(1e-3 * copy.num_blocks for copy in swaps)


@dataclass
class Result:
    log: Log
    scheduler: Scheduler
    requests: list[Request]
    executor: Any
    case: Case

    @property
    def finish(self) -> list[float]:
        """Finish times (s) by rid; nan for those that did not finish."""
        ended = self.log.ended_at
        reasons = ("stop", "length")
        return [ended[r.rid][2] if ended[r.rid][1] in reasons else float("nan") for r in self.requests]


def play(
    case: Case,
    *,
    policy: Policy | None = None,
    fast_forward: bool = True,
    plain: bool = False,
    seconds: Callable[[int, int, Sequence[Chunk]], float] | None = None,
    watch: Callable[..., None] | None = None,
    check: bool = True,
    max_steps: float = INF,
    keep: bool = True,
    scheduler: type[Scheduler] = Scheduler,
    log: Log | None = None,
) -> Result:
    """Run `case` on the simulated executor, or on the PlainExecutor (`plain`; `seconds` gives it other step times). log:
    observes in place of one that `watch`, `max_steps` and `keep` describe."""
    requests, events, predictions = case.requests()
    clock, cost = SimulatedClock(), COSTS[case.cost]() if isinstance(case.cost, str) else case.cost
    truth = [a.output_len for a in case.asks]
    tiers = {} if case.cpu is None else {"cpu": case.cpu, "disk": case.disk}
    engine = scheduler(
        policy or POLICIES[case.policy](), BATCHING[case.batching](), case.kv(), Preemption(case.keeps_kv, tiers),
        max_num_seqs=case.max_num_seqs, token_budget=case.token_budget, max_model_len=case.max_model_len, clip=case.clip,
        check=check,
    )  # fmt: skip
    executor: Any
    if plain:
        executor = PlainExecutor(
            clock, seconds or step_seconds(cost), truth, fast_forward=fast_forward, hash_tokens=case.hash_tokens,
            swap_seconds=copy_seconds,
        )  # fmt: skip
    else:
        executor = SimulatedExecutor(clock, cost, truth, fast_forward=fast_forward, swap_seconds=copy_seconds)
    log = log or Log(max_steps=max_steps, keep=keep, watch=watch)
    serve(Script(events, predictions), engine, executor, clock, log)
    return Result(log, engine, requests, executor, case)


def step_seconds(cost: CostModel) -> Callable[[int, int, Sequence[Chunk]], float]:
    """Seconds of one step, for an executor that knows no fast-forward."""

    def seconds(rows: int, context: int, chunks: Sequence[Chunk]) -> float:
        if chunks:
            return cost.step(rows, context, chunks)
        a, c, _ = cost.decode_line(rows, context)
        return a + c * context

    return seconds
