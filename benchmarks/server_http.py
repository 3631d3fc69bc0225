"""What serving over HTTP costs over `generate`, the client on the same cores: throughput, latency a token, idle connections.

`lengthwise serve` runs in a process of its own; this one is the client and, while the server idles, the offline engine, in
turns. Both make texts. Streams are server-sent events with usage, read by aiohttp.

tokens_per_s_WAY: 32 streams at once. ratio: served over offline (at least 0.8 is wanted). token_ms_WAY: time per token of one
stream, first to last. added_ms: the difference (at most 1 ms). idle_mb: what so many idle connections add to the server's
memory; server_mb: all that it then holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from report import report
from server import MODELS, all_offline, one_offline
from sweep_speed import resident

from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import warm_up
from lengthwise.experiments.bench.child import child
from lengthwise.experiments.served_stage import FIRST_COME, ServedStage

NODES = {
    "tiny": {"_target_": "lengthwise.engine.native.tiny.tiny"},
    "smollm2": {"_target_": "lengthwise.engine.native.loading.smollm2"},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--model", choices=NODES, default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--idle", type=int, default=1000, help="connections")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    engine = NativeEngine(MODELS[args.model]())
    warm_up(engine, 16)
    prompts = [[(7 * i + 3 * j) % 96 + 3 for j in range(args.prompt)] for i in range(args.streams)]
    limits = {"max_num_seqs": args.streams, "token_budget": 2048, "max_model_len": engine.model.max_positions}
    pool = {"kv_pool_tokens": args.streams * (-(-(args.prompt + args.tokens) // 16) + 1) * 16}
    stage = ServedStage(NODES[args.model], lengths="free")
    cfg = {**FIRST_COME, "limits": {**limits, **pool}, "predictor": None}
    samples: dict[str, list[float]] = {}
    with child(stage.serving(cfg, args.streams)) as server:
        for _ in range(args.repeats + 1):  # the first is the server's warm-up
            offline = one_offline(engine, prompts[0], args.tokens), all_offline(engine, prompts, args.tokens)
            one, rate = asyncio.run(asked(server.url, prompts, args.tokens))
            sample = {
                "tokens_per_s_offline": offline[1], "tokens_per_s_served": rate, "ratio": rate / offline[1],
                "token_ms_offline": offline[0] * 1e3, "token_ms_served": one * 1e3, "added_ms": (one - offline[0]) * 1e3,
            }  # fmt: skip
            for figure, value in sample.items():
                samples.setdefault(figure, []).append(value)
        samples = {figure: values[1:] for figure, values in samples.items()}
        added, whole = asyncio.run(idle(server.url, server.pid, args.idle))
    report({**samples, "idle_mb": [added], "server_mb": [whole]}, args.json)
    return 0


async def asked(url: str, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """s per token after the first of one stream alone, and tokens/s of all of them at once."""
    async with aiohttp.ClientSession(base_url=url, timeout=aiohttp.ClientTimeout(600)) as session:
        times = await stream(session, prompts[0], tokens)
        begun = time.perf_counter()
        await asyncio.gather(*(stream(session, prompt, tokens) for prompt in prompts))
        return (times[-1] - times[0]) / (tokens - 1), len(prompts) * tokens / (time.perf_counter() - begun)


async def stream(session: aiohttp.ClientSession, prompt: list[int], tokens: int) -> list[float]:
    """When each event of one answer came (s). Raises RuntimeError where it has another number of tokens."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, "stream": True}
    times, usage = [], 0
    async with session.post("/v1/completions", json={**body, "stream_options": options}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    times.append(time.perf_counter())
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
    if usage != tokens:
        raise RuntimeError(f"{usage} tokens came of {tokens}")
    return times


async def idle(url: str, pid: int, num: int) -> tuple[float, float]:
    """MB of the server that `num` idle connections add, and all that it holds with them."""
    before, at = resident(pid), urlsplit(url)
    writers = []
    for _ in range(num):
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        if not (await reader.readline()).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("the server is not well")
        writers.append(writer)
    whole = resident(pid)
    for writer in writers:
        writer.close()
    return (whole - before) / 1e6, whole / 1e6


if __name__ == "__main__":
    sys.exit(main())
