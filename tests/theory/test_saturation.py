"""The saturation rate against its closed form: b / (o t(b)) requests/s for outputs of o tokens, free prefill, batches of b."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise.engine.simulated.affine import Affine
from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.experiments.dataset import Dataset
from lengthwise.experiments.saturation import measure_saturation
from lengthwise.experiments.simulate import compose

BASE, ROW = 8e-3, 5e-4  # t(b) = 8 ms + 0.5 ms x b


def rate_of(lengths, rows: int, **limits) -> float:
    """The measured saturation rate of prompts of one token with these output lengths."""
    lengths = np.asarray(lengths, dtype=np.int64)
    dataset = Dataset("made_up", np.ones(len(lengths), np.int64), lengths, "tokens", "a generator", "none")
    cost = Affine(0.0, ROW, 0.0, 0.0, decode_base=BASE)
    hardware = Hardware("made_up", "none", 1e9, 0, 0, 1, cost, {"range": "everywhere"}, memory_share=1.0)
    cfg = compose(workload=dataset, hardware=hardware, max_num_seqs=rows, **limits)
    found = measure_saturation(cfg)
    assert found["num_requests"] == 20 * rows and found["num_preemptions"] == 0
    return found["rate"]


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("length", [2, 50, 400])
def test_equal_outputs_in_step_with_each_other(rows, length):
    """They start and end together, so a batch takes exactly o - 1 steps: token 1 comes with the prefill, which is free."""
    assert rate_of([length] * 20 * rows, rows) == pytest.approx(rows / ((length - 1) * (BASE + ROW * rows)), rel=1e-9)


@pytest.mark.parametrize("rows", [8, 64])
def test_outputs_out_of_step(rows):
    """Prompts enter one a step, so slots empty at different times: within b / N of the closed form of o steps a request."""
    length = 400
    found = rate_of([length] * 20 * rows, rows, token_budget=rows)  # what is left beside b - 1 decodes: one prompt
    assert found == pytest.approx(rows / (length * (BASE + ROW * rows)), rel=1 / 20)


def test_mixed_outputs_go_by_their_mean():
    rows = 32
    lengths = np.random.default_rng(3).geometric(1 / 200, 20 * rows) + 1
    assert rate_of(lengths, rows) == pytest.approx(rows / (lengths.mean() * (BASE + ROW * rows)), rel=1 / 20)
