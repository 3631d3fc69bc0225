"""What serving live costs over `generate`: latency added to a token with one stream, and the throughput left with 32.

In one process, without HTTP, for a tiny random model and SmolLM2-135M: the same prompts and lengths through `generate` and
through a Service with one reader task a stream, in turns. Both make texts where there is a tokenizer; `generate` includes its
set-up.

token_ms_WAY_MODEL: time per token of one stream, first to last. added_ms_MODEL: the difference. delay_ms_MODEL: from the end of
a step to its reader (median; p99_...). tokens_per_s_WAY_MODEL, and ratio_MODEL: served over offline, N streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import report

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import generate, warm_up
from lengthwise.engine.native.loading import smollm2
from lengthwise.engine.native.sampling import SamplingParams
from lengthwise.engine.native.tiny import tiny
from lengthwise.engine.server.service import Service
from lengthwise.engine.server.streams import Stream
from lengthwise.sched import pause
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS

MODELS = {"tiny": tiny, "smollm2": smollm2}
BLOCK = 16
FREE = SamplingParams(ignore_eos=True)  # all lengths are as asked


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the model; none: as torch has them")
    args = parser.parse_args(argv)
    samples: dict[str, list[float]] = {}
    for name in args.models:
        engine = NativeEngine(MODELS[name](), threads=args.threads)
        measured = measure(engine, args.streams, args.prompt, args.tokens, args.repeats)
        samples |= {f"{figure}_{name}": values for figure, values in measured.items()}
    report(samples, args.json)
    return 0


def measure(engine: NativeEngine, num: int, prompt_len: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Samples by figure, one a repeat."""
    warm_up(engine, BLOCK)
    out: dict[str, list[float]] = {}
    prompts = [[(7 * i + 3 * j) % 96 + 3 for j in range(prompt_len)] for i in range(num)]
    for _ in range(repeats):
        offline = (one_offline(engine, prompts[0], tokens), all_offline(engine, prompts, tokens))
        one, delays, rate = asyncio.run(served(engine, prompts, tokens))
        sample = {
            "token_ms_offline": offline[0] * 1e3, "token_ms_served": one * 1e3, "added_ms": (one - offline[0]) * 1e3,
            "delay_ms": statistics.median(delays) * 1e3, "p99_delay_ms": sorted(delays)[int(0.99 * len(delays))] * 1e3,
            "tokens_per_s_offline": offline[1], "tokens_per_s_served": rate, "ratio": rate / offline[1],
        }  # fmt: skip
        for figure, value in sample.items():
            out.setdefault(figure, []).append(value)
    return out


def pool(num: int, prompt_len: int, tokens: int) -> Paged:
    return Paged(num * -(-(prompt_len + tokens) // BLOCK) * BLOCK, BLOCK, 0.0)


def timed_offline(engine: NativeEngine, prompts: list[list[int]], tokens: int) -> float:
    texts = engine.model.tokenizer is not None
    kv = pool(len(prompts), len(prompts[0]), tokens)
    begun = time.perf_counter()
    generate(engine, prompts, tokens, FREE, kv=kv, max_num_seqs=len(prompts), texts=texts)
    return time.perf_counter() - begun


def one_offline(engine: NativeEngine, prompt: list[int], tokens: int) -> float:
    """s per token after the first."""
    whole, first = timed_offline(engine, [prompt], tokens), timed_offline(engine, [prompt], 1)
    return (whole - first) / (tokens - 1)


def all_offline(engine: NativeEngine, prompts: list[list[int]], tokens: int) -> float:
    """Tokens/s."""
    return len(prompts) * tokens / timed_offline(engine, prompts, tokens)


async def served(engine: NativeEngine, prompts: list[list[int]], tokens: int) -> tuple[float, list[float], float]:
    """s per token of one stream, s from each step to its reader, and tokens/s of all streams at once."""
    kv = pool(len(prompts), len(prompts[0]), tokens)
    service = Service(
        engine, kv, FCFS(), Chunked(), pause(), max_num_seqs=len(prompts), token_budget=2048,
        max_model_len=engine.model.max_positions,
    )  # fmt: skip
    service.start(asyncio.get_running_loop())

    async def submit(key: str, prompt: list[int]) -> Stream:
        return await service.submit(key, prompt, tokens, FREE)

    came = await read(service, await submit("one", prompts[0]))
    times, delays = [at for at, _ in came], [at - delta.time for at, delta in came]
    begun = time.perf_counter()
    streams = [await submit(str(i), prompt) for i, prompt in enumerate(prompts)]
    await asyncio.gather(*(read(service, stream) for stream in streams))
    rate = len(prompts) * tokens / (time.perf_counter() - begun)
    await service.close()
    return (times[-1] - times[0]) / (tokens - 1), delays, rate


async def read(service: Service, stream: Stream) -> list[tuple[float, Any]]:
    """(s of the service's clock, Delta) as they come."""
    came: list[tuple[float, Any]] = []
    while not came or came[-1][1].reason is None:
        delta = await stream.next()
        came.append((service.now, delta))
    return came


if __name__ == "__main__":
    sys.exit(main())
