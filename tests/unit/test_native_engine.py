"""The native engine against the library's own `generate`, for every architecture and batching mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native import plain, served

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import generate
from lengthwise.engine.native.tiny import FAMILIES, tiny
from lengthwise.sched import recompute
from lengthwise.sched.batching import Chunked, Mixed, PrefillFirst, Static
from lengthwise.sched.kv import Contiguous, Paged


def prompts(seed=0, lens=(5, 40, 17, 66, 1, 23)):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128, n).tolist() for n in lens]


def theirs(family, ids, num, **config):
    with torch.no_grad():
        prompt = torch.tensor([ids])  # without a mask, a padding id in the prompt would be taken for padding
        out = plain(family, **config).generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num, do_sample=False, use_cache=True
        )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("attention", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, attention):
    """Prompts in chunks of at most 16 beside decodes, four rows, memory so short that some are computed again."""
    some = prompts()
    kv = Paged(160, 8, 0.0)
    engine = NativeEngine(served(family), attention=attention)
    answers = generate(engine, some, 20, kv=kv, max_num_seqs=4, token_budget=16, preemption=recompute())
    assert [a.token_ids for a in answers] == [theirs(family, ids, 20) for ids in some]
    assert {a.reason for a in answers} == {"length"}
    assert sum(len(set(a.token_ids)) > 3 for a in answers) >= 3  # or the test would be weak


@pytest.mark.parametrize("batching", [Static, Mixed, PrefillFirst, Chunked])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_any_batching_mode_and_block_size(batching, size):
    some = prompts(1)
    answers = generate(NativeEngine(served("qwen3")), some, 9, kv=Paged(400, size, 0.0), batching=batching(), max_num_seqs=3)
    assert [a.token_ids for a in answers] == [theirs("qwen3", ids, 9) for ids in some]


def test_contiguous():
    some = prompts(2)
    answers = generate(NativeEngine(served("gpt2")), some, 9, kv=Contiguous(300), batching=Static(), max_num_seqs=3)
    assert [a.token_ids for a in answers] == [theirs("gpt2", ids, 9) for ids in some]


def test_linear_layers_are_packed_or_quantised_once():
    model = tiny("llama", dtype="bf16")
    plain_answers = generate(NativeEngine(model, linears="torch"), prompts(), 5)
    packed = generate(NativeEngine(model), prompts(), 5)
    assert sum(a.token_ids == b.token_ids for a, b in zip(plain_answers, packed, strict=True)) >= 4  # bf16 rounds
    with pytest.raises(ValueError, match="packed already"):
        NativeEngine(model, linears="int8")
    eight = NativeEngine(tiny("llama", dtype="bf16"), linears="int8")
    assert len(generate(eight, prompts(), 5)) == len(generate(NativeEngine(eight.model, linears="int8"), prompts(), 5))
    with pytest.raises(ValueError, match="linears='int4' is not one of auto, torch, int8"):
        NativeEngine(model, linears="int4")


@pytest.mark.slow
def test_a_compiled_decoder_gives_the_same_tokens_through_the_scheduler():
    model = tiny("qwen3")
    some = prompts(3)
    eager = generate(NativeEngine(model), some, 12, kv=Paged(160, 16, 0.0), max_num_seqs=3, token_budget=32)
    compiled = NativeEngine(model, compiled=True)
    again = generate(compiled, some, 12, kv=Paged(160, 16, 0.0), max_num_seqs=3, token_budget=32)
    assert [a.token_ids for a in again] == [a.token_ids for a in eager]
