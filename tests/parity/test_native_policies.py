"""Any policy on the native engine: it plans as in simulation, and whatever the order, the preemptions and the prefix cache,
what a request is answered is the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import pytest
from harness import Ask, Case, play
from hydra.utils import instantiate
from native import play_native, served
from omegaconf import OmegaConf

from lengthwise.sched import LengthDistribution, Policy
from lengthwise.sched.policies import FCFS, LPM, DFSWeight, ResponseRatio

NODES = sorted(
    p.name.removesuffix(".yaml") for p in (files("lengthwise.conf") / "policy").iterdir() if p.name.endswith(".yaml")
)
PIECE = 8  # tokens that a name stands for


def asks(seed: int = 0, num: int = 8) -> tuple[Ask, ...]:
    """Two conversations' beginnings, answers of different lengths, three clients and priorities, predictions that are off."""
    rng, out = np.random.default_rng(seed), []
    for i in range(num):
        prompt, n = int(rng.integers(18, 36)), int(rng.integers(6, 22))
        names = [100 * (i % 2) + k if k < 2 else 1000 * i + k for k in range(prompt // PIECE)]
        guess = LengthDistribution.point(float(max(1, n + rng.integers(-4, 5))))
        out.append(Ask(0.03 * i, prompt, n, 24, guess, priority=float(i % 3), block_hashes=names, client=f"client {i % 3}"))
    return tuple(out)


TIGHT = Case(
    asks(), pool=96, block_size=4, prefix=True, hash_tokens=PIECE, max_num_seqs=3, token_budget=24, max_model_len=128,
    cost="even",
)  # fmt: skip


def node(name: str) -> Policy:
    return instantiate(OmegaConf.create((files("lengthwise.conf") / "policy" / f"{name}.yaml").read_text()))


@cache
def first_come() -> dict[int, list[int]]:
    result = play_native(TIGHT, served(), policy=FCFS())
    assert result.scheduler.num_preemptions > 0 and len(result.log.tokens) == len(TIGHT.asks)
    return result.log.tokens


@pytest.mark.parametrize("name", NODES)
def test_any_policy_answers_as_first_come_first_served_does(name):
    result, simulated = play_native(TIGHT, served(), policy=node(name)), play(TIGHT, fast_forward=False, policy=node(name))
    assert result.log.steps == simulated.log.steps and result.log.ended_at == simulated.log.ended_at
    assert result.log.tokens == first_come()
    policy = result.scheduler.policy
    looks_ahead = "future_peak" in policy.needs  # so that memory seldom runs out
    assert result.scheduler.num_preemptions > 0 or not policy.preemptive or looks_ahead


CACHE_AWARE = {
    "lpm": lambda: LPM(shared=16, piece=PIECE), "dfs_weight": lambda: DFSWeight(PIECE),
    "response_ratio": lambda: ResponseRatio(shared=16, piece=PIECE),
}  # fmt: skip


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", CACHE_AWARE)
def test_answers_do_not_depend_on_the_cache_under_an_order_by_prefix(name, copies):
    case = replace(TIGHT, asks=asks(1, 10), copy_on_write=copies)
    cached = play_native(case, served(), policy=CACHE_AWARE[name]())
    plain = play_native(replace(case, prefix=False), served(), policy=CACHE_AWARE[name]())
    assert cached.log.tokens == plain.log.tokens and len(cached.log.tokens) == 10
    assert cached.scheduler.cached_tokens > 0 == plain.scheduler.cached_tokens
    assert cached.log.steps != plain.log.steps
