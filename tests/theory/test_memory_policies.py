"""MC-SF in the paper's model (arXiv 2502.07115): unit rounds, a job of prompt s and o tokens holds s + j in its j-th round.

The engine runs it in blocks of one token, with steps of one second whatever is in them.
"""

from __future__ import annotations

from importlib.resources import files
from itertools import product

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.sched import Event, EventKind, LengthDistribution, Preemption, Request, Scheduler, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS, MCSF, SJF, AMin, Wait
from lengthwise.sched.rehearsal import JumpingClock, Log, PlainExecutor, Script

Job = tuple[int, int, int]  # arrival (s), prompt (tokens), output (tokens)


def run(policy, jobs: list[Job], memory: int, guesses=None, watch=None):
    """(first scheduled, finish) by job, and the scheduler at the end."""
    clock, reqs = JumpingClock(), []
    for rid, (arrival, prompt, out) in enumerate(jobs):
        guess = float(out) if guesses is None else guesses[rid]
        guess = guess if isinstance(guess, LengthDistribution) else LengthDistribution.point(float(guess))
        reqs.append(Request(rid, float(arrival), prompt, max(out, 1) + 100, prediction=guess))
    for req, (_, _, out) in zip(reqs, jobs, strict=True):
        req.max_new_tokens = out if guesses is None else max(out, memory - req.prompt_len)
    engine = Scheduler(
        policy, Chunked(), Paged(memory, 1, 0.0), Preemption(False), max_num_seqs=64, token_budget=1 << 14, check=True
    )
    log = Log(max_steps=20_000, watch=watch)
    executor = PlainExecutor(clock, lambda *_: 1.0, [out for _, _, out in jobs])
    serve(Script([Event(r.arrival, EventKind.ARRIVAL, r) for r in reqs]), engine, executor, clock, log)
    return [r._first_scheduled for r in reqs], [log.ended_at[r.rid][2] for r in reqs], engine


def fits(starts: list[tuple[int, Job]], memory: int) -> bool:
    """Whether jobs started then never hold more than the memory, in any round."""
    last = max((p + job[2] for p, job in starts), default=0)
    return all(sum(job[1] + t - p for p, job in starts if p < t <= p + job[2]) <= memory for t in range(1, last + 1))


def reference(jobs: list[Job], memory: int) -> list[int]:
    """MC-SF round by round: who runs goes on; of those who wait, shortest first, the longest prefix that fits to the end."""
    start: dict[int, int] = {}
    t = 0
    while len(start) < len(jobs):
        runs = [(p, jobs[i]) for i, p in start.items() if p + jobs[i][2] > t]
        waits = sorted((jobs[i][2], jobs[i][0], i) for i in range(len(jobs)) if i not in start and jobs[i][0] <= t)
        for _, _, i in waits:
            if not fits([*runs, (t, jobs[i])], memory):
                break
            start[i] = t
            runs.append((t, jobs[i]))
        t += 1
    return [start[i] for i in range(len(jobs))]


def drawn(seed: int, num: int, longest: int, spread: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.integers(0, spread + 1, num))
    return [(int(a), int(s), int(o)) for a, s, o in zip(arrival, *rng.integers(1, longest + 1, (2, num)), strict=True)]


@pytest.mark.parametrize("spread", [0, 12])
def test_the_policy_is_the_papers_algorithm(spread):
    """Every start, against the paper's test at every round, one by one."""
    for seed in range(40):
        jobs = drawn(seed, 14, 9, spread)
        memory = 20 + seed % 17
        starts, finish, engine = run(MCSF(), jobs, memory)
        assert starts == reference(jobs, memory), (seed, jobs)
        assert finish == [p + o for p, (_, _, o) in zip(starts, jobs, strict=True)]  # nobody was ever interrupted
        assert engine.num_preemptions == 0


def test_feasible_at_every_predicted_end_and_never_above_the_pool():
    """At every plan of long runs; plain SJF in the same pool is not, and pays by preemption."""
    for seed in range(4):
        jobs = drawn(100 + seed, 150, 40, 200)
        memory, seen = 160, []

        def watch(scheduler, plan, outcome, seen=seen, memory=memory):
            rows = [(r.prediction.mean() - scheduler.generated(r), r.prompt_len + scheduler.generated(r))
                    for r in scheduler.running]  # fmt: skip
            need = [sum(held + end for left, held in rows if left >= end) for end, _ in rows]
            seen.append(max(need, default=0))
            assert scheduler.kv.num_blocks - scheduler.kv.free <= memory

        _, _, engine = run(MCSF(), jobs, memory, watch=watch)
        assert engine.num_preemptions == 0 and max(seen) <= memory and max(seen) >= 0.9 * memory
        assert run(SJF(), jobs, memory)[2].num_preemptions > 0


def best(jobs: list[Job], memory: int) -> int:
    """The least total latency of any non-preemptive schedule, by trying all starts."""
    horizon = max(a for a, _, _ in jobs) + sum(o for _, _, o in jobs)
    least = sum(o for _, _, o in jobs) + len(jobs) * horizon
    spans = [range(a, horizon - o + 1) for a, _, o in jobs]
    for starts in product(*spans):
        total = sum(p + o - a for p, (a, _, o) in zip(starts, jobs, strict=True))
        if total < least and fits(list(zip(starts, jobs, strict=True)), memory):
            least = total
    return least


def test_never_better_than_hindsight_and_mostly_near_it():
    """Against the optimum by brute force on tiny instances, and against the bounds that no schedule beats."""
    ratios = []
    for seed in range(16):
        jobs = drawn(seed, 4, 3, 2)
        memory = 6 + seed % 4
        finish = run(MCSF(), jobs, memory)[1]
        total = sum(f - a for f, (a, _, _) in zip(finish, jobs, strict=True))
        least = best(jobs, memory)
        assert total >= least, (jobs, memory)
        assert total >= sum(o for _, _, o in jobs)
        ratios.append(total / least)
    assert np.mean(ratios) < 1.1 and max(ratios) > 1.0  # near, and no optimum itself


NODES = sorted(p.name for p in (files("lengthwise.conf") / "policy").iterdir() if p.name.endswith(".yaml"))


@pytest.mark.parametrize("name", NODES)
def test_no_policy_beats_the_area_bounds(name):
    """All at 0: the memory that jobs sweep over, a_i = o s + o (o + 1) / 2, cannot pass through the pool any faster; and none
    ends before it has had its rounds."""
    for seed, memory in ((0, 80), (1, 140)):
        jobs = drawn(seed, 40, 20, 0)
        area = np.sort([o * s + o * (o + 1) / 2 for _, s, o in jobs])
        policy = instantiate(OmegaConf.create((files("lengthwise.conf") / "policy" / name).read_text()))
        _, finish, _ = run(policy, jobs, memory)
        assert max(finish) >= area.sum() / memory
        assert sum(finish) >= np.cumsum(area).sum() / memory
        assert all(f >= o for f, (_, _, o) in zip(finish, jobs, strict=True))


def test_the_area_bounds_are_near_what_can_be_had():
    """So that a simulator that let much of the memory lie idle would be noticed."""
    jobs = drawn(0, 40, 20, 0)
    area = sum(o * s + o * (o + 1) / 2 for _, s, o in jobs)
    assert max(run(MCSF(), jobs, 140)[1]) < 1.5 * area / 140


def test_wrong_predictions_end_all_the_same():
    """Outlived by far, or never reached: memory runs out or lies idle, and everybody is served."""
    jobs = drawn(7, 60, 25, 60)
    rng = np.random.default_rng(0)
    for factor in (0.2, 3.0):
        guesses = [max(1.0, round(o * factor * rng.lognormal(0, 0.5))) for _, _, o in jobs]
        _, finish, engine = run(MCSF(), jobs, 70, guesses)
        assert len(finish) == 60 and (engine.num_preemptions > 0) == (factor < 1)


# --- A_min (arXiv 2508.14544) ---------------------------------------------------------------------------------------------


def intervals(seed: int, num: int, low: float, high: float):
    """(jobs, predictions): one prompt for all, lengths anywhere within an interval that is told, ends and all."""
    rng = np.random.default_rng(seed)
    jobs = [(0, 3, int(o)) for o in rng.integers(low, high + 1, num)]
    wide = LengthDistribution.from_quantiles([0.1, 0.5, 0.9], [low, (low + high) / 2, high])
    return jobs, [wide] * num


def test_a_min_is_mc_sf_where_the_interval_is_a_point():
    for seed in range(10):
        jobs = drawn(seed, 20, 9, 8)
        assert run(AMin(), jobs, 30)[:2] == run(MCSF(), jobs, 30)[:2]


def test_a_min_starts_at_the_lower_end_and_evicts_the_smallest_bound():
    """In every eviction nobody who stays has a smaller bound, and the bound of who goes is what it has."""
    jobs, told = intervals(0, 40, 2, 30)
    seen = []

    class Watching(AMin):
        def victim(self, running, view):
            running = list(running)
            chosen = super().victim(running, view)
            seen.append(self.key(chosen, view))
            assert all(self.key(chosen, view) <= self.key(r, view) for r in running)
            assert self.key(chosen, view) == max(told[chosen.rid].quantile(0.1), view.generated(chosen))
            return chosen

    _, finish, engine = run(Watching(), jobs, 120, told)
    assert engine.num_preemptions >= 5 and len(set(seen)) > 2 and len(finish) == 40


def test_a_min_is_better_than_the_upper_end_the_wider_the_interval():
    """The paper's A_max reserves the upper end: what it loses grows with the interval's width."""
    gaps = []
    for low in (25, 2):
        ratio = []
        for seed in range(4):
            jobs, told = intervals(seed, 60, low, 30)
            least, most = (sum(run(policy, jobs, 150, told)[1]) for policy in (AMin(), MCSF(0.9)))
            area = np.sort([o * s + o * (o + 1) / 2 for _, s, o in jobs])
            assert min(least, most) >= np.cumsum(area).sum() / 150
            ratio.append(least / most)
        gaps.append(np.mean(ratio))
    assert gaps[1] < gaps[0] <= 1.05 and gaps[1] < 0.9


# --- WAIT (arXiv 2504.11320) ----------------------------------------------------------------------------------------------


def test_wait_lets_in_a_batchful_at_a_time():
    """One comes every second and runs for ten: they start three by three, but for the first, which finds nobody there."""
    jobs = [(t, 2, 10) for t in range(13)]
    starts = run(Wait(3), jobs, 1000)[0]
    assert starts == [0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12]
    burst = run(Wait(3), [(0, 2, 10)] * 8, 1000)[0]
    assert burst == [0, 0, 0, 1, 1, 1, 11, 11]  # three a step while three wait; the last two when nobody runs any more


def test_wait_with_a_threshold_of_one_is_fcfs_one_a_step():
    jobs = [(2 * t, 2, 5) for t in range(12)]
    assert run(Wait(1), jobs, 1000)[:2] == run(FCFS(), jobs, 1000)[:2]


def test_wait_refuses_a_threshold_of_nobody():
    with pytest.raises(ValueError, match="threshold=0"):
        Wait(0)
