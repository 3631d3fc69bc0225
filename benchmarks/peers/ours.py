"""Ours: NativeEngine behind the scheduler, FCFS, chunked prefill, paged KV, no prefix cache.

`ours_eager` and `ours_compiled` have bf16 weights, `ours_int8` and `ours_int8_compiled` 8-bit ones.
"""

from __future__ import annotations

from typing import Any

import job as protocol
import torch

from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import Answers
from lengthwise.engine.native.loading import load_model
from lengthwise.sched import Event, EventKind, Request, Scheduler, pause, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS
from lengthwise.sched.rehearsal import Script

BLOCK = 16


def build(job: dict[str, Any]) -> NativeEngine:
    model = load_model(job["model"], dtype=job["dtype"], verify=False, tokenizer=False)
    system = job["system"]
    linears = "int8" if "int8" in system else "auto"
    return NativeEngine(model, threads=protocol.threads(job), linears=linears, compiled=system.endswith("compiled"))


class Ours:
    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(protocol.threads(job))
        self.engine = build(job)
        self.weight_bytes = self.engine.model.weight_bytes
        self.answer_lens: dict[int, int] = {}
        self.executor: Any = None

    def prepare(self, point: protocol.Point) -> None:
        """KV memory for `concurrency` of the longest requests, empty."""
        blocks = point.concurrency * -(-(point.longest + 1) // BLOCK)
        self.kv, self.clock, self.concurrency = Paged(blocks * BLOCK, BLOCK, 0.0), WallClock(), point.concurrency
        self.executor = self.engine.executor(self.kv, self.clock, answer_lens=self.answer_lens, max_num_seqs=point.concurrency)

    def generate(self, point: protocol.Point) -> list[int]:
        scheduler = Scheduler(
            FCFS(), Chunked(), self.kv, pause(), max_num_seqs=self.concurrency, token_budget=2048,
            max_model_len=self.engine.model.max_positions,
        )  # fmt: skip
        first = len(self.answer_lens)
        requests = []
        for rid, (prompt, n) in enumerate(zip(point.prompts, point.output_lens, strict=True), start=first):
            self.answer_lens[rid] = n
            requests.append(Request(rid, 0.0, len(prompt), n, prompt_ids=prompt))
        answers = Answers(self.executor)
        serve(Script(Event(0.0, EventKind.ARRIVAL, r) for r in requests), scheduler, self.executor, self.clock, answers)
        return [len(answers.by_rid[r.rid].token_ids) for r in requests]

    def close(self) -> None:
        pass


if __name__ == "__main__":
    protocol.run(Ours)
