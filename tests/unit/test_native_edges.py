"""The native engine where things go wrong: rows that fail, requests that are dropped in any phase, windows with swaps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from harness import TICK, Ask, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native import Spoiling, assert_greedy, both, only_prompts, play_native, served
from strategies import cases, crowded, reusing
from windowed import Windowed

from lengthwise.engine.native.graphs import DecodeGraphs
from lengthwise.sched import EventKind, Scheduler
from lengthwise.sched.kv import Prefix
from lengthwise.sched.rehearsal import Log

torch.set_num_threads(1)

FEW = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
runs = st.one_of(cases(), crowded(), reusing().map(only_prompts))


def failing(case: Case, when: Callable[[int], int | None], prepare=lambda executor, kv: None, **options):
    """Run `case`; request rid fails at its token number `when(rid)`, and what it alone wrote in memory is spoiled, as by a step
    that went wrong. Whoever reads any of that fails too."""
    model, expected = served(), set()

    def fails(row):
        if when(row.request.rid) != row.num_output:
            return False
        expected.add(row.request.rid)
        spoil(row.request)
        return True

    seen = {}

    def spoil(request):
        kv = seen["kv"]
        path = kv._paths.get(request) if isinstance(kv, Prefix) else None
        shared = 0 if path is None else path.pieces * kv._span
        for pool in seen["pools"]:
            for tensor in pool.tensors:
                tensor[kv.tables.of(request)[shared:]] = float("nan")

    def spoiling(executor, kv):
        prepare(executor, kv)
        seen.update(kv=kv, pools=executor._store._pools)
        executor._sampler = Spoiling(model.vocab_size, fails, model.eos_ids)

    result = play_native(case, model, prepare=spoiling, **options)
    failed = {rid for rid, (_, reason, _) in result.log.ended_at.items() if reason.startswith("failed")}
    assert failed == expected  # nobody else
    fine = Log(ended_at={rid: ended for rid, ended in result.log.ended_at.items() if rid not in failed})
    fine.tokens = {rid: tokens for rid, tokens in result.log.tokens.items() if rid not in failed}
    assert_greedy("llama", fine)
    return result


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_s5_what_a_prefill_that_failed_has_computed_is_not_kept_for_others(attention):
    """Both steps that emit: a prompt's last chunk, and a decode. The second request has the same prompt, and finds none of it
    that is spoiled."""
    same = tuple(Ask(1.0 * i, 64, 8, 8, block_hashes=[1, 2, 3, 4]) for i in range(2))
    for token in (0, 3):
        case = Case(same, prefix=True, hash_tokens=16, pool=160)
        result = failing(case, {0: token}.get, attention=attention)
        assert result.scheduler.counts["failed"] == 1 and result.requests[1]._cached == (48 if token else 0)


@given(runs, st.dictionaries(st.integers(0, 23), st.integers(0, 20)), st.sampled_from(("torch", "auto")))
@FEW
def test_s5_rows_that_fail_in_any_run(case, fails, attention):
    failing(case, fails.get, attention=attention)


# --- dropped in any phase -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_a_request_dropped_at_any_time_leaves_nothing_and_harms_nobody(keeps_kv, monkeypatch):
    """The long prompt is dropped in every phase: while it waits, prefills, decodes, is paused or swapped out."""
    phases, abort = set(), Scheduler.abort

    def noting(self, req, failed=False):
        phases.add(req.phase.name)
        return abort(self, req, failed)

    monkeypatch.setattr(Scheduler, "abort", noting)
    for after in range(0, 60, 3):
        kind = EventKind.ABORT if after % 2 else EventKind.TIMEOUT
        asks = (
            Ask(0.0, 60, 40, 40, priority=3.0, abort_after=after * TICK, abort_kind=kind), Ask(0.0, 10, 12, 12, priority=2.0),
            Ask(9 * TICK, 40, 15, 15, priority=1.0), Ask(24 * TICK, 30, 12, 12, priority=0.0),
        )  # fmt: skip
        case = Case(
            asks, "priority", pool=400 if keeps_kv else 112, block_size=4, cost="even", token_budget=16, max_num_seqs=2,
            cpu=64, disk=64, keeps_kv=keeps_kv,
        )  # fmt: skip
        result = both(case)
        assert all(result.log.ended_at[rid][:2] == (asks[rid].output_len, "stop") for rid in (1, 2, 3))
    assert phases >= {"WAITING", "PREFILLING", "DECODING", "PAUSED" if keeps_kv else "SWAPPED"}, phases


def test_who_is_copied_back_behind_what_the_device_has_kept_reads_its_own():
    """Its prompt is in the index still when it returns: only what comes behind that is copied."""
    asks = (Ask(0.0, 64, 40, 40, priority=5.0, block_hashes=[1, 2, 3, 4]), Ask(20 * TICK, 100, 8, 8, priority=0.0))
    for tiers in ({"cpu": 160}, {"cpu": 0, "disk": 160}):
        result = both(Case(asks, "priority", prefix=True, hash_tokens=16, pool=176, cost="even", **tiers))
        swapping = result.scheduler.swapping
        assert swapping.num_outs == swapping.num_ins == 1 and 0 < swapping.blocks_in < swapping.blocks_out


# --- replayed -----------------------------------------------------------------------------------------------------------


@given(runs, st.dictionaries(st.integers(0, 23), st.integers(0, 20), max_size=3))
@FEW
def test_decodes_that_are_replayed_in_any_run(case, fails):
    """A step that is run again over static buffers stands in for a graph; what is not of decodes alone, or too large, runs
    eagerly."""
    made = []

    def replay(executor, kv):
        made.append(
            DecodeGraphs(
                served(), SimpleNamespace(name="torch", captures=True), block_size=kv.block_size, max_num_seqs=6,
                max_model_len=100, capture=lambda step: step,
            )
        )  # fmt: skip
        executor._run = made[0].run

    result = failing(case, fails.get, prepare=replay)
    decodes = sum(not step[2] and 0 < step[5] + step[6] <= 6 for step in result.log.steps)
    assert made[0].num_replayed == decodes and made[0].num_eager == len(result.log.steps) - decodes


# --- windows -------------------------------------------------------------------------------------------------------------


def windowed(case: Case, family: str) -> Windowed:
    """`case` with the KV of a model's layers in groups by window."""
    kinds: dict[int | None, int] = {}
    for spec in served(family).layers:
        kinds[spec.window] = kinds.get(spec.window, 0) + 1
    same = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    same |= {"prefix": False, "paged": True, "hash_tokens": 0}
    return Windowed(**same, groups=tuple((num, window) for window, num in kinds.items()))


def test_windows_with_copies_and_aborts():
    asks = tuple(Ask(6 * i * TICK, 30 + i, 60, 60, priority=float(-i), abort_after=1.0 if i == 1 else None) for i in range(4))
    case = Case(asks, "priority", pool=128, block_size=4, cost="even", token_budget=24, max_num_seqs=3, cpu=400)
    result = both(windowed(case, "gemma3"), "gemma3")
    assert result.scheduler.num_swaps > 0 and result.scheduler.counts["aborted"] == 1


@given(runs, st.sampled_from(("gemma3", "mistral", "gemma2")), st.sampled_from(("torch", "auto")))
@FEW
def test_windows_with_any_preemption(case, family, attention):
    both(windowed(case, family), family, attention=attention)


# --- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("batching", ["static", "chunked"])
def test_answers_of_one_token_and_padding(batching, paged, size):
    """Answers of 1 to 9 tokens, as long as allowed or shorter, in batches whose rows end one by one; the first block is that of
    a row that goes on when others have ended, so that what padding would write there is noticed."""
    asks = tuple(Ask(0.0, 1 + 5 * i, 9 - (4 * i) % 9, 9 - (4 * i) % 9 + i % 2) for i in range(8))
    result = both(Case(asks, batching=batching, paged=paged, block_size=size, pool=160, max_num_seqs=4))
    assert [result.log.ended_at[i][:2] for i in range(8)] == [(a.output_len, "stop") for a in asks]
    assert (max(step[6] for step in result.log.steps) > 0) == (batching == "static")


def test_rows_that_reserve_more_than_they_use_read_no_more():
    """Contiguous reserves the whole answer: what a step looks at is as wide as the longest context, not the reservation."""
    widths, model = [], served()
    forward = type(model).forward

    def noting(self, batch):
        widths.append((batch.groups[0].block_tables.shape[1], batch.max_context))
        return forward(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", noting)
        both(Case((Ask(0.0, 5, 9, 400), Ask(0.0, 3, 20, 400)), paged=False, pool=1024))
    assert widths and all(width == context for width, context in widths)
