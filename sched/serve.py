"""The step loop, the same for simulation, replay and service."""

from __future__ import annotations

from .plan import Outcome, Plan
from .policy import INF
from .ports import Clock, EventKind, Executor, Observer, Refiner, Source
from .request import Phase
from .scheduler import Scheduler

MAX_IDLE_WAKEUPS = 10_000  # times in a row that a policy may ask to be woken and then start nothing
ENDS = {EventKind.ABORT: "aborted", EventKind.TIMEOUT: "timeout"}


class Stalled(RuntimeError):
    """Work waits, no plan can be made, and no future event is declared."""


def serve(
    source: Source, scheduler: Scheduler, executor: Executor, clock: Clock, observer: Observer, refiner: Refiner | None = None
) -> None:
    """Run until the source has no more events and the scheduler no more work.

    Events with time <= now are taken in order before each plan. refiner: predicts anew those that a plan names in `probe_rows`,
    for a scheduler with refine_every. Raises Stalled, naming the first request in order, when work
    waits that nothing will ever start (or whose policy has declared a next time too often and started nothing).
    """
    idle = 0
    while True:
        now = clock.now
        if source.peek() <= now:
            take_events(source, scheduler, observer, now)
        plan = scheduler.plan(now) if scheduler.busy else None
        if plan is None:
            event, declared = source.peek(), scheduler.next_wakeup()
            idle = idle + 1 if declared < event else 0
            if min(event, declared) < INF and idle < MAX_IDLE_WAKEUPS:
                clock.wait(min(event, declared))
                continue
            if scheduler.busy or scheduler.pending:
                first = scheduler.waiting.peek() or next(iter(scheduler.pending))
                raise Stalled(
                    f"at {now:.6f} s {len(scheduler.waiting)} requests wait and nothing will start them; first in order: "
                    f"{first!r}; {scheduler.kv.in_use} of {scheduler.kv.num_blocks} KV blocks in use"
                )
            return
        idle = 0
        outcome = executor.collect(executor.submit(plan), min(source.peek(), plan.stable_until))
        scheduler.book(plan, outcome)
        end = outcome.ends[-1]
        if plan.probe_rows and refiner is not None:
            refine(scheduler, refiner, plan, outcome)
        clock.advance(end)
        observer.step(now, plan, outcome, scheduler)
        for request, num_tokens, reason in outcome.finished:
            observer.ended(request, num_tokens, reason, end)
            source.on_finish(request, end)
        for request, why in outcome.failures:
            observer.ended(request, scheduler.generated(request), f"failed: {why}", end)
            source.on_finish(request, end)


def refine(scheduler: Scheduler, refiner: Refiner, plan: Plan, outcome: Outcome) -> None:
    """Give those of `plan.probe_rows` that go on decoding the predictions that `refiner` has of them by now."""
    rows = [req for req in plan.probe_rows if req.phase == Phase.DECODING]
    generated = [scheduler.generated(req) for req in rows]
    for req, prediction in zip(rows, refiner.refine(rows, generated, outcome.probes) if rows else (), strict=True):
        if prediction is not None:
            scheduler.refine(req, prediction)


def take_events(source: Source, scheduler: Scheduler, observer: Observer, now: float) -> None:
    """Hand all events with time <= now to the scheduler, in order."""
    scheduler.now = now
    for _, kind, request in source.pop(now):
        if kind == EventKind.ARRIVAL:
            refusal = scheduler.add(request)
            if refusal is not None:
                observer.ended(request, 0, f"rejected: {refusal}", now)
                source.on_finish(request, now)
        elif kind == EventKind.PREDICTION_READY:
            scheduler.prediction_ready(request)
        elif kind in ENDS:
            if scheduler.abort(request):
                observer.ended(request, scheduler.generated(request), ENDS[kind], now)
                source.on_finish(request, now)
        else:
            raise ValueError(f"event {kind.name} of request {request.rid} has no handler in this engine")
