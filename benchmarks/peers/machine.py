"""Child that measures this machine: bytes/s read from memory, and bf16 GEMM FLOP/s, with the job's number of threads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

NUM_BYTES = 1 << 30
SIDE = 2048


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    numbers = torch.ones(NUM_BYTES // 4 // job.get("cut", 1))
    seconds = min(best(way, 5) for way in (numbers.sum, numbers.amax, lambda: numbers.dot(numbers)))
    side = SIDE // job.get("cut", 1)
    a, b = (torch.randn(side, side).to(torch.bfloat16) for _ in range(2))
    flops = 2 * side**3 / best(lambda: a @ b, 10)
    print(json.dumps({"bandwidth": numbers.numel() * 4 / seconds, "flops": flops}))


if __name__ == "__main__":
    main()
