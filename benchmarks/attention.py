"""Paged attention of the CPU: decode beside the time that its KV bytes need, prefill beside SDPA on contiguous tensors.

All in one run, interleaved: read bandwidth of the cores (a sum over a large tensor, as torch allocates it and in large pages),
decode by the C++ kernel and in plain torch, with KV out of the caches (pools rotated). `decode_DTYPE_BxL_limit_ratio` is the
kernel's time over that of its KV bytes at the first bandwidth, `..._large_pages_ratio` at the second, `..._torch_ratio` plain
torch over the kernel, `prefill_DTYPE_NofL_sdpa_ratio` SDPA over the kernel, for a chunk of the last N of L tokens. 32 query and
8 KV heads of 64; ratios are of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from report import report
from torch import Tensor

from lengthwise.engine.native.attention.backend import Attention
from lengthwise.engine.native.attention.choose import choose
from lengthwise.engine.native.batch import Batch, Placed
from lengthwise.engine.native.pool import LayerSpec, Pool

NUM_HEADS, NUM_KV_HEADS, DIM, BLOCK = 32, 8, 64, 16
SPEC = LayerSpec(NUM_KV_HEADS, DIM, DIM)
DECODE = [(1, 2048), (8, 512), (8, 2048), (32, 128), (32, 512), (32, 2048), (64, 512)]
PREFILL = [(512, 512), (512, 2048), (64, 1024)]


def batch_of(rows: list[tuple[int, int]], num_decode: int, tables: Tensor) -> Batch:
    counts = [queries for queries, _ in rows]
    none, lens = torch.zeros(0, dtype=torch.int64), [context for _, context in rows]
    starts = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
    contexts = torch.tensor(lens, dtype=torch.int32)
    return Batch(none, none, starts, contexts, num_decode, max(counts), max(lens), none, [Placed(none, tables)])


def filled(attention: Attention, num_tokens: int, dtype: str) -> Pool:
    pool = attention.new_pool(SPEC, num_tokens // BLOCK, BLOCK, dtype, torch.device("cpu"))
    part = torch.randn(4096, NUM_KV_HEADS, DIM, dtype=torch.bfloat16)
    for start in range(0, num_tokens, 4096):
        slots = torch.arange(start, min(start + 4096, num_tokens))
        attention.store(pool, part[: len(slots)], part[: len(slots)], slots)
    return pool


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def decode(
    samples: dict[str, list[float]],
    num_rows: int,
    length: int,
    dtype: str,
    repeats: int,
    calls: int,
    read: dict[str, Tensor],
    cold: int,
) -> None:
    """Each repeat: bandwidth, then the best of `calls` of either backend, every call on another pool."""
    name, tables = f"decode_{dtype}_{num_rows}x{length}", torch.randperm(num_rows * length // BLOCK).int().view(num_rows, -1)
    batch = batch_of([(1, length)] * num_rows, num_rows, tables)
    query = torch.randn(num_rows, NUM_HEADS, DIM, dtype=torch.bfloat16)
    kernel, plain = choose("cpu"), choose("torch")
    first = filled(kernel, num_rows * length, dtype)
    pools = [first, *(filled(kernel, num_rows * length, dtype) for _ in range(-(-cold // first.num_bytes)))]
    others = [filled(plain, num_rows * length, dtype) for _ in range(min(2, len(pools)))]

    def best(attention: Attention, among: list[Pool], count: int) -> float:
        return min(
            seconds(lambda i=i: attention.attend(among[i % len(among)], query, batch, 0, DIM**-0.5, None, None))
            for i in range(count)
        )

    for _ in range(repeats):
        bandwidth = {pages: big.nbytes / min(seconds(big.sum) for _ in range(10)) for pages, big in read.items()}
        ours, torchs = best(kernel, pools, calls), best(plain, others, max(2, calls // 10))
        for pages, rate in bandwidth.items():
            samples.setdefault(f"read_bandwidth_{pages}_gb_per_s", []).append(rate / 1e9)
        samples.setdefault(f"{name}_ms", []).append(ours * 1e3)
        samples.setdefault(f"{name}_limit_ratio", []).append(ours * bandwidth["usual"] / first.num_bytes)
        samples.setdefault(f"{name}_large_pages_ratio", []).append(ours * bandwidth["large"] / first.num_bytes)
        samples.setdefault(f"{name}_torch_ratio", []).append(torchs / ours)


def prefill(samples: dict[str, list[float]], num_queries: int, length: int, dtype: str, repeats: int) -> None:
    """SDPA on keys and values that lie in one piece, repeated for every query head beforehand."""
    kept = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    kernel, tables = choose("cpu"), torch.randperm(length // BLOCK).int()[None]
    pool = filled(kernel, length, dtype)
    batch = batch_of([(num_queries, length)], 0, tables)
    query = torch.randn(num_queries, NUM_HEADS, DIM, dtype=kept)
    theirs = query.transpose(0, 1)[None].contiguous()
    key, value = (torch.randn(1, NUM_HEADS, length, DIM, dtype=kept) for _ in range(2))
    causal = num_queries == length
    mask = None if causal else torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
    flops = NUM_HEADS * 4 * DIM * (num_queries * (2 * length - num_queries + 1) / 2)
    name = f"prefill_{dtype}_{num_queries}of{length}"
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for _ in range(repeats):
        ours = min(seconds(lambda: kernel.attend(pool, query, batch, 0, DIM**-0.5, None, None)) for _ in range(3))
        other = min(seconds(lambda: sdpa(theirs, key, value, attn_mask=mask, is_causal=causal)) for _ in range(3))
        samples.setdefault(f"{name}_ms", []).append(ours * 1e3)
        samples.setdefault(f"{name}_gflop_per_s", []).append(flops / ours / 1e9)
        samples.setdefault(f"{name}_sdpa_ratio", []).append(other / ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=40, help="of the kernel in each repeat, of which the best counts")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument(
        "--dtypes", nargs="+", default=["bf16", "int8", "fp32"], choices=["fp32", "bf16", "fp16", "fp8", "int8"]
    )
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to see that it runs")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    choose("cpu")  # brings large_pages
    read = {pages: torch.empty((1 if args.tiny else 64) << 20) for pages in ("usual", "large")}
    torch.ops.lengthwise.large_pages(read["large"])
    for big in read.values():
        big.fill_(1.0)
    samples: dict[str, list[float]] = {}
    for dtype in args.dtypes:
        for num_rows, length in [(2, 64)] if args.tiny else DECODE:
            decode(samples, num_rows, length, dtype, args.repeats, args.calls, read, 1 if args.tiny else 160_000_000)
    for dtype in ("bf16", "fp32"):
        for num_queries, length in [(32, 64)] if args.tiny else PREFILL:
            prefill(samples, num_queries, length, dtype, args.repeats)
    report(samples, args.json)


if __name__ == "__main__":
    main()
