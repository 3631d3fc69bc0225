"""Size-based policies on one slot, path by path, against a reference that knows nothing of the scheduler; then in the mean.

A job of size S tokens is a request of n = S + 1 with free prefill, pause in place and a constant step, as in test_paths.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import pytest
from harness import Ask, Case, Result, play

from lengthwise.engine.simulated.affine import Affine
from lengthwise.sched import LengthDistribution, Policy
from lengthwise.sched.policies import FCFS, HRRN, ISRTF, LAS, PSJF, SRPT, TRAIL, Gittins
from lengthwise.sched.policies.gittins import AGES
from lengthwise.sched.prediction import EDGES

STEP = 1 / 1024  # s, exact in binary
SLOT = Case((), pool=1 << 24, max_num_seqs=1, max_model_len=1 << 20, keeps_kv=True, cost=Affine(0, 0, 0, 0, decode_base=STEP))


def jobs(seed: int, num: int, load: float, mean: float = 40.0, noise: float = 0.8):
    """(arrival s, size tokens, predicted tokens of the request, at least 2)."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(mean * STEP / load, num))
    size = np.maximum(1, np.rint(rng.exponential(mean, num))).astype(int)
    return arrival, size, np.maximum(2.0, np.rint(size * rng.lognormal(0, noise, num)) + 1.0)


def through(policy: Policy, arrival, size, guess, prediction: LengthDistribution | None = None, **how) -> Result:
    """prediction: everybody's; None: each one's guess, as a point."""
    asks = tuple(
        Ask(a, 1, s + 1, 1 << 19, prediction or LengthDistribution.point(g))
        for a, s, g in zip(arrival.tolist(), size.tolist(), guess.tolist(), strict=True)
    )
    return play(Case(**{**vars(SLOT), "asks": asks}), policy=policy, check=False, **how)


Rank = Callable[[int, int, float, int], float]  # (job, tokens it has had, time s, steps so far) -> lower first


def serve_one(arrival, size, rank: Rank, may_lose: Callable[[int, int, int], bool]) -> np.ndarray:
    """Finish times (s) of one server, step by step. A job has had its first token from when it starts, at no cost.
    may_lose(job, tokens it has had, steps so far): whether it may be preempted at this boundary."""
    arrival = np.asarray(arrival).tolist()
    finish, had = np.full(len(arrival), np.nan), [0] * len(arrival)
    waiting: list[int] = []
    now, steps, coming, job = 0.0, 0, 0, -1
    while True:
        while coming < len(arrival) and arrival[coming] <= now:
            waiting.append(coming)
            coming += 1
        if job < 0 and not waiting:
            if coming == len(arrival):
                return finish
            now = arrival[coming]
            continue
        while waiting:
            best = min(waiting, key=lambda i: (rank(i, had[i], now, steps), arrival[i], i))
            if job >= 0:
                lower = rank(best, had[best], now, steps) < rank(job, had[job], now, steps)
                if not (lower and may_lose(job, had[job], steps)):
                    break
                waiting.append(job)
            waiting.remove(best)
            job, had[best] = best, max(had[best], 1)
        had[job] += 1
        now += STEP
        steps += 1
        if had[job] == size[job] + 1:
            finish[job], job = now, -1


def never(job: int, had: int, steps: int) -> bool:
    return False


def always(job: int, had: int, steps: int) -> bool:
    return True


@pytest.mark.parametrize("load", [0.7, 0.95])
@pytest.mark.parametrize("name", ["trail 0.5", "trail 0.8", "isrtf 16", "hrrn", "las 1", "las 8", "gittins 8"])
def test_the_scheduler_is_the_reference(name, load):
    arrival, size, guess = jobs(4, 350, load)

    def left(i: int, had: int, now: float, steps: int) -> float:
        return max(guess[i] - had, 1.0)

    want, policy = {
        "trail 0.5": lambda: (serve_one(arrival, size, left, lambda i, had, steps: had <= 0.5 * guess[i]), TRAIL(0.5)),
        "trail 0.8": lambda: (serve_one(arrival, size, left, lambda i, had, steps: had <= 0.8 * guess[i]), TRAIL()),
        "isrtf 16": lambda: (serve_one(arrival, size, left, lambda i, had, steps: steps % 16 == 0), ISRTF(16)),
        "hrrn": lambda: (serve_one(arrival, size, lambda i, had, now, s: -(now - arrival[i]) / guess[i], never), HRRN()),
        "las 1": lambda: (serve_one(arrival, size, lambda i, had, now, s: had, always), LAS(1)),
        "las 8": lambda: (serve_one(arrival, size, lambda i, had, now, s: had // 8, always), LAS(8)),
        "gittins 8": lambda: (serve_one(arrival, size, left, always), Gittins(8)),
    }[name]()
    got = np.array(through(policy, arrival, size, guess, keep=False).finish)
    np.testing.assert_allclose(got - arrival, want - arrival, rtol=1e-9)
    others = [through(p(), arrival, size, guess, keep=False).finish for p in (FCFS, PSJF)]
    assert all(not np.allclose(got, other) for other in others)  # the instance tells policies apart


@pytest.mark.parametrize("policy", [TRAIL, ISRTF, HRRN, LAS, Gittins])
def test_work_is_conserved_and_srpt_is_never_beaten(policy):
    arrival, size, _ = jobs(5, 300, 0.9)
    right = size + 1.0
    paths = [[s[1] for s in through(p(), arrival, size, right).log.steps if s[5]] for p in (FCFS, policy)]
    assert len(paths[0]) == size.sum() and paths[0] == paths[1]
    mean, least = (np.mean(through(p(), arrival, size, right, keep=False).finish - arrival) for p in (policy, SRPT))
    assert least <= mean + STEP


def hyperexponential(seed: int, num: int, load: float):
    """Sizes with a falling failure rate: nine in ten of mean 10, the others of mean 300. (arrival, size, distribution of n)."""
    rng = np.random.default_rng(seed)
    size = np.maximum(1, np.rint(rng.exponential(np.where(rng.random(num) < 0.9, 10.0, 300.0)))).astype(int)
    arrival = np.cumsum(rng.exponential(39.0 * STEP / load, num))
    survival = 0.9 * np.exp(-EDGES / 10.0) + 0.1 * np.exp(-EDGES / 300.0)
    return arrival, size, LengthDistribution.from_survival(survival)


def test_foreground_background_beats_fcfs_where_the_failure_rate_falls():
    """FB is optimal among the blind there (Righter and Shanthikumar 1989), and Gittins, told the distribution, is as good."""
    arrival, size, law = hyperexponential(6, 2000, 0.8)
    none = np.ones(len(size))
    mean = {
        name: float(np.mean(np.array(through(p, arrival, size, none, law, keep=False).finish) - arrival))
        for name, p in (("fcfs", FCFS()), ("fb", LAS(1)), ("las 32", LAS(32)), ("gittins", Gittins(8)))
    }
    assert mean["fb"] < 0.5 * mean["fcfs"]
    assert mean["fb"] <= 1.02 * mean["las 32"]
    assert mean["gittins"] == pytest.approx(mean["fb"], rel=0.1)


@pytest.mark.parametrize("load", [0.7, 0.95])
def test_gittins_of_a_falling_hazard_is_foreground_background_over_its_ages(load):
    """Its rank rises from each age that it tells apart to the next, so that the path is that of their order alone."""
    arrival, size, law = hyperexponential(7, 400, load)
    none, policy = np.ones(len(size)), Gittins(8)

    def cell(i: int, had: int, now: float, steps: int) -> float:
        return bisect_right(AGES, had - had % 8)

    ranks = law.gittins_ranks()[: bisect_right(AGES, int(size.max()) + 1)]
    met = sorted({bisect_right(AGES, had - had % 8) - 1 for had in range(1, int(size.max()) + 1)})
    assert np.all(np.diff([ranks[place] for place in met]) > 0)
    got = np.array(through(policy, arrival, size, none, law, keep=False).finish)
    np.testing.assert_allclose(got - arrival, serve_one(arrival, size, cell, always) - arrival, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_trail_gains_with_c_when_predictions_are_right(seed):
    """Noiseless, c leads from SJF down to SRPT (section 5.2 of Mitzenmacher, arXiv 1902.00732, has them at the ends)."""
    arrival, size, _ = jobs(seed, 2500, 0.9, mean=60.0)
    mean = [np.mean(through(TRAIL(c), arrival, size, size + 1.0, keep=False).finish - arrival) for c in (0.0, 0.5, 1.0)]
    assert mean[2] < mean[1] < mean[0]
