"""One server, written without the scheduler: jobs in tokens, one key, preemption at step boundaries."""

from __future__ import annotations

import heapq
import math

import numpy as np


def serve_one(policy: str, arrival, size, guess, step: float) -> np.ndarray:
    """Finish times (s). A job's key counts its predicted tokens to come, the first included until it has started; never
    below one. An arrival acts at the next step boundary of a busy server, at once on an idle one."""
    preempts, moves = policy in ("psjf", "srpt"), policy == "srpt"
    arrival, size, guess = np.asarray(arrival).tolist(), np.asarray(size).tolist(), np.asarray(guess).tolist()
    finish, done = np.full(len(arrival), np.nan), [0] * len(arrival)

    def key(i: int) -> tuple[float, float, int]:
        if policy == "fcfs":
            return arrival[i], arrival[i], i
        left = guess[i] + 1 - (done[i] + 1 if started[i] else 0) if moves else guess[i] + 1
        return max(left, 1), arrival[i], i

    started = [False] * len(arrival)
    queue: list[tuple[float, float, int]] = []
    now, coming, job = 0.0, 0, -1
    while True:
        while coming < len(arrival) and arrival[coming] <= now:
            heapq.heappush(queue, key(coming))
            coming += 1
        if job < 0 and not queue:
            if coming == len(arrival):
                return finish
            now = arrival[coming]
            continue
        if queue and (job < 0 or (preempts and queue[0][0] < key(job)[0])):
            other = heapq.heappop(queue)[2]
            if job >= 0:
                heapq.heappush(queue, key(job))
            job, started[other] = other, True
        until = arrival[coming] if coming < len(arrival) else math.inf
        left = size[job] - done[job]
        steps = min(left, max(1, math.ceil((until - now) / step))) if until < math.inf else left
        done[job] += steps
        now += steps * step
        if done[job] == size[job]:
            finish[job], job = now, -1
