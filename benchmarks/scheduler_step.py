"""CPU time of one plan + book on pure decode steps, with 16 to 1,024 rows running and 10,000 requests waiting.

`sim_plan_book_us_N` is the worse of FCFS and SRPT at N rows, each call one step (repeat forced to 1). It should be flat in N.
"""

from __future__ import annotations

import time

import numpy as np
from report import arguments, report

from lengthwise.sched import LengthDistribution, Outcome, Policy, Request, Scheduler
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, SRPT
from lengthwise.sched.preemption import pause

WAITING = 10_000


def decoding(policy: Policy, rows: int) -> Scheduler:
    """A scheduler with `rows` requests decoding and 10,000 waiting."""
    rng = np.random.default_rng(0)
    scheduler = Scheduler(
        policy, Chunked(), Paged(100_000_000), pause(), max_num_seqs=rows, token_budget=1 << 24, max_model_len=1 << 20
    )
    for rid, (prompt, output) in enumerate(rng.integers(100, 2000, (rows + WAITING, 2))):
        prediction = LengthDistribution.point(float(output) + (100_000.0 if rid < rows else 1_000_000.0))
        scheduler.add(Request(rid, 0.0, int(prompt), 200_000, prediction=prediction))
    plan = scheduler.plan(0.0)
    assert plan is not None and len(plan.chunks) == rows
    scheduler.book(plan, Outcome(1, [0.01], 0))
    return scheduler


def microseconds(scheduler: Scheduler, calls: int) -> float:
    now = scheduler.now
    start = time.process_time()
    for _ in range(calls):
        plan = scheduler.plan(now)
        now += 0.01
        scheduler.book(plan, Outcome(1, [now], 1))  # type: ignore[arg-type]
    return (time.process_time() - start) / calls * 1e6


def main() -> None:
    args = arguments(__doc__ or "", repeats=7, calls=3000)
    samples: dict[str, list[float]] = {}
    for rows in (16, 64, 256, 1024):
        both = [decoding(FCFS(), rows), decoding(SRPT(), rows)]
        worse = [max(microseconds(s, args.calls) for s in both) for _ in range(args.repeats)]
        assert all(s.num_running == rows and s.num_waiting == WAITING for s in both)
        samples[f"sim_plan_book_us_{rows}"] = worse
    report(samples, args.json)


if __name__ == "__main__":
    main()
