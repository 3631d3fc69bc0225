"""Named cases (S, M14) on the native engine. Each also plans as in simulation, and every token is greedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import Ask, Case
from native import both, plain, play_native, prompt_ids, served

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import generate
from lengthwise.sched import FOREVER, LengthDistribution, recompute
from lengthwise.sched.kv.grouped import Grouped
from lengthwise.sched.policies import FCFS
from lengthwise.sched.victims import LeastComputed

point = LengthDistribution.point


def first_chunk(result, rid):
    return next(k for k, step in enumerate(result.log.steps) if any(chunk[0] == rid for chunk in step[2]))


@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
def test_s2_requests_that_each_fill_the_pool_all_complete(policy, keeps_kv):
    asks = tuple(Ask(0.0, 8, 40, 41, point(40.0 - i)) for i in range(8))
    result = both(Case(asks, policy, pool=9 * 8, block_size=8, keeps_kv=keeps_kv))
    assert all(ended[:2] == (40, "stop") for ended in result.log.ended_at.values())
    total = sum(r._recomputed for r in result.requests)
    assert result.scheduler.recomputed_tokens == total > 0


def test_s4_the_second_starts_when_the_first_ends():
    result = both(Case((Ask(0.0, 5, 64), Ask(0.0, 5, 64)), cost="tick", max_num_seqs=1))
    assert [r._first_scheduled for r in result.requests] == [0.0, result.finish[0]]


def test_s5_a_failure_loses_nobody(monkeypatch):
    """Logits that are no numbers: the request they are of fails, its blocks come back, and its neighbours do not notice."""
    model, asks = served(), tuple(Ask(0.0, 10, 5 + i, 20) for i in range(8))
    logits = type(model).logits

    def spoiled(self, hidden):
        out = logits(self, hidden)
        if len(out) == 8 - 2:  # the third has two tokens to go
            out[3] = float("nan")
        return out

    monkeypatch.setattr(type(model), "logits", spoiled)
    result = play_native(Case(asks, pool=640), model)
    ended = result.log.ended_at
    failed = [rid for rid, (_, reason, _) in ended.items() if reason.startswith("failed")]
    assert len(failed) == 1 and result.scheduler.counts["failed"] == 1 and result.scheduler.counts["finished"] == 7
    for rid, tokens in result.log.tokens.items():
        if rid not in failed:
            out = plain().generate(torch.tensor([tokens[:10]]), max_new_tokens=asks[rid].output_len, do_sample=False)
            assert tokens == out[0].tolist()


def test_s6_a_long_request_starts_within_the_declared_bound():
    """Shorts come faster than they are served; under SJF the long one starts last, with aging within its bound."""
    short = tuple(Ask(0.05 * i, 4, 8, 60, point(8.0)) for i in range(30))
    case = Case((Ask(0.0, 4, 50, 60, point(50.0)), *short), "sjf", max_num_seqs=1, cost="even")
    late = both(case).requests[0]._first_scheduled
    soon = both(replace(case, policy="aging_sjf"))
    start = soon.requests[0]._first_scheduled
    horizon = (50.0 - 8.0) / 40.0
    assert start < late
    assert all(r.arrival <= horizon for r in soon.requests[1:] if r._first_scheduled < start)


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_s7_a_high_priority_arrival_takes_a_slot_in_the_next_step(keeps_kv):
    asks = (Ask(0.0, 10, 60, priority=5.0), Ask(0.0, 10, 60, priority=5.0), Ask(0.5, 10, 20, priority=0.0))
    result = both(Case(asks, "priority", max_num_seqs=2, keeps_kv=keeps_kv, cost="even"))
    step = next(s for s in result.log.steps if s[0] >= 0.5)
    assert result.requests[2]._first_scheduled == step[0] and [c[0] for c in step[2]] == [2]
    assert [r._num_preemptions for r in result.requests] == [0, 1, 0]
    assert (result.requests[1]._recomputed == 0) == keeps_kv


def test_s8_the_victim_is_the_rules_what_it_cost_is_told_and_its_place_is_kept():
    """B (10 tokens) came first, A (200) second, and the pool is full after 15 tokens each; a third waits meanwhile."""
    case = Case((Ask(0.0, 10, 30, 30), Ask(0.0, 200, 30, 30), Ask(0.01, 40, 10, 10)), pool=240, block_size=4)
    late = both(case)
    assert [r._num_preemptions for r in late.requests] == [0, 1, 0] and 200 <= late.requests[1]._recomputed < 220
    assert late.requests[1]._resumes[1] <= late.requests[2]._first_scheduled
    least = both(case, victim=LeastComputed)
    assert least.requests[0]._num_preemptions and not least.requests[1]._num_preemptions
    assert 10 <= least.requests[0]._recomputed < 60 and least.log.tokens == late.log.tokens
    for result in (late, least):
        assert result.scheduler.recomputed_tokens == sum(r._recomputed for r in result.requests)


class Backfill(FCFS):
    backfill = FOREVER

    def may_pass(self, req, blocked, view):
        return True


def test_s9_what_does_not_fit_blocks_or_is_passed_over_as_declared():
    asks = (Ask(0.0, 145, 60, 60), Ask(0.1, 160, 2, 2), Ask(0.1, 32, 2, 2), Ask(0.1, 32, 2, 2))
    case = Case(asks, pool=14 * 16, cost="even")
    strict = both(case)
    assert [r._first_scheduled for r in strict.requests[1:]] == [strict.finish[0]] * 3
    skip = both(case, policy=Backfill)
    first = next(s[0] for s in skip.log.steps if s[0] >= 0.1)
    assert [r._first_scheduled for r in skip.requests[1:]] == [skip.finish[0], first, first]


def test_s10_a_short_prompt_comes_in_right_after_the_final_chunk():
    result = both(Case((Ask(0.0, 64, 10), Ask(0.0, 4, 10)), token_budget=16, max_num_seqs=2))
    assert first_chunk(result, 1) == 4 and result.log.steps[4][5] == 1


def test_s11_the_token_budget_holds_on_every_step():
    asks = (*(Ask(0.0, 1, 30, 30) for _ in range(20)), *(Ask(0.2, n, 3, 3) for n in (129, 256, 1, 128)))
    result = both(Case(asks, token_budget=128, max_num_seqs=64, pool=4096))
    assert max(s[5] + sum(c[2] for c in s[2]) for s in result.log.steps) == 128
    sums: dict[int, int] = {}
    for step in result.log.steps:
        for rid, _, length, _ in step[2]:
            sums[rid] = sums.get(rid, 0) + length
    assert [sums[20 + i] for i in range(4)] == [129, 256, 1, 128]


def test_s12_tokens_are_the_same_with_and_without_chunks():
    asks = (*(Ask(0.0, 20, 40, 40) for _ in range(4)), Ask(0.2, 600, 4, 4))
    case = Case(asks, pool=1 << 11, max_num_seqs=8)
    runs = [both(replace(case, token_budget=budget)) for budget in (32, 2048)]
    assert runs[0].log.tokens == runs[1].log.tokens
    assert len(runs[0].log.steps) > len(runs[1].log.steps)


@pytest.mark.parametrize("tight", [False, True])
def test_s15_a_prompt_that_is_cached_whole_still_computes_a_token(tight):
    """Two requests with one prompt of 64 tokens, the second after the first; others take the blocks between them or do not."""
    names = list(range(4))
    others = tuple(Ask(1.0, 60, 20, 20) for _ in range(2)) if tight else ()
    asks = (Ask(0.0, 64, 10, 10, block_hashes=names), *others, Ask(3.0, 64, 10, 10, block_hashes=names))
    case = Case(asks, prefix=True, hash_tokens=16, pool=160 if tight else 4096)
    result = both(case)
    last = result.requests[-1]
    assert 0 <= last._cached <= 48 and (last._cached == 48) == (not tight)
    assert result.log.tokens[len(asks) - 1] == result.log.tokens[0]
    off = both(replace(case, prefix=False))
    assert off.log.tokens == result.log.tokens


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize(("piece", "pool"), [(16, 4096), (32, 4096), (32, 64)])
def test_s15_what_a_prompt_that_is_cached_whole_writes_is_a_copy(piece, pool, attention):
    """One prompt of 4 blocks three times. Blocks of the index are never written, not even with the same numbers."""
    tight, names = pool == 64, list(range(64 // piece))
    num = 1 if tight else 10
    asks = tuple(Ask(t, 64, num, num, block_hashes=names) for t in (0.0, 0.05, 3.0))
    case = Case(asks, prefix=True, copy_on_write=True, hash_tokens=piece, pool=pool)
    seen = []

    def watch(executor, kv):
        submit = executor.submit

        def watched(plan):
            before = [[tensor.clone() for tensor in pool.tensors] for pool in executor._pools]
            ticket = submit(plan)
            kept = kv.index.blocks()
            for pool, tensors in zip(executor._pools, before, strict=True):
                assert all(torch.equal(new[kept], old[kept]) for new, old in zip(pool.tensors, tensors, strict=True))
            seen.extend(plan.copies)
            return ticket

        executor.submit = watched

    result = both(case, attention=attention, prepare=watch)
    assert [r._cached for r in result.requests] == [0, 63, 63]
    assert [copy.num_blocks for copy in seen] == 2 * [piece // 16]
    assert result.log.tokens[0] == result.log.tokens[1] == result.log.tokens[2]
    assert both(replace(case, prefix=False), attention=attention).log.tokens == result.log.tokens


def test_s14_m14_cached_tokens_are_counted_once_and_never_beyond_the_prompt():
    """M14: one request preempted by recompute while its prompt is cached: TTFT stays, recomputed tokens are counted apart."""
    names = list(range(6))
    asks = (
        Ask(0.0, 96, 4, 4, priority=1.0, block_hashes=names), Ask(0.2, 100, 60, 60, priority=5.0, block_hashes=names),
        Ask(0.9, 100, 10, 10, priority=0.0),
    )  # fmt: skip
    case = Case(asks, "priority", prefix=True, hash_tokens=16, pool=176, max_num_seqs=1, cost="even")
    result = both(case)
    victim = result.requests[1]
    assert victim._num_preemptions == 1 and victim._cached == 96
    assert 0 < victim._recomputed <= 100 + 60
    assert victim._first_token < victim._resumes[0]


LOW = Ask(0.0, 10, 6, 6, priority=5.0)


@pytest.mark.parametrize("disk", [0, 16])
def test_s16_who_cannot_be_swapped_is_computed_again(disk):
    """Swap of 2 blocks (3 with the disk's), three requests need it; all finish, and whoever did not fit is counted."""
    case = Case((LOW, LOW, LOW, Ask(0.02, 150, 4, 10, priority=1.0)), "priority", pool=160, cost="even", cpu=32, disk=disk)
    result = both(case)
    scheduler = result.scheduler
    assert (scheduler.num_swaps, scheduler.num_swap_full) == ((2, 1) if not disk else (3, 0))
    assert (scheduler.recomputed_tokens > 0) == (not disk)
    assert all(ended[1] == "stop" for ended in result.log.ended_at.values())


def test_s20_twenty_requests_in_sixteen_blocks():
    asks = tuple(Ask(0.0, 20, 40 + i, 100) for i in range(20))
    result = both(Case(asks, pool=16 * 16))
    assert [result.log.ended_at[i][0] for i in range(20)] == [40 + i for i in range(20)]
    assert result.scheduler.num_preemptions > 0


def test_the_prompts_of_these_cases_differ():
    case = Case((Ask(0.0, 32, 1, block_hashes=[1, 2]), Ask(0.0, 32, 1, block_hashes=[1, 3])), hash_tokens=16)
    first, second = (prompt_ids(case, rid, 128) for rid in range(2))
    assert first[:16] == second[:16] and first[16:] != second[16:]


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_layers_with_a_window_free_what_they_have_passed(family, attention):
    """Windows of 32 tokens, answers much longer: more requests fit at once than with all KV kept, and every token is greedy."""
    model = served(family)
    windows = [spec.window for spec in model.layers]
    prompts = [list(range(10 * i, 10 * i + 60)) for i in range(2)]
    kv = Grouped.of_layers(windows, 320, block_size=8, watermark=0.0)
    engine = NativeEngine(model, attention=attention)
    answers = generate(engine, prompts * 2, 100, kv=kv, preemption=recompute(), token_budget=24, max_num_seqs=4)
    for prompt, answer in zip(prompts * 2, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        logits = plain(family)(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer.token_ids
    assert kv.free == kv.num_blocks == len(kv.groups[0].free)
