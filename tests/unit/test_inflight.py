"""Two steps in flight: plans, outcomes and tokens are those of one, whatever comes between, and steps are launched ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Ask, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native import only_prompts, play_native, served
from strategies import cases, crowded, reusing
from windowed import Windowed

from lengthwise.engine.native import inflight
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generation import Generation
from lengthwise.engine.native.graphs import DecodeGraphs
from lengthwise.engine.native.inflight import Pace
from lengthwise.engine.native.rows import Rows
from lengthwise.engine.native.sampling import SamplingParams
from lengthwise.engine.native.tiny import tiny
from lengthwise.engine.simulated import SimulatedClock
from lengthwise.sched import Request
from lengthwise.sched.kv import BlockTables, Paged, Prefix

torch.set_num_threads(1)

FEW = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
runs = st.one_of(cases(), crowded(), reusing().map(only_prompts))


class Letters:
    """A tokenizer: every id has a character of its own."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(0x4E00 + i) for i in ids)


def kinds(seed):
    """How requests are sampled, by rid: most greedily until one of a few tokens or strings ends them, some drawn."""

    def sampling(request):
        rng = np.random.default_rng([seed, request.rid])
        ends = tuple(int(i) for i in rng.integers(0, 128, rng.integers(0, 14)))
        kind = rng.random()
        if kind < 0.1:
            return SamplingParams(temperature=1.0, seed=request.rid)
        if kind < 0.4:
            return SamplingParams(stop=tuple(Letters().decode([i]) for i in ends))
        return SamplingParams(stop_token_ids=ends)

    return sampling


class Later:
    """What comes of a job once somebody looks at it."""

    def __init__(self, device, job):
        self._device, self.job, self.made = device, job, None

    def __getattr__(self, name):
        self._device.catch_up(self)
        return getattr(self.made, name)


class Lazy:
    """A device that is far behind: it does what was launched, in order, when somebody looks at what comes of it. num_ahead:
    launches before the step whose tokens they feed in was done."""

    def __init__(self, executor):
        self.jobs, self.num_ahead = deque(), 0
        self._compute, executor._compute = executor._compute, self.launch
        copy = executor._store.copy
        executor._store.copy = lambda swap: (self.catch_up(), copy(swap))  # in the order of the stream

    def launch(self, batch, before=None):
        self.num_ahead += before is not None and before.computed.made is None
        later = Later(self, lambda: self._compute(batch, before))
        self.jobs.append(later)
        return later

    def catch_up(self, to=None):
        while self.jobs and (to is None or to.made is None):
            later = self.jobs.popleft()
            later.made = later.job()


@dataclass
class Seen:
    """What scheduler and executor told each other, and what came of it. states: hidden states by step and rid."""

    told: list[Any] = field(default_factory=list)
    states: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    orders: int = 0


def seen(case, family="llama", *, depth, lazy=False, free=None, model=None, prepare=None, probing=False, **options):
    """Run `case` with `depth` steps in flight; free: how tokens are sampled, which then say when an answer ends."""
    record, made = Seen(), {}

    def watch(executor, kv):
        submit, collect = executor.submit, executor.collect

        def asking(plan):
            if probing:
                plan.probe_rows = [g.request for g in executor.generations.values() if g.request.rid % 2]
            ticket = submit(plan)
            record.orders += ticket.order is not None
            return ticket

        def noting(ticket, until):
            outcome, plan = collect(ticket, until), ticket.plan
            copies = [(c.request.rid, c.num_blocks, c.source, c.target) for c in plan.swaps]  # their ids may differ
            ended = [(f.request.rid, f.num_tokens, f.reason) for f in outcome.finished]
            failed = [(f.request.rid, f.reason) for f in outcome.failures]
            record.told.append((plan.repeat, plan.stable_until, copies, outcome.advance, ended, failed))
            for request, (state,) in ((r, (s,)) for r, s in (outcome.probes or {}).items()):
                record.states[len(record.told), request.rid] = state
            return outcome

        executor.submit, executor.collect = asking, noting
        made["device"] = Lazy(executor) if lazy else None
        if prepare is not None:
            prepare(executor, kv)

    asked = {"depth": depth} | ({} if free is None else {"answer_lens": None, "sampling": free})
    result = play_native(case, model or served(family), prepare=watch, asked=asked, **options)
    return result, record, made["device"]


def indexed(result):
    """What the prefix index has: the KV of each run of pieces, by the names on its path."""
    kv, pools = result.scheduler.kv, result.executor._store._pools
    out, todo = {}, [((), kv.index.root)] if isinstance(kv, Prefix) else []
    while todo:
        path, node = todo.pop()
        path = (*path, *node.keys)
        out[path] = [tensor[node.blocks].numpy() for pool in pools for tensor in pool.tensors]
        todo += [(path, child) for child in node.children.values()]
    return out


def same(case, *args, lazy=True, **options):
    """Run `case` at both depths, and twice so at 2: as a CPU does it, and on a device that is behind. Returns the last run."""
    one, told, _ = seen(case, *args, depth=1, **options)
    for behind in (False, True) if lazy else (False,):
        two, again, device = seen(case, *args, depth=2, lazy=behind, **options)
        ahead = two.executor.ahead
        assert again.told == told.told and two.log.steps == one.log.steps
        assert two.log.ended_at == one.log.ended_at and two.log.tokens == one.log.tokens
        assert two.scheduler.kv.free == one.scheduler.kv.free and indexed(two).keys() == indexed(one).keys()
        for path, contents in indexed(one).items():
            for ours, theirs in zip(indexed(two)[path], contents, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert again.states.keys() == told.states.keys()
        for at, state in told.states.items():
            np.testing.assert_allclose(again.states[at], state, atol=1e-4)
        assert ahead.launched == ahead.used + ahead.discarded + (ahead._next is not None and ahead._next.computed is not None)
        assert device is None or device.num_ahead == ahead.launched
    return two, again


def writer(family="llama"):
    model = tiny(family)
    model.tokenizer = Letters()
    return model


# --- as with one step in flight -------------------------------------------------------------------------------------------


@given(runs, st.booleans())
@FEW
def test_any_run_of_given_lengths(case, probing):
    same(case, probing=probing)


MODEL = writer()


@given(runs, st.integers(0, 1 << 20))
@FEW
def test_any_run_whose_tokens_decide_when_it_ends(case, seed):
    same(case, model=MODEL, free=kinds(seed), probing=True)


@pytest.mark.slow
@given(runs, st.integers(0, 1 << 20), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_runs(case, seed, probing):
    same(case, model=MODEL, free=kinds(seed), probing=probing, attention="auto")


@given(runs, st.sampled_from(("gemma3", "mistral")))
@FEW
def test_windows_that_free_blocks(case, family):
    num: dict[int | None, int] = {}
    for spec in served(family).layers:
        num[spec.window] = num.get(spec.window, 0) + 1
    own = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    own |= {"prefix": False, "paged": True, "hash_tokens": 0}
    same(Windowed(**own, groups=tuple((n, window) for window, n in num.items())), family)


@given(runs, st.integers(0, 1 << 20))
@FEW
def test_steps_that_are_replayed_feed_in_what_the_device_has(case, seed):
    def replay(executor, kv):
        graphs = DecodeGraphs(
            MODEL, SimpleNamespace(name="torch", captures=True), block_size=kv.block_size, max_num_seqs=6, max_model_len=100,
            capture=lambda step: step,
        )  # fmt: skip
        executor._run = graphs.run

    same(case, model=MODEL, free=kinds(seed), prepare=replay)


@given(runs, st.integers(0, 127), st.integers(0, 1 << 20))
@FEW
def test_s5_rows_and_chunks_that_fail(case, bad, seed):
    """A token whose embedding is not finite: whoever feeds it in fails, alone."""
    model = writer()
    hook = model.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out.masked_fill((args[0] == bad)[..., None], float("nan"))
    )
    same(case, model=model, free=kinds(seed))
    hook.remove()


# --- and launched ahead ---------------------------------------------------------------------------------------------------


def test_answers_of_given_lengths_waste_nothing():
    """Three rows, three more behind them: nobody goes ahead of a row's last token, or of a chunk."""
    asks = tuple(Ask(0.0, 9 + i, 30 + 5 * i, 90) for i in range(6))
    result, _ = same(Case(asks, pool=1024, max_num_seqs=3))
    ahead, plain = result.executor.ahead, sum(not step[2] for step in result.log.steps)
    assert ahead.discarded == 0 and plain - 13 < ahead.used < plain


def ending(at, **fields):
    """A run in which request 0 ends by its token number `at`, which nobody could foresee."""
    asks = (Ask(0.0, 7, 40, 40), Ask(0.0, 5, 25, 40), Ask(0.0, 6, 35, 40), *fields.pop("others", ()))
    fields["pool"] = 256
    free = seen(Case(asks, **fields), depth=1, model=MODEL)[0].log.tokens[0][7:]
    ends = next(n for n in range(at, 40) if free[n] not in free[:n])

    def sampling(request):
        return SamplingParams(stop_token_ids=(free[ends],)) if request.rid == 0 else SamplingParams()

    return Case(asks, **fields), ends + 1, sampling


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_row_that_ended_is_dropped_from_a_step_that_is_used(block_size):
    case, num, sampling = ending(9, block_size=block_size)
    result, record = same(case, model=MODEL, free=sampling, probing=True)
    assert result.log.ended_at[0][:2] == (num, "stop")
    assert record.orders > 0 and result.executor.ahead.discarded == 0  # the last row took its place


def test_a_step_is_thrown_away_when_somebody_comes_in_for_a_row_that_ended():
    case, num, sampling = ending(9, max_num_seqs=3, others=(Ask(0.0, 4, 20, 20),), block_size=4)
    result, _ = same(case, model=MODEL, free=sampling)
    ahead = result.executor.ahead
    assert result.log.ended_at[0][:2] == (num, "stop") and ahead.discarded == 1 and ahead.used > 20


def test_no_step_ahead_without_a_free_block():
    tables = BlockTables(3)
    request = Request(0, 0.0, 4, 9)
    tables.admit(request, (), 2)
    rows = Rows((tables,), 2, 4, torch.device("cpu"))
    rows.join(Generation(request, [5, 6, 7, 8]))
    batch = rows.ahead(0)
    assert batch.positions.tolist() == [4] and batch.groups[0].block_tables.tolist() == [[0, 1, 2]]
    assert tables.of(request) == [0, 1] and tables.free == [2]
    tables.admit(Request(1, 0.0, 2, 9), (), 1)
    assert rows.ahead(0) is None


def test_blocks_looked_at_stay_free():
    tables = BlockTables(8)
    assert tables.upcoming(3) == [0, 1, 2] and tables.upcoming(9) == list(range(8)) and tables.upcoming(0) == []
    first, second = (Request(rid, 0.0, 2, 9) for rid in range(2))
    tables.admit(first, (), 2)
    tables.admit(second, (), 0)
    assert tables.upcoming(1) == [2] and tables.grow(second, 4) == 4 and tables.grow(second, 4) != 4  # taken by now
    tables.release(first)
    tables.grow(second)
    assert sorted([*tables.free, *tables.of(second)]) == list(range(8))


# --- where it pays --------------------------------------------------------------------------------------------------------


def test_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(inflight.time, "perf_counter", lambda: now[0])
    pace = Pace()
    assert not pace.pays  # nothing is known yet

    def step(seconds, gap, hit):
        now[0] += seconds
        pace.note_read(now[0] - seconds)
        now[0] += gap
        pace.note_next(hit, 0.0)

    step(10.0, 1.0, True)
    assert pace.pays
    for _ in range(60):
        step(10.0, 1.0, True)
    assert pace.gap == pytest.approx(1.0, rel=0.01) and pace.step == pytest.approx(10.0, rel=0.01) and pace.hits == 1.0
    step(10.0, 5.0, False)
    assert not pace.pays and pace.gap == pytest.approx(1.0, rel=0.01)  # one in ten thrown away, for a tenth of a step
    for _ in range(10):
        step(10.0, 1.0, True)
    assert pace.pays
    now[0] += 4.0
    pace.note_read(now[0] - 100.0)  # launched long before the tokens before it were read
    assert pace.step < 10.0


def test_what_does_not_pay_is_not_launched(monkeypatch):
    """A step that takes next to no time is not worth what one in ten thrown away costs; what would have come is noted still."""
    case = Case(tuple(Ask(0.0, 9, 40, 90) for _ in range(2)), pool=1024)
    for pays in (False, True):
        monkeypatch.setattr(Pace, "pays", property(lambda self, pays=pays: pays))

        def calm(executor, kv):
            executor.ahead._always = False

        result, _, _ = seen(case, depth=2, prepare=calm)
        assert (result.executor.ahead.launched > 30) == pays and result.executor.ahead.pace.hits > 0.9


def test_depths(monkeypatch):
    engine = NativeEngine(served(), attention="torch")
    assert [engine.depth(asked) for asked in ("auto", 1, 2)] == [1, 1, 2]
    for asked in (0, 3, "two", None):
        with pytest.raises(ValueError, match=f"depth {asked!r} is not one of auto, 1, 2"):
            engine.executor(Paged(64), SimulatedClock(), depth=asked)
    assert engine.executor(Paged(64), SimulatedClock(), depth=2).depth == 2
    executor = engine.executor(Paged(64), SimulatedClock())
    assert executor.depth == 1 and executor.ahead is None
    monkeypatch.setattr(engine.attention, "waits", True, raising=False)
    with pytest.raises(ValueError, match="depth 2 cannot be: the attention backend 'torch' waits for the step before"):
        engine.depth(2)
    monkeypatch.setattr(engine.model, "num_ranks", 2, raising=False)
    with pytest.raises(ValueError, match="depth 2 cannot be: 2 ranks are told one step at a time"):
        engine.depth(2)
    assert engine.depth("auto") == engine.depth(1) == 1
