"""A batched server: saturation at b / t(b), the stability knee, static batches, and the inter-token bound of chunks."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Ask, Case, play

from lengthwise.engine.simulated.affine import Affine
from lengthwise.sched import LengthDistribution

ROWS = 16
COST = Affine(8e-3, 5e-4, 0.0, 0.0)  # t(b) = 8 ms + 0.5 ms x b, free prefill
STEP = 8e-3 + ROWS * 5e-4
BATCH = Case((), pool=1 << 20, max_num_seqs=ROWS, token_budget=1 << 12, cost=COST)


def run(arrival, lengths, **changes):
    asks = tuple(Ask(a, 1, n) for a, n in zip(np.asarray(arrival).tolist(), np.asarray(lengths).tolist(), strict=True))
    return play(Case(**{**vars(BATCH), "asks": asks, **changes}), check=False)


def test_identical_jobs_take_o_steps_of_the_whole_batch():
    result = run(np.zeros(ROWS), np.full(ROWS, 201))
    assert max(result.finish) == pytest.approx(8e-3 + 200 * STEP, rel=1e-12)


def test_saturation_throughput_is_b_over_t_of_b():
    """Completions between 15 % and 85 % of a burst of 50 x b requests, in tokens per second."""
    lengths = np.random.default_rng(1).geometric(1 / 60, 50 * ROWS) + 1
    result = run(np.zeros(50 * ROWS), lengths)
    ends = np.sort(result.finish)
    low, high = int(0.15 * len(ends)), int(0.85 * len(ends))
    rate = (high - low) / (ends[high] - ends[low])
    assert rate * (lengths.mean() - 1) == pytest.approx(ROWS / STEP, rel=0.04)  # token 1 comes with the prefill, beside
    full = [s for s in result.log.steps if s[5] == ROWS and not s[2]]
    assert all(s[1] - s[0] == pytest.approx(STEP, rel=1e-9) for s in full)


def backlog_growth(load: float) -> float:
    """Growth of the backlog per arrival over the second half of the arrivals, Poisson at `load` x saturation."""
    rng = np.random.default_rng(2)
    num, mean = 3000, 60
    rate = load * ROWS / STEP / mean
    arrival, lengths = np.cumsum(rng.exponential(1 / rate, num)), rng.geometric(1 / mean, num) + 1
    finish = np.sort(run(arrival, lengths).finish)
    backlog = np.arange(1, num + 1) - np.searchsorted(finish, arrival)
    return float(np.polyfit(np.arange(num // 4, num), backlog[num // 4 :], 1)[0])


def test_the_stability_knee_is_where_the_saturation_throughput_is():
    """Above the knee the backlog grows by (1 - 1 / load) per arrival; the knee follows from the line, within a few percent."""
    assert abs(backlog_growth(0.8)) < 0.01
    growth = backlog_growth(1.3)
    assert growth > 0.1
    knee = 1.3 * (1.0 - growth)  # load that the server carries
    assert knee == pytest.approx(1.0, rel=0.05)


def test_a_static_batch_takes_its_longest_member():
    """Every batch of k runs max(n) - 1 decode steps, all of k rows wide: efficiency is E[n] / E[max]; continuous: near 1."""
    k, num = 8, 8 * 400
    lengths = np.random.default_rng(3).geometric(1 / 50, num) + 1
    result = run(np.zeros(num), lengths, max_num_seqs=k, batching="static")
    steps, batches = [], lengths.reshape(-1, k)
    for _, _, chunks, _, _, num_decode, num_padding, _ in result.log.steps:
        if chunks:
            steps.append(0)
        else:
            assert num_decode + num_padding == k
            steps[-1] += 1
    assert steps == (batches.max(axis=1) - 1).tolist()
    harmonic = sum(1 / i for i in range(1, k + 1))
    assert np.mean(steps) == pytest.approx(50 * harmonic, rel=0.04)  # E[max] of k geometric lengths, as of exponential ones
    free = run(np.zeros(num), lengths, max_num_seqs=k)
    rows = sum(s[5] for s in free.log.steps)
    assert rows / (k * sum(s[5] > 0 for s in free.log.steps)) > 0.95  # a row stands still only while it is prefilled


@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
def test_no_decode_waits_longer_than_one_full_mixed_step(policy, budget):
    """Sarathi-Serve's bound on inter-token latency, absent preemption: one step of the whole token budget."""
    rng = np.random.default_rng(4)
    cost = Affine(8e-3, 2.3e-5, 1.7e-7, 6.1e-5, 3e-9)
    arrival = np.cumsum(rng.exponential(0.05, 300))
    asks = tuple(
        Ask(float(a), int(rng.integers(1, 3000)), int(n), prediction=LengthDistribution.point(float(n)))
        for a, n in zip(arrival, rng.geometric(1 / 40, 300), strict=True)
    )
    case = Case(
        asks, policy, pool=1 << 22, max_num_seqs=48 if policy == "fcfs" else 400, token_budget=max(budget, 400), cost=cost
    )
    result = play(case, plain=True, check=False)
    assert result.scheduler.num_preemptions == 0
    gaps = [np.diff(t).max() for t in result.executor.token_times.values() if len(t) > 1]
    context = max(s[7] for s in result.log.steps)
    rows = max(s[5] for s in result.log.steps)
    bound = cost.base + rows * cost.per_row + context * cost.per_context + case.token_budget * (6.1e-5 + 3e-9 * 3000)
    assert max(gaps) <= bound
    assert max(gaps) > 0.5 * bound  # and it is not an empty one
