"""Runs of a Case on the native engine: a tiny model, told step times, so that a simulation of the same case must plan alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from harness import BATCHING, COSTS, POLICIES, Case, Result, copy_seconds, play, step_seconds

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.executor import NativeExecutor
from lengthwise.engine.native.model import ServedModel
from lengthwise.engine.native.sampling import Sampled, Sampler
from lengthwise.engine.native.tiny import tiny, tiny_model
from lengthwise.engine.simulated import SimulatedClock
from lengthwise.sched import Phase, Plan, Policy, Preemption, Request, Scheduler, serve
from lengthwise.sched.kv import KVCache
from lengthwise.sched.rehearsal import Log, Script
from lengthwise.sched.victims import VictimRule


class Answers(Log):
    """A Log that also takes what an executor keeps of each request when it ends: rid -> prompt and answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.executor: Any = None
        self.tokens: dict[int, list[int]] = {}

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        super().ended(request, num_tokens, reason, now)
        generation = self.executor.forget(request)
        if generation is not None:
            assert generation.num_output == num_tokens - reason.startswith("failed")  # the token that failed is booked
            self.tokens[request.rid] = generation.tokens


class Spoiling(Sampler):
    """Spoils the logits of each row of which `when` says so, so that it fails."""

    def __init__(self, vocab_size: int, when: Callable[[Any], bool], eos_ids: Collection[int] = ()) -> None:
        super().__init__(vocab_size, eos_ids)
        self.when = when

    def sample(self, logits: torch.Tensor, rows: Sequence[Any], best: Any = None) -> Sampled:
        logits = logits.clone()
        for i, row in enumerate(rows):
            if self.when(row):
                logits[i] = float("nan")
        return super().sample(logits, rows)


@lru_cache(maxsize=32)
def served(family: str = "llama", **options: Any) -> ServedModel:
    return tiny(family, **options)


@lru_cache(maxsize=32)
def plain(family: str = "llama", **options: Any) -> torch.nn.Module:
    """The same model as its library runs it."""
    return tiny_model(family, **options)


def prompt_ids(case: Case, rid: int, vocab_size: int) -> list[int]:
    """Ids of a prompt: of each named piece by its place and name, of the rest by the request."""
    ask, piece, out = case.asks[rid], case.hash_tokens, []
    names = () if ask.block_hashes is None or not piece else ask.block_hashes[: ask.prompt_len // piece]
    for place, name in enumerate(names):
        out += np.random.default_rng([place, name]).integers(0, vocab_size, piece).tolist()
    rest = np.random.default_rng([7, rid, len(case.asks)]).integers(0, vocab_size, ask.prompt_len - len(out)).tolist()
    return out + rest


def only_prompts(case: Case) -> Case:
    """`case` with names for prompts only: names by place would cover answers, which the model makes up itself."""
    asks = tuple(
        a if a.block_hashes is None else replace(a, block_hashes=list(a.block_hashes[: a.prompt_len // case.hash_tokens]))
        for a in case.asks
    )
    return replace(case, asks=asks)


def play_native(
    case: Case,
    model: ServedModel,
    *,
    policy: Policy | None = None,
    victim: VictimRule | None = None,
    attention: str = "torch",
    check: bool = True,
    prepare: Callable[[NativeExecutor, KVCache], None] | None = None,
    asked: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Result:
    """Run `case` on the native engine; the step times are those of its cost model, and `log` is of Answers. prepare: changes
    the executor before it runs. asked: what the executor is asked for otherwise."""
    requests, events, predictions = case.requests()
    for req in requests:
        req.prompt_ids = prompt_ids(case, req.rid, model.vocab_size)
    clock, cost = SimulatedClock(), COSTS[case.cost]() if isinstance(case.cost, str) else case.cost
    seconds = told(step_seconds(cost))
    tiers = {} if case.cpu is None else {"cpu": case.cpu, "disk": case.disk}
    scheduler = Scheduler(
        policy or POLICIES[case.policy](), BATCHING[case.batching](), case.kv(), Preemption(case.keeps_kv, tiers),
        max_num_seqs=case.max_num_seqs, token_budget=case.token_budget, max_model_len=case.max_model_len, clip=case.clip,
        check=check, victim=victim,
    )  # fmt: skip
    scheduler.kv.keep_tables()
    options = {"answer_lens": [a.output_len for a in case.asks], "seconds": seconds, "swap_seconds": copy_seconds}
    executor = NativeEngine(model, attention=attention, **engine).executor(scheduler.kv, clock, **{**options, **(asked or {})})
    if prepare is not None:
        prepare(executor, scheduler.kv)
    log = Answers()
    log.executor = executor
    serve(Script(events, predictions), scheduler, executor, clock, log)
    assert_clean(executor, scheduler)
    return Result(log, scheduler, requests, executor, case)


def assert_clean(executor: NativeExecutor, scheduler: Scheduler) -> None:
    """All blocks are back, and nothing is kept of requests that have ended."""
    kv, folder = scheduler.kv, executor._store._folder
    assert not executor.generations and not len(executor._store) and not (folder and any(folder.iterdir()))
    assert all(g.request.phase > Phase.FINISHED for g in executor._rows.members)  # aborted after the last plan: none told it
    assert kv.tables is not None and len(kv.tables.free) == kv.free == kv.num_blocks - kv.evictable


def both(
    case: Case,
    family: str = "llama",
    *,
    policy: Callable[[], Policy] | None = None,
    victim: Callable[[], VictimRule] | None = None,
    **options: Any,
) -> Result:
    """Run `case` on both engines, told the same step times. They must plan alike, and every answer must be greedy."""
    rule = victim and victim()
    real = play_native(case, served(family), policy=policy and policy(), victim=rule, **options)
    simulated = play(case, fast_forward=False, policy=policy and policy(), scheduler=partial(Scheduler, victim=rule)).log
    assert real.log.steps == simulated.steps
    assert real.log.moves == simulated.moves
    assert real.log.ended_at == simulated.ended_at and [*real.log.ended_at] == [*simulated.ended_at]
    assert_greedy(family, real.log)
    return real


def told(step: Callable[..., float]) -> Callable[[Plan], float]:
    """Seconds of a plan's step."""

    def seconds(plan: Plan) -> float:
        return step(plan.num_decode + plan.num_padding, plan.context_tokens, plan.chunks)

    return seconds


@torch.no_grad()
def assert_greedy(family: str, log: Any) -> None:
    """Every token of every answer is the greatest logit of the model's own forward over all that stands before it."""
    model = plain(family)
    for rid, tokens in log.tokens.items():
        num = log.ended_at[rid][0]
        if num:
            logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -num:]
            assert logits.argmax(-1).tolist() == tokens[-num:], f"request {rid}"
