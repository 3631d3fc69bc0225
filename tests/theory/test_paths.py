"""One slot against theory, path by path: Lindley's recursion, a reference event simulation, and laws of sample paths.

A job of size S tokens is a request of n = S + 1 with free prefill (token 1 costs nothing), pause in place and a constant
step. Arrivals act at the next step boundary when the server is busy, at once when it is idle.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import Ask, Case, Result, play
from reference import serve_one

from lengthwise.engine.simulated.affine import Affine
from lengthwise.sched import LengthDistribution

STEP = 1 / 1024  # s, exact in binary
SLOT = Case((), pool=1 << 24, max_num_seqs=1, max_model_len=1 << 20, keeps_kv=True, cost=Affine(0, 0, 0, 0, decode_base=STEP))


def jobs(seed: int, num: int, load: float, mean: float = 500.0, noise: float = 0.0, grid: int = 0):
    """(arrival s, size tokens, predicted size tokens); noise: of the log of the prediction. grid: round all to this many."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(mean * STEP / load, num))
    size = np.maximum(1, np.rint(rng.exponential(mean, num)))
    guess = np.maximum(1, np.rint(size * rng.lognormal(0, noise, num))) if noise else size
    if grid:
        size, guess = grid * np.ceil(size / grid), grid * np.ceil(guess / grid)
        arrival = np.sort(rng.choice(int(arrival[-1] / STEP / grid) + num, num, replace=False)) * (grid * STEP)
    return arrival, size.astype(int), guess.astype(int)


def through(policy: str, arrival, size, guess, **how) -> Result:
    point = LengthDistribution.point
    asks = tuple(
        Ask(a, 1, s + 1, 1 << 19, point(float(g + 1)))
        for a, s, g in zip(arrival.tolist(), size.tolist(), guess.tolist(), strict=True)
    )
    return play(Case(**{**vars(SLOT), "asks": asks, "policy": policy}), check=False, **how)


@pytest.mark.parametrize("load", [0.5, 0.8, 1.1])
def test_fcfs_is_lindleys_recursion(load):
    arrival, size, guess = jobs(1, 3000, load)
    finish, free = np.empty(len(arrival)), 0.0
    for i, (a, s) in enumerate(zip(arrival, size, strict=True)):
        finish[i] = free = max(a, free) + s * STEP
    got = np.array(through("fcfs", arrival, size, guess, keep=False).finish)
    np.testing.assert_allclose(got - arrival, finish - arrival, rtol=1e-9)


@pytest.mark.parametrize("load", [0.6, 0.9])
@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["oracle", "noisy"])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "psjf", "srpt"])
def test_the_scheduler_is_the_reference_simulation(policy, noise, load):
    """SJF, PSJF, SRPT; with noise SPJF, PSPJF, SPRPT, an overrun clipped at one token to come."""
    arrival, size, guess = jobs(2, 3000, load, noise=noise)
    want = serve_one(policy, arrival, size, guess, STEP)
    got = np.array(through(policy, arrival, size, guess, keep=False).finish)
    np.testing.assert_allclose(got - arrival, want - arrival, rtol=1e-9)


ALL = ("fcfs", "sjf", "psjf", "srpt", "aging_srpt", "srpt_reestimate")


def test_unfinished_work_is_the_same_under_every_work_conserving_policy():
    """Every policy takes its decode steps at the same times, to the bit: so work is the same path."""
    arrival, size, guess = jobs(3, 400, 0.9, noise=0.7)
    paths = [[s[1] for s in through(p, arrival, size, guess).log.steps if s[5]] for p in ALL]
    assert len(paths[0]) == size.sum()
    for policy, path in zip(ALL[1:], paths[1:], strict=True):
        assert path == paths[0], policy


@pytest.mark.parametrize("seed", range(4))
def test_srpt_never_has_more_in_system_than_any_other_policy(seed):
    """On a grid of 8 tokens, so that a step in progress never hides an arrival (Schrage 1968)."""
    arrival, size, guess = jobs(seed, 1500, 0.9, mean=600.0, grid=8)
    srpt = np.sort(through("srpt", arrival, size, guess, keep=False).finish)
    wrong = np.random.default_rng(seed).permutation(guess)
    for policy, belief in (*((p, guess) for p in ALL), ("sjf", wrong), ("srpt", wrong)):
        other = np.sort(through(policy, arrival, size, belief, keep=False).finish)
        assert np.all(srpt <= other), policy  # the k-th departure is never later: N(t) is never greater


@pytest.mark.parametrize("policy", ["sjf", "psjf", "srpt"])
def test_burst_excess_is_the_sum_over_inverted_pairs(policy):
    """All at 0: total completion time over that of the shortest first = sum of |s_i - s_j| over pairs in wrong order."""
    rng = np.random.default_rng(5)
    size = rng.integers(1, 2000, 150)
    guess = rng.permutation(4000)[:150] + 4000  # distinct, and never outlived, so that SRPT keeps to the first order
    zeros = np.zeros(150)
    total = sum(through(policy, zeros, size, guess, keep=False).finish)
    least = sum(through(policy, zeros, size, size, keep=False).finish)
    order = size[np.argsort(guess)]
    excess = sum(max(int(order[i]) - int(order[j]), 0) for i in range(150) for j in range(i + 1, 150))
    assert (total - least) / STEP == excess > 0


@pytest.mark.parametrize("policy", ALL)
def test_littles_law(policy):
    """The time integral of the number present, counted at every step, is the sum of response times."""
    arrival, size, guess = jobs(6, 300, 0.85, noise=0.5)
    present: list[int] = []

    def watch(scheduler, plan, outcome):
        now = scheduler.num_waiting + scheduler.num_running + len(outcome.finished)
        present.extend([now] * outcome.num_steps)

    result = through(policy, arrival, size, guess, watch=watch)
    response = np.array(result.finish) - arrival
    area = sum(n * (s[1] - s[0]) for n, s in zip(present, result.log.steps, strict=True))
    # an arrival is seen at the next boundary: at most one step late, never early
    assert response.sum() - len(arrival) * STEP <= area <= response.sum() + 1e-6
    span = max(result.finish)
    assert area / span == pytest.approx(len(arrival) / span * response.mean(), rel=1e-3)
