"""Erlang's C: k slots at constant speed are an M/M/k queue. Path by path against a reference, then that against the formula.

A job of size S is S + 1 tokens: the free prefill emits the first, each further one takes a step of constant length, however
many rows decode beside it.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from harness import TICK, Ask, Case, play

TOKENS = 2000  # mean size in steps: a step is far below what is measured
MEAN = TOKENS * TICK  # s


def erlang_c(k: int, load: float) -> float:
    """The share of arrivals that wait in M/M/k; load: rate x mean service / k."""
    offered = load * k
    blocked = 1.0
    for i in range(1, k + 1):  # Erlang B, by its recursion
        blocked = offered * blocked / (i + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def path(k: int, load: float, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals (s) and sizes (steps) at `load` of k slots."""
    rng = np.random.default_rng(seed)
    size = np.maximum(1, np.rint(rng.exponential(TOKENS, num))).astype(int)
    return np.cumsum(rng.exponential(MEAN / (k * load), num)), size


def waits(arrival: np.ndarray, service: np.ndarray, k: int) -> np.ndarray:
    """FCFS waits (s) of k servers: each job takes the one that is free first."""
    free = [0.0] * k
    out = np.empty(len(arrival))
    for i, (at, length) in enumerate(zip(arrival.tolist(), service.tolist(), strict=True)):
        start = max(at, free[0])
        out[i] = start - at
        heapq.heapreplace(free, start + length)
    return out


def controlled(found: np.ndarray, control: np.ndarray, known: float, batches: int = 50) -> float:
    """The mean of `found`, corrected by how far the mean of `control` is from the one it is known to have."""
    num = len(found) // batches * batches
    a, b = (x[:num].reshape(batches, -1).mean(1) for x in (found, control))
    return float(found.mean() - np.cov(a, b)[0, 1] / b.var(ddof=1) * (control.mean() - known))


@pytest.mark.parametrize(("k", "load"), [(4, 0.8), (16, 0.9)])
def test_slots_at_constant_speed_are_k_servers(k, load):
    """Every single wait, but for what the grid of steps adds: arrivals act at boundaries, a prefill takes part in a step."""
    arrival, size = path(k, load, 2000, 5)
    asks = tuple(Ask(float(a), 1, int(s) + 1, max_new_tokens=1 << 20) for a, s in zip(arrival, size, strict=True))
    result = play(Case(asks, "fcfs", max_num_seqs=k, pool=1 << 27, max_model_len=1 << 21, cost="tick"), check=False)
    found = np.array([r._first_scheduled for r in result.requests]) - arrival
    want = waits(arrival, size * TICK, k)
    assert want.max() > MEAN  # there is something to be seen
    assert found.mean() == pytest.approx(want.mean(), rel=0.01)
    assert np.abs(found - want).max() < 0.05 * MEAN


@pytest.mark.parametrize(
    ("k", "load", "num"),
    [(4, 0.8, 60_000), (16, 0.8, 600_000), pytest.param(4, 0.9, 2_000_000, marks=pytest.mark.slow)],
)
def test_mean_wait_is_erlangs(k, load, num):
    """C(k, a) / (k mu - lambda); the control variate is one server k times as fast on the same path, an M/M/1."""
    arrival, size = path(k, load, num, 7)
    service = size * TICK
    found, control = waits(arrival, service, k), waits(arrival, service / k, 1)
    spare = (1 - load) * k / MEAN  # k mu - lambda, requests/s
    want, known = erlang_c(k, load) / spare, load / spare
    assert controlled(found, control, known) == pytest.approx(want, rel=0.03 if num < 100_000 else 0.01)


def test_erlang_c_of_known_cases():
    """One server waits with its load; the limits; and the textbook's five servers at four erlangs."""
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(5, 0.8) == pytest.approx(0.5541, abs=1e-4)
    assert erlang_c(200, 0.5) < 1e-6 and math.isclose(erlang_c(3, 1 - 1e-9), 1.0, rel_tol=1e-6)
