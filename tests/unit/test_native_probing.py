"""Hidden states of rows on request are those of the library's own forward, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native import plain

from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.probing import HiddenProbe
from lengthwise.engine.native.tiny import tiny
from lengthwise.sched import INF, Request, Scheduler, recompute
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS


def probed(family, layer):
    """(prompt and answer up to the row's token, its hidden state) of request 1 of three, in each step that it emits in."""
    model = tiny(family)
    probe = None if layer is None else HiddenProbe(model, layer)
    kv, rng = Paged(640, 8, 0.0), np.random.default_rng(0)
    requests = [Request(i, 0.0, n, 6, prompt_ids=rng.integers(0, 128, n).tolist()) for i, n in enumerate((20, 9, 3))]
    scheduler = Scheduler(FCFS(), Chunked(), kv, recompute(), max_num_seqs=4, token_budget=24)
    executor = NativeEngine(model, attention="torch").executor(kv, WallClock(), probe=probe)
    for request in requests:
        scheduler.add(request)
    seen = []
    while scheduler.busy:
        plan = scheduler.plan(0.0)
        plan.probe_rows = [requests[1]]
        outcome = executor.collect(executor.submit(plan), INF)
        scheduler.book(plan, outcome)
        for request, state in outcome.probes.items():
            assert request is requests[1]
            seen.append((executor.generations[request].tokens[:-1], state))
    if probe is not None:
        probe.close()
    return seen


@pytest.mark.parametrize(("family", "layer"), [("llama", None), ("llama", 0), ("gemma3", 1), ("gpt2", 0), ("opt", -2)])
def test_states_are_those_of_the_models_own_forward(family, layer):
    seen = probed(family, layer)
    assert len(seen) == 6 and seen[0][1].dtype == np.float32
    for tokens, state in seen:
        with torch.no_grad():
            out = plain(family)(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        hidden = out.hidden_states[-1 if layer is None else range(len(out.hidden_states) - 1)[layer] + 1][0, -1]
        assert np.allclose(state, hidden.numpy(), atol=1e-4)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="layer 7 of tiny-llama: it has 2 layers"):
        HiddenProbe(tiny("llama"), 7)
