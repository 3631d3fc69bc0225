"""One slot, path by path: Kleinrock's conservation law, Cobham's two classes, and what the long cannot do to the short.

A job of size S tokens is a request of n = S + 1 with free prefill, pause in place and a constant step, as in test_paths.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pytest
from harness import Ask, Case, play

from lengthwise.engine.simulated.affine import Affine
from lengthwise.sched import LengthDistribution, Policy
from lengthwise.sched.policies import (
    DRR,
    FCFS,
    HRRN,
    LAS,
    LCF,
    MCSF,
    PSJF,
    SJF,
    SRPT,
    TRAIL,
    VTC,
    WRR,
    Aging,
    DeadlineGuard,
    OvertakingGuard,
    Priority,
    SoftBoost,
    VTCPredicted,
)

STEP = 1 / 1024  # s, exact in binary
point = LengthDistribution.point


@dataclass(frozen=True)
class Slot(Case):
    """One row; requests of three clients, in no even turns."""

    def requests(self):
        out = super().requests()
        for req in out[0]:
            req.client = f"client {req.rid * req.rid % 7 % 3}"
        return out


def finish(policy: Policy, arrival, size, guess=None, priority=None) -> np.ndarray:
    """Finish times (s) by job."""
    guess = np.asarray(size) + 1 if guess is None else guess
    priority = np.zeros(len(size)) if priority is None else priority
    asks = tuple(
        Ask(a, 1, s + 1, 1 << 19, point(float(g)), float(p))
        for a, s, g, p in zip(np.asarray(arrival).tolist(), np.asarray(size).tolist(), guess, priority, strict=True)
    )
    cost = Affine(0, 0, 0, 0, decode_base=STEP)
    case = Slot(asks, pool=1 << 24, max_num_seqs=1, max_model_len=1 << 20, keeps_kv=True, cost=cost)
    return np.array(play(case, policy=policy, check=False, keep=False).finish)


def jobs(seed: int, num: int, load: float, mean: float, grid: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(arrival s, size tokens, geometric). grid: arrivals at whole steps, so that no step in progress hides one."""
    rng = np.random.default_rng(seed)
    size = rng.geometric(1 / mean, num)
    arrival = np.cumsum(rng.exponential(mean * STEP / load, num))
    return np.ceil(arrival / STEP) * STEP if grid else arrival, size


# --- Kleinrock ------------------------------------------------------------------------------------------------------------

WAITING = {
    "sjf": SJF, "trail 0": lambda: TRAIL(0.0), "hrrn": HRRN, "mc_sf": MCSF, "soft_boost": SoftBoost, "vtc": VTC, "lcf": LCF,
    "vtc_predicted": VTCPredicted, "drr": lambda: DRR(50.0), "wrr": lambda: WRR("client"),
    "priority": lambda: Priority(preemptive=False), "aging": lambda: Aging(SJF(), 20.0),
    "deadline": lambda: DeadlineGuard(SJF(), wait=1.0), "overtaking": lambda: OvertakingGuard(SJF(), 5),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITING)
def test_waits_weighted_by_work_add_up_to_the_same(name):
    """Kleinrock 1965, path by path: unfinished work is one path V, and its integral is the sum of s w + s s / 2 over all jobs,
    if each is served in one piece. So nobody's wait is shortened but at somebody's cost."""
    rng = np.random.default_rng(1)
    arrival, size = jobs(2, 700, 0.9, 30.0)
    guess = np.rint((size + 1) * rng.lognormal(0, 0.5, len(size))).clip(1)
    priority = rng.integers(0, 3, len(size))
    fcfs, other = (finish(p, arrival, size, guess, priority) - arrival - size * STEP for p in (FCFS(), WAITING[name]()))
    assert min(other) > -1e-9 and not np.allclose(fcfs, other)
    assert size @ other == pytest.approx(size @ fcfs, rel=1e-9)


@pytest.mark.parametrize("make", [SRPT, PSJF, lambda: LAS(4)], ids=["srpt", "psjf", "las"])
def test_only_who_interrupts_breaks_the_law(make):
    arrival, size = jobs(2, 700, 0.9, 30.0)
    fcfs, other = (finish(p, arrival, size) - arrival - size * STEP for p in (FCFS(), make()))
    assert size @ other != pytest.approx(size @ fcfs, rel=1e-3)


# --- Cobham ---------------------------------------------------------------------------------------------------------------

MEANS, LOADS = (20.0, 60.0), (0.3, 0.5)  # of class 0, which goes first, and class 1


def classes(seed: int, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(arrival s, size tokens, class) of two Poisson streams."""
    rng = np.random.default_rng(seed)
    rates = [load / (mean * STEP) for load, mean in zip(LOADS, MEANS, strict=True)]
    which = (rng.random(num) < rates[1] / sum(rates)).astype(int)
    return np.cumsum(rng.exponential(1 / sum(rates), num)), rng.geometric(1 / np.array(MEANS)[which]), which


def two_queues(arrival, size, which) -> np.ndarray:
    """Waits (s) of one server that always takes the first of the first class."""
    out, queue, now, coming = np.empty(len(arrival)), [], 0.0, 0
    for _ in range(len(arrival)):
        if not queue:
            now = max(now, arrival[coming])
        while coming < len(arrival) and arrival[coming] <= now:
            heapq.heappush(queue, (which[coming], coming))
            coming += 1
        i = heapq.heappop(queue)[1]
        out[i] = now - arrival[i]
        now += size[i] * STEP
    return out


def test_priority_is_two_queues():
    arrival, size, which = classes(3, 1500)
    found = finish(Priority(preemptive=False), arrival, size, priority=which) - arrival - size * STEP
    np.testing.assert_allclose(found, two_queues(arrival, size, which), atol=1e-9)


def test_mean_waits_of_two_classes_are_cobhams():
    """Cobham 1954: W_k = W0 / ((1 - sigma_{k-1}) (1 - sigma_k)), W0 = the mean work left of who is served; within the interval
    of six runs, which holds neither the other class's nor that of first come, first served."""
    rates = [load / (mean * STEP) for load, mean in zip(LOADS, MEANS, strict=True)]
    second = [(2 - 1 / mean) * mean**2 * STEP**2 for mean in MEANS]  # of a geometric size
    residual = sum(rate * square for rate, square in zip(rates, second, strict=True)) / 2
    want = residual / (1 - LOADS[0]), residual / ((1 - LOADS[0]) * (1 - sum(LOADS)))
    fcfs = residual / (1 - sum(LOADS))
    means = []
    for seed in range(6):
        arrival, size, which = (column.tolist() for column in classes(seed, 40_000))
        waits, of = two_queues(arrival, size, which), np.array(which)
        means.append([waits[of == 0].mean(), waits[of == 1].mean()])
    middle, half = np.mean(means, axis=0), 2.57 * np.std(means, axis=0, ddof=1) / np.sqrt(len(means))  # t of 5, 95 %
    for k in (0, 1):
        assert abs(middle[k] - want[k]) <= half[k] < 0.1 * want[k]
        assert min(abs(middle[k] - other) for other in (want[1 - k], fcfs)) > half[k]


# --- the long and the short -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantum", "most"), [(1, 20), (8, 23)])
def test_under_foreground_background_the_long_count_only_up_to_a_jobs_size(quantum, most):
    """FB of a job of size x is of sizes cut at x: those who have more make no difference by what they have beyond it."""
    arrival, size = jobs(4, 600, 0.8, 25.0, grid=True)
    short = size <= most
    longer = np.where(short, size, 3 * size)
    one, other = (finish(LAS(quantum), arrival, s) for s in (size, longer))
    assert 0.2 < short.mean() < 0.8 and not np.array_equal(one, other)
    np.testing.assert_array_equal(one[short], other[short])
    fcfs = [finish(FCFS(), arrival, s)[short] for s in (size, longer)]
    assert not np.array_equal(*fcfs)


def test_under_preemptive_shortest_first_the_long_are_not_there():
    arrival, size = jobs(5, 600, 0.9, 25.0, grid=True)
    short = size <= 20
    alone = finish(PSJF(), arrival[short], size[short])
    np.testing.assert_array_equal(finish(PSJF(), arrival, size)[short], alone)
    assert not np.array_equal(finish(SJF(), arrival, size)[short], finish(SJF(), arrival[short], size[short]))
