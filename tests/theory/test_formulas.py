"""The reference simulation of test_paths against the formulas of queueing theory. Minutes, so marked slow.

M/M/1 with mean size 1: Pollaczek-Khinchine, Schrage and Miller, and for exponential predictions (mean = the size)
Mitzenmacher, arXiv 1902.00732. FCFS, whose mean is known exactly, is the control variate: both policies see the same path.
"""

from __future__ import annotations

import numpy as np
import pytest
from reference import serve_one

TOKENS = 1 << 17  # mean size: fine enough that the token grid is far below the tolerance
NUM = {0.5: 400_000, 0.8: 1_000_000, 0.9: 2_000_000}
MEAN = {  # mean response times
    (0.5, "sjf"): 1.7127, (0.8, "sjf"): 2.8822, (0.9, "sjf"): 4.1969,
    (0.5, "psjf"): 1.5314, (0.8, "psjf"): 2.6589, (0.9, "psjf"): 4.0518,
    (0.5, "srpt"): 1.4254, (0.8, "srpt"): 2.3528, (0.9, "srpt"): 3.5521,
}  # fmt: skip


def path(load: float, seed: int):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / load, NUM[load]))
    size = np.maximum(1, np.rint(rng.exponential(TOKENS, NUM[load]))).astype(int)
    return rng, arrival, size


def fcfs(arrival: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Response times (s) by Lindley's recursion, unrolled: finish = work so far + the greatest idle time needed."""
    work = np.cumsum(size / TOKENS)
    return work + np.maximum.accumulate(arrival - np.concatenate(([0.0], work[:-1]))) - arrival


def controlled(response: np.ndarray, control: np.ndarray, known: float, batches: int = 100) -> float:
    """Mean of `response`, corrected by how far the mean of `control` is from what it is known to be."""
    num = len(response) // batches * batches
    a, b = response[:num].reshape(batches, -1).mean(1), control[:num].reshape(batches, -1).mean(1)
    beta = np.cov(a, b)[0, 1] / b.var(ddof=1)
    return float(response.mean() - beta * (control.mean() - known))


def tolerance(load: float) -> float:
    return 0.02 if load == 0.9 else 0.01


@pytest.mark.slow
@pytest.mark.parametrize("load", NUM)
def test_mm1(load):
    _, arrival, size = path(load, 11)
    control, known = fcfs(arrival, size), 1.0 / (1.0 - load)
    assert control.mean() == pytest.approx({0.5: 2.0, 0.8: 5.0, 0.9: 10.0}[load], rel=0.03)
    few = slice(0, 20_000)
    np.testing.assert_allclose(serve_one("fcfs", arrival[few], size[few], size[few], 1 / TOKENS) - arrival[few], control[few])
    for policy in ("sjf", "psjf", "srpt"):
        response = serve_one(policy, arrival, size, size, 1 / TOKENS) - arrival
        assert controlled(response, control, known) == pytest.approx(MEAN[load, policy], rel=tolerance(load)), policy


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "mean"), [("sjf", 3.373), ("srpt", 3.135)], ids=["spjf", "sprpt"])
def test_mm1_with_exponential_predictions(policy, mean):
    rng, arrival, size = path(0.8, 12)
    guess = np.maximum(1, np.rint(rng.exponential(size))).astype(int)
    response = serve_one(policy, arrival, size, guess, 1 / TOKENS) - arrival
    assert controlled(response, fcfs(arrival, size), 5.0) == pytest.approx(mean, rel=0.01)


def test_mm1_in_short():
    """The same with 60,000 jobs at load 0.8, so that the default run notices a broken reference."""
    _, arrival, size = (x[:60_000] if isinstance(x, np.ndarray) else x for x in path(0.8, 13))
    control = fcfs(arrival, size)
    for policy in ("sjf", "psjf", "srpt"):
        response = serve_one(policy, arrival, size, size, 1 / TOKENS) - arrival
        assert controlled(response, control, 5.0, batches=20) == pytest.approx(MEAN[0.8, policy], rel=0.05), policy
