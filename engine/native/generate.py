"""generate: answers to a list of prompts in one call, through the same scheduler and step loop as everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.sched import (
    Batching,
    Event,
    EventKind,
    KVCache,
    Outcome,
    Plan,
    Policy,
    Preemption,
    Request,
    Scheduler,
    pause,
    serve,
)
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS
from lengthwise.sched.rehearsal import Script

from .clock import WallClock
from .door import check_stops, whole_ids
from .engine import NativeEngine
from .executor import NativeExecutor
from .generation import GREEDY
from .logprobs import Logprobs
from .sampling import SamplingParams


@dataclass(frozen=True)
class Answer:
    """Token ids of one answer, why it ended (stop, length, or what went wrong), and logprobs where they were asked for."""

    token_ids: list[int]
    reason: str
    logprobs: list[Logprobs]
    text: str | None = None


class Answers:
    """An Observer that takes what the executor keeps of each request when it ends: `by_rid`."""

    def __init__(self, executor: NativeExecutor) -> None:
        self.by_rid: dict[int, Answer] = {}
        self._executor = executor

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None: ...

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        generation = self._executor.forget(request)
        if generation is None:
            self.by_rid[request.rid] = Answer([], reason, [])
        else:
            text = None if generation.text is None else generation.text.whole
            self.by_rid[request.rid] = Answer(generation.output_ids, reason, generation.logprobs, text)


def generate(
    engine: NativeEngine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    kv: KVCache | None = None,
    policy: Policy | None = None,
    batching: Batching | None = None,
    preemption: Preemption | None = None,
    max_num_seqs: int = 256,
    token_budget: int = 2048,
    answer_lens: Sequence[int] | None = None,
    seed: int = 0,
    texts: bool = False,
) -> list[Answer]:
    """Answers to `prompts` (token ids), in their order, all handed in at once. One max_new_tokens and SamplingParams for all,
    or one each. kv: None for paged memory that just holds all of them. Raises ValueError, before anything runs, for lists of
    other lengths, an empty prompt, ids outside the vocabulary, and stop strings without a tokenizer."""
    n, model = len(prompts), engine.model
    if not n:
        return []
    caps = [max_new_tokens] * n if isinstance(max_new_tokens, int) else list(max_new_tokens)
    params = [sampling] * n if isinstance(sampling, SamplingParams) else list(sampling)
    if not len(caps) == len(params) == n:
        raise ValueError(f"{n} prompts, {len(caps)} max_new_tokens, {len(params)} sampling parameters")
    if answer_lens is not None and len(answer_lens) != n:
        raise ValueError(f"{n} prompts, {len(answer_lens)} answer_lens")
    for i, wanted in enumerate(params):
        check_stops(f"prompt {i}", wanted, model.tokenizer is not None)
    wholes = [whole_ids(f"prompt {i}", ids, model.vocab_size) for i, ids in enumerate(prompts)]
    requests = [
        Request(rid, 0.0, len(ids), cap, prompt_ids=ids) for rid, (ids, cap) in enumerate(zip(wholes, caps, strict=True))
    ]
    if kv is None:
        size = 16
        kv = Paged(size * sum(-(-(r.prompt_len + r.max_new_tokens) // size) for r in requests), size, 0.0)
    scheduler = Scheduler(
        policy or FCFS(), batching or Chunked(), kv, preemption or pause(), max_num_seqs=max_num_seqs,
        token_budget=token_budget, max_model_len=model.max_positions,
    )  # fmt: skip
    clock = WallClock()
    executor = engine.executor(
        kv, clock, sampling=lambda request: params[request.rid], answer_lens=answer_lens, seed=seed,
        max_num_seqs=max_num_seqs, texts=texts,
    )  # fmt: skip
    answers = Answers(executor)
    serve(Script(Event(0.0, EventKind.ARRIVAL, r) for r in requests), scheduler, executor, clock, answers)
    return [answers.by_rid[rid] for rid in range(n)]


def warm_up(engine: NativeEngine, block_size: int) -> None:
    """Run two requests through `engine`, so that nothing is built, loaded or compiled when its first step counts."""
    kv = Paged(8 * block_size + 128, block_size)
    generate(engine, [[1] * 48, [1] * 16], 3, kv=kv, answer_lens=[3, 3], max_num_seqs=4, token_budget=64)
