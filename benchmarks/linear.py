"""Packed linear layers of the CPU, bf16 and 8-bit: beside torch's, and beside what memory and arithmetic allow.

All in one run, interleaved, weights out of the caches (copies taken in turn): read bandwidth (a sum over a large tensor) and
the bf16 GEMM rate (2048 cubed), then each layer IN x OUT of M rows. `bf16_INxOUT_M_torch_ratio` is torch's time over ours,
`..._limit_ratio` ours over the greater of weight bytes / bandwidth and operations / GEMM rate, `int8_INxOUT_M_bf16_ratio` our
bf16 over our 8-bit time. Layers are those of SmolLM2-135M and of a 198M Llama (hidden 1024); ratios are of neighbouring
measurements, each the best of its calls. Weights and the large tensor lie on large pages, as a packed model's do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import report
from torch import Tensor, nn

from lengthwise.engine.native.linear import Memory, PackedLinear, kernel, pack
from lengthwise.engine.native.quantise import quantised

LAYERS = [(576, 576), (576, 1536), (1536, 576), (576, 49152), (1024, 1024), (1024, 2816), (2816, 1024), (1024, 32000)]
ROWS = [1, 8, 32, 128, 512]
COLD = 96 << 20  # bytes of weight between two uses of one copy: more than a last-level cache


def best(calls: int, *ways: Callable[[], object]) -> list[float]:
    """Least seconds of each way, called in turn."""
    least = [float("inf")] * len(ways)
    for _ in range(calls):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            way()
            least[i] = min(least[i], time.perf_counter() - start)
    return least


def in_turn(layers: list[nn.Module], x: Tensor, num: int) -> Callable[[], None]:
    """`num` calls, of the next layers in the ring each time."""
    at = 0

    def run() -> None:
        nonlocal at
        for i in range(num):
            layers[(at + i) % len(layers)](x)
        at += num

    return run


def collected(plain: list[nn.Module], make: Callable[[nn.Module], PackedLinear]) -> list[nn.Module]:
    """The packed layers of `plain`, in one memory as a model's are."""
    layers = [make(layer) for layer in plain]
    memory = Memory(plain, layers[0].packed.element_size())
    for layer in layers:
        layer.packed = memory.keep(layer.packed)
    return list(layers)


def limits(calls: int, big: Tensor, square: Tensor) -> tuple[float, float]:
    """Bytes read and bf16 operations per second."""
    read, product = best(calls, big.sum, lambda: square @ square)
    return big.numel() * big.element_size() / read, 2 * len(square) ** 3 / product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calls", type=int, default=30, help="the best of these counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tiny", action="store_true", help="one small layer: does it run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"kernel {kernel()}, {args.threads} threads")
    layers, rows = ([(64, 96)], [1, 12]) if args.tiny else (LAYERS, ROWS)
    big = torch.ops.lengthwise.large((4 if args.tiny else 256) << 20).view(torch.float32).fill_(1)
    square = torch.randn((256 if args.tiny else 2048,) * 2).bfloat16()
    samples: dict[str, list[float]] = {}

    def sample(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    with torch.inference_mode():
        for num_in, num_out in layers:
            copies = 1 if args.tiny else max(1, min(64, COLD // (num_in * num_out)))
            plain: list[nn.Module] = [nn.Linear(num_in, num_out, bias=False, dtype=torch.bfloat16) for _ in range(copies)]
            packed, eight = (collected(plain, make) for make in (pack, quantised))
            for num in rows:
                x, some, name = torch.randn(num, num_in).bfloat16(), min(8, copies), f"{num_in}x{num_out}_{num}"
                for _ in range(args.repeats):
                    read, rate = limits(3, big, square)
                    ways = [in_turn(ones, x, some) for ones in (plain, packed, eight)]
                    torchs, ours, bytes8 = (seconds / some for seconds in best(args.calls, *ways))
                    limit = max(2 * num_in * num_out / read, 2 * num * num_in * num_out / rate)
                    sample("read_gb_per_s", read / 1e9)
                    sample("gemm_gflop_per_s", rate / 1e9)
                    sample(f"bf16_{name}_torch_ratio", torchs / ours)
                    sample(f"bf16_{name}_limit_ratio", ours / limit)
                    sample(f"int8_{name}_bf16_ratio", ours / bytes8)
    report(samples, args.json)


if __name__ == "__main__":
    main()
