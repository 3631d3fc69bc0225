"""A shadow memory: what every physical block would hold, written and read through the block tables as an engine would.

A token's KV is a function of all tokens up to it, so each place holds the name of a prefix. Whoever reads anything but its own
prefix was given a block of somebody else's, or one that was overwritten, evicted or copied wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import BATCHING, COSTS, POLICIES, Case, Result, copy_seconds, step_seconds

from lengthwise.engine.simulated import SimulatedClock
from lengthwise.sched import Copy, Plan, Preemption, Request, Scheduler, Swap, serve
from lengthwise.sched.kv import KVCache, Prefix
from lengthwise.sched.plan import DEVICE
from lengthwise.sched.rehearsal import Log, PlainExecutor, Script
from lengthwise.sched.request import covers_answers

FREE = ("free",)  # what lies in a block that nobody has: anybody may have written there


class Shadow(PlainExecutor):
    """Executes single steps, and asserts that every row reads its own prefix. peak: most rows that decoded at once. copies:
    those on the device, each with whether what it was made from had been evicted by then."""

    def __init__(self, kv: KVCache, *args: Any, hash_tokens: int = 0, **options: Any) -> None:
        super().__init__(*args, fast_forward=False, hash_tokens=hash_tokens, **options)
        kv.keep_tables()
        self._kv, self._size = kv, kv.block_size
        self._memory: list[list[Any]] = [[FREE] * self._size for _ in range(kv.num_blocks)]
        self._written: set[int] = set()  # blocks with something in them
        self._below: dict[int, list[list[Any]]] = {}  # rid -> the blocks that a tier has of it
        self.num_reads = self.peak = 0
        self.copies: list[tuple[Copy, bool]] = []  # with whether the source had been evicted since

    def content(self, req: Request, at: int) -> Any:
        """What the KV of token `at` of `req` stands for: the same for two requests if and only if they agree up to there."""
        hashes, size = req.block_hashes, self._hash_tokens
        if hashes is not None and size and (covers_answers(hashes) or (at // size + 1) * size <= req.prompt_len):
            try:
                return at, hashes[at // size]
            except IndexError:
                pass
        return at, "of", req.rid

    def _copy(self, moves: Sequence[Swap | Copy]) -> None:
        super()._copy(moves)
        for move in moves:
            if isinstance(move, Copy):
                self._copy_own(move)
                continue
            req, num_blocks, source, _, blocks = move
            assert len(blocks) == num_blocks == len(set(blocks))
            if source == DEVICE:
                self._below[req.rid] = [list(self._memory[block]) for block in blocks]
            else:
                there = self._below.pop(req.rid)
                for block, data in zip(blocks, there[len(there) - num_blocks :], strict=True):
                    self._memory[block] = list(data)
                    self._written.add(block)

    def _copy_own(self, copy: Copy) -> None:
        """As an engine copies: into blocks that the request has alone, where nobody else may read."""
        req, num_blocks, sources, targets = copy
        assert num_blocks == len(sources) == len(set(targets)) == len(targets)
        at = self._kv.groups[0].of(req).index(targets[0])
        assert self._kv.groups[0].of(req)[at : at + num_blocks] == list(targets)
        indexed = set(self._kv.index.blocks())
        assert not set(targets) & indexed, "a block that others may read is the target of a copy"
        read = [list(self._memory[block]) for block in sources]
        for block, data in zip(targets, read, strict=True):
            self._memory[block] = data
            self._written.add(block)
        self.copies.append((copy, not set(sources) <= indexed))

    def _examine(self, plan: Plan) -> None:
        super()._examine(plan)
        spans = [(req, start, start + length) for req, start, length, _ in plan.chunks]
        decoding = list(self._decoding) if plan.num_decode else []
        self.peak = max(self.peak, len(decoding))
        for req in decoding:
            at = req.prompt_len + len(self.token_times[req.rid]) - 1
            spans.append((req, at, at + 1))
            if len(self._kv.groups[0].of(req)) * self._size <= at:
                for group in self._kv.groups:
                    group.grow(req)
        owner: dict[int, Request] = {}
        for req, start, end in spans:
            self._write(req, start, end, owner)
        for req, start, end in spans:
            self._read(req, start, end)
        if isinstance(self._kv, Prefix):
            assert not owner.keys() & set(self._kv.index.blocks()), "a block that others may read is written"
        for req in decoding:
            for group in self._kv.groups:
                group.trim(req, req.prompt_len + len(self.token_times[req.rid]))
        free = set(self._kv.groups[0].free)
        for block in [block for block in self._written if block in free]:
            self._memory[block] = [FREE] * self._size
            self._written.remove(block)

    def _write(self, req: Request, start: int, end: int, owner: dict[int, Request]) -> None:
        for g, group in enumerate(self._kv.groups):
            table = group.of(req)
            for at in range(start, end):
                block = table[at // self._size]
                assert block >= 0 and owner.setdefault(block, req) is req, f"two requests write block {block}"
                self._memory[block][at % self._size] = (g, self.content(req, at))
                self._written.add(block)

    def _read(self, req: Request, start: int, end: int) -> None:
        for g, group in enumerate(self._kv.groups):
            table = group.of(req)
            first = 0 if group.window is None else max(start - group.window + 1, 0)
            for at in range(first, end):
                block = table[at // self._size]
                assert block >= 0, f"request {req.rid} attends token {at}, whose block it has given back"
                there = self._memory[block][at % self._size]
                assert there == (g, self.content(req, at)), f"token {at} of {req} in block {block} holds {there}"
            self.num_reads += end - first


def shadow(case: Case, executor: type[Shadow] = Shadow) -> Result:
    """Run `case` with block tables and a shadow memory, all counts and tables checked at every step."""
    requests, events, predictions = case.requests()
    clock, cost = SimulatedClock(), COSTS[case.cost]() if isinstance(case.cost, str) else case.cost
    tiers = {} if case.cpu is None else {"cpu": case.cpu, "disk": case.disk}
    engine = Scheduler(
        POLICIES[case.policy](), BATCHING[case.batching](), case.kv(), Preemption(case.keeps_kv, tiers),
        max_num_seqs=case.max_num_seqs, token_budget=case.token_budget, max_model_len=case.max_model_len, clip=case.clip,
        check=True,
    )  # fmt: skip
    shadowing = executor(
        engine.kv, clock, step_seconds(cost), [a.output_len for a in case.asks], hash_tokens=case.hash_tokens,
        swap_seconds=copy_seconds,
    )  # fmt: skip
    log = Log()
    serve(Script(events, predictions), engine, shadowing, clock, log)
    engine.kv.check(())
    return Result(log, engine, requests, shadowing, case)
