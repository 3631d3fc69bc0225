"""Decode and prefill tokens/s of 1B- and 8B-shaped random Llamas (bf16) on a GPU, beside the limits measured in the same run.

One script for the little time that a GPU may be at hand: bandwidth and GEMM rate; every attention backend against TorchPaged
(and that against the CPU); then, for each backend, decode steps at batch 1, 32 and 256, eagerly and from CUDA graphs, prefill
in chunks of 2,048 tokens, and the engine, scheduler and executor included, at batch 1 and 32. Of MODEL_BACKEND_decode_B_...,
tokens_per_s is the better way of the model alone; limit_share the least time a step can take (weights and KV over measured
bandwidth, or FLOPs over measured GEMM rate) over the time it took; host_us the time that the host spends on a step;
depth_D_tokens_per_s what the engine does with D steps in flight, depth_D_gap_us how much longer its step takes than the model's
alone: so long the device waits. A backend that cannot run is named with its reason under `skipped`, one that breaks under
`failed`, and then the script ends with 1. Minutes on an H200; `--tiny --device cpu` runs all of it in seconds, for tests.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import report
from torch import Tensor

from lengthwise.engine.native.attention.backend import Attention
from lengthwise.engine.native.attention.choose import choose
from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.batch import Batch, Placed
from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.graphs import DecodeGraphs, decode_graphs
from lengthwise.engine.native.model import ServedModel
from lengthwise.engine.native.pool import LayerSpec, Pool
from lengthwise.sched import Request, Scheduler, recompute
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.policies import FCFS

LLAMAS = {
    "llama1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                    num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=True),
    "llama8b": dict(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
                    num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False),
}  # fmt: skip
TINY = {
    "tiny": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 vocab_size=128, tie_word_embeddings=True),
}  # fmt: skip
BACKENDS = {"cuda": ("triton", "varlen", "flashinfer", "torch"), "cpu": ("cpu", "torch")}
BLOCK_SIZES = {"varlen": 256}  # FlashAttention-2 reads no smaller pages
CASES: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 100}, "softcap": {"softcap": 30.0}}
TOLERANCE = 2e-2  # of the greatest number that comes out, in bf16
SLOW = ("torch",)  # the reference: compared, and timed at one batch size only


@dataclass(frozen=True)
class Sizes:
    """How much is measured. context: tokens that a decoding row attends. chunk: prefill tokens of a step."""

    batches: tuple[int, ...] = (1, 32, 256)
    context: int = 1024
    chunk: int = 2048
    steps: int = 20
    repeats: int = 3
    copy_bytes: int = 4 << 30
    gemm: int = 8192
    check_context: int = 3000


SMALL = Sizes(batches=(1, 4), context=20, chunk=24, steps=2, repeats=2, copy_bytes=1 << 20, gemm=64, check_context=90)
Samples = dict[str, list[float]]


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], device: torch.device, repeats: int, times: int = 1) -> list[float]:
    """Seconds of one `run`, `repeats` samples of `times` runs each, after one to warm up."""
    run()
    samples = []
    for _ in range(repeats):
        sync(device)
        start = time.perf_counter()
        for _ in range(times):
            run()
        sync(device)
        samples.append((time.perf_counter() - start) / times)
    return samples


def limits(sizes: Sizes, device: torch.device, samples: Samples) -> tuple[float, float]:
    """Measured bandwidth (bytes/s, read and write of a copy) and GEMM rate (FLOP/s)."""
    source = torch.zeros(2, sizes.copy_bytes // 2, dtype=torch.bfloat16, device=device)
    taken = seconds(lambda: source[0].copy_(source[1]), device, 5, 5)
    samples["bandwidth_gb_per_s"] = [2 * sizes.copy_bytes / t / 1e9 for t in taken]
    a = torch.randn(sizes.gemm, sizes.gemm, dtype=torch.bfloat16, device=device)
    taken = seconds(lambda: a @ a, device, 5, 10)
    samples["gemm_tflop_per_s"] = [2 * sizes.gemm**3 / t / 1e12 for t in taken]
    return max(samples["bandwidth_gb_per_s"]) * 1e9, max(samples["gemm_tflop_per_s"]) * 1e12


# --- against the reference --------------------------------------------------------------------------------------------


def scene(attention: Attention, sizes: Sizes, device: torch.device, window: int | None) -> tuple[Pool, Tensor, Batch]:
    """Decoding rows of all lengths, a padding row, and two chunks; 32 query and 8 KV heads of 128; the same for every backend
    and device. Rows have tokens in shuffled blocks; what a window has passed is not there."""
    rng, block_size = np.random.default_rng(0), BLOCK_SIZES.get(attention.name, 16)
    most = sizes.check_context
    lens = [1, 17, most, most // 2, 0, *rng.integers(1, most, 10).tolist(), most // 3, most]
    counts, num_decode = [1] * 15 + [most // 3, most // 4], 15
    needs = [-(-n // block_size) for n in lens]
    order, tables = rng.permutation(sum(needs) + 2), np.zeros((len(lens), max(needs)), np.int32)
    spec = LayerSpec(8, 128, 128, window)
    pool = attention.new_pool(spec, len(order), block_size, "bf16", device)
    draw = torch.Generator().manual_seed(0)
    for row, (length, need) in enumerate(zip(lens, needs, strict=True)):
        tables[row, :need] = order[sum(needs[:row]) : sum(needs[:row]) + need]
        if length:
            at = np.arange(length)
            slots = torch.from_numpy(tables[row, at // block_size].astype(np.int64) * block_size + at % block_size)
            key, value = (torch.randn(length, 8, 128, generator=draw).bfloat16() for _ in range(2))
            attention.store(pool, key.to(device), value.to(device), slots.to(device))
        if window is not None:
            tables[row, : max(0, length - counts[row] - window + 1) // block_size] = -1
    num_tokens = sum(counts)
    nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    batch = Batch(
        nothing, nothing, torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device), num_decode, max(counts), most, nothing[:0],
        [Placed(nothing, torch.from_numpy(tables).to(device))],
    )  # fmt: skip
    return pool, torch.randn(num_tokens, 32, 128, generator=draw).bfloat16().to(device), batch


def attended(attention: Attention, sizes: Sizes, device: torch.device, case: dict[str, Any]) -> Tensor:
    window, softcap = case.get("window"), case.get("softcap")
    pool, query, batch = scene(attention, sizes, device, window)
    return attention.attend(pool, query, batch, 0, 128**-0.5, window, softcap).float().cpu()


def compare(
    backends: dict[str, Attention], sizes: Sizes, device: torch.device, samples: Samples, notes: dict[str, str]
) -> None:
    """Greatest difference of each backend to the reference on the same device, as a share of the greatest number; and that of
    the reference to itself on the CPU."""
    for name, case in CASES.items():
        small = replace(sizes, check_context=min(sizes.check_context, 300))
        wanted = attended(TorchPaged(), small, torch.device("cpu"), case)
        found = attended(TorchPaged(), small, device, case)
        samples[f"error_torch_{name}_device_to_cpu"] = [float((found - wanted).abs().max() / wanted.abs().max())]
        wanted = attended(TorchPaged(), sizes, device, case)
        for backend, attention in backends.items():
            reason = unfit(attention, LayerSpec(8, 128, 128, case.get("window")), case.get("softcap"))
            if reason:
                notes[f"{backend}_{name}"] = reason
                continue
            found = attended(attention, sizes, device, case)
            error = float((found - wanted).abs().max() / wanted.abs().max())
            samples[f"error_{backend}_{name}"] = [error]
            if not error < TOLERANCE:
                raise AssertionError(f"{backend} differs from the reference by {error:.3g} in the case {name}")


def unfit(attention: Attention, spec: LayerSpec, softcap: float | None = None) -> str | None:
    ask = getattr(attention, "unfit", None)
    return ask(spec, BLOCK_SIZES.get(attention.name, 16), "bf16", softcap) if ask else None


# --- models -----------------------------------------------------------------------------------------------------------


def llama(fields: dict[str, Any], max_positions: int, device: torch.device) -> ServedModel:
    """Random weights, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**fields, max_position_embeddings=max_positions, bos_token_id=None, eos_token_id=None)
    auto: Any = AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.bfloat16)
    return ServedModel(model, verify=False)


class Decoding:
    """`rows` requests that decode from `context` tokens on: the device's own token, position and slot arithmetic."""

    def __init__(self, model: ServedModel, rows: int, context: int, most: int, block_size: int, num_blocks: int) -> None:
        device, width = model.device, -(-most // block_size)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))[: rows * width]
        self._tables = order.view(rows, width).int().to(device)
        self._rows, self._start, self._most, self._block_size = torch.arange(rows, device=device), context, most, block_size
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._num_groups = 1 + max(spec.group for spec in model.layers)
        self.begin()

    def begin(self) -> None:
        self._at = torch.full_like(self._rows, self._start - 1)
        self.tokens = torch.zeros_like(self._rows)

    def batch(self) -> Batch:
        """The next step. Mutates the positions."""
        at, size = self._at, self._block_size
        slots = self._tables[self._rows, at // size].long() * size + at % size
        batch = Batch(
            self.tokens, at.clone(), self._query_start, (at + 1).int(), len(self._rows), 1, self._most, self._rows,
            [Placed(slots, self._tables)] * self._num_groups,
        )  # fmt: skip
        self._at += 1
        return batch


def step_limit(model: ServedModel, rows: int, context: int, bandwidth: float, rate: float) -> float:
    """The least seconds of a decode step."""
    embedding = model.model.get_input_embeddings().weight
    tied = embedding is model.model.get_output_embeddings().weight
    read = model.weight_bytes - (0 if tied else embedding.numel() * embedding.element_size())
    kv = sum(spec.numbers_per_token for spec in model.layers) * 2
    return max((read + rows * context * kv) / bandwidth, 2 * rows * (read // 2) / rate)


def decode(
    key: str, model: ServedModel, run: Callable[[Batch], Tensor], rows: Decoding, sizes: Sizes, least: float, samples: Samples
) -> float:
    """Greedy steps, tokens kept on the device. Returns the median tokens/s."""
    num, device = len(rows.tokens), model.device

    def step() -> None:
        rows.tokens = model.logits(run(rows.batch())).argmax(-1)

    rates, shares = [], []
    for repeat in range(sizes.repeats + 1):
        rows.begin()
        step()
        sync(device)
        start = time.perf_counter()
        for _ in range(sizes.steps):
            step()
        sync(device)
        taken = (time.perf_counter() - start) / sizes.steps
        if repeat:  # the first is to warm up
            rates.append(num / taken)
            shares.append(least / taken)
    host = []
    rows.begin()
    for _ in range(sizes.steps):
        sync(device)
        start = time.perf_counter()
        step()
        host.append((time.perf_counter() - start) * 1e6)  # until the last launch; on a CPU the whole step
    samples[f"{key}_tokens_per_s"], samples[f"{key}_limit_share"], samples[f"{key}_host_us"] = rates, shares, host
    return statistics.median(rates)


def prefill(key: str, model: ServedModel, rows: Decoding, sizes: Sizes, rate: float, samples: Samples) -> None:
    """One prompt of `chunk` tokens a step, and its first token."""
    chunk, device = sizes.chunk, model.device
    at = torch.arange(chunk, device=device)
    blocks = rows._tables.flatten()[: -(-chunk // rows._block_size)]
    slots = blocks[at // rows._block_size].long() * rows._block_size + at % rows._block_size
    batch = Batch(
        at % model.vocab_size, at, torch.tensor([0, chunk], dtype=torch.int32, device=device),
        torch.tensor([chunk], dtype=torch.int32, device=device), 0, chunk, chunk, at[-1:],
        [Placed(slots, blocks[None])] * rows._num_groups,
    )  # fmt: skip
    taken = seconds(lambda: model.logits(model.forward(batch)), device, sizes.repeats, 3)
    body = model.num_params - model.model.get_input_embeddings().weight.numel()
    if model.model.get_output_embeddings().weight is not model.model.get_input_embeddings().weight:
        body -= model.model.get_output_embeddings().weight.numel()
    heads = model.config.num_attention_heads
    attention = sum(heads * (spec.k_dim + spec.v_dim) for spec in model.layers) * chunk * (chunk + 1)
    flops = 2 * body * chunk + attention
    samples[f"{key}_prefill_tokens_per_s"] = [chunk / t for t in taken]
    samples[f"{key}_prefill_limit_share"] = [flops / t / rate for t in taken]


def filling(num: int, sizes: Sizes) -> int:
    """Tokens that the first of `num` rows may have before the last is prefilled."""
    return -(-num * sizes.context // max(sizes.chunk - num, 1)) + 1


def engine(key: str, model: ServedModel, name: str, num: int, depth: int, sizes: Sizes, samples: Samples) -> None:
    """Decode steps of `num` rows through scheduler and executor, the next one launched when the tokens are there (depth 1) or
    before (2)."""
    size, answer = BLOCK_SIZES.get(name, 16), sizes.steps * (sizes.repeats + 1) + 3 + filling(num, sizes)
    kv = Paged(num * -(-(sizes.context + answer) // size) * size, size, 0.0)
    scheduler = Scheduler(FCFS(), Chunked(), kv, recompute(), max_num_seqs=num, token_budget=max(sizes.chunk, num))
    clock = WallClock()
    executor = NativeEngine(model, attention=name, kv_dtype="bf16", linears="torch").executor(
        kv, clock, answer_lens=[answer] * num, max_num_seqs=num, depth=depth
    )
    for rid in range(num):
        scheduler.add(Request(rid, 0.0, sizes.context, answer, prompt_ids=[rid % model.vocab_size] * sizes.context))

    def step() -> bool:
        plan = scheduler.plan(clock.now)
        assert plan is not None
        scheduler.book(plan, executor.collect(executor.submit(plan), math.inf))
        return not plan.chunks and plan.num_decode == num

    while not step():
        pass
    rates = []
    for repeat in range(sizes.repeats + 1):
        start = time.perf_counter()
        for _ in range(sizes.steps):
            assert step(), "a row has ended while the time of all is taken"
        if repeat:  # the first is to warm up
            rates.append(num * sizes.steps / (time.perf_counter() - start))
    assert executor.ahead is None or executor.ahead.used >= sizes.steps * sizes.repeats
    alone = num / samples[f"{key}_tokens_per_s"][0]
    samples[f"{key}_depth_{depth}_tokens_per_s"] = rates
    samples[f"{key}_depth_{depth}_gap_us"] = [1e6 * (num / rate - alone) for rate in rates]


def measure(
    key: str, model: ServedModel, attention: Attention, sizes: Sizes, limit: tuple[float, float], samples: Samples,
) -> None:  # fmt: skip
    block_size, device = BLOCK_SIZES.get(attention.name, 16), model.device
    batches = sizes.batches[1:2] if attention.name in SLOW and device.type == "cuda" else sizes.batches
    most = sizes.context + sizes.steps + 2
    width = -(-most // block_size)
    num_blocks = max(max(batches) * width, -(-sizes.chunk // block_size)) + 1
    pools = [attention.new_pool(spec, num_blocks, block_size, "bf16", device) for spec in model.layers]
    model.attach(attention, pools)
    graphs: DecodeGraphs | None = decode_graphs(
        model, attention, block_size=block_size, max_num_seqs=max(batches), max_model_len=most, sizes=batches
    )
    for num in batches:
        rows = Decoding(model, num, sizes.context, most, block_size, num_blocks)
        least = step_limit(model, num, sizes.context + sizes.steps // 2, *limit)
        best = decode(f"{key}_decode_{num}_eager", model, model.forward, rows, sizes, least, samples)
        if graphs is not None:
            best = max(best, decode(f"{key}_decode_{num}_graphs", model, graphs.run, rows, sizes, least, samples))
            assert not graphs.num_eager
        samples[f"{key}_decode_{num}_tokens_per_s"] = [best]
    if attention.name not in SLOW or device.type == "cpu":
        wide = Decoding(model, 1, sizes.context, max(sizes.chunk, most), block_size, num_blocks)
        prefill(key, model, wide, sizes, limit[1], samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and sizes of a test")
    parser.add_argument("--models", default=None, help="of " + ", ".join(LLAMAS))
    parser.add_argument("--backends", default=None, help="of " + ", ".join(BACKENDS["cuda"]))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --tiny --device cpu runs the same code in small")
    sizes, shapes = (SMALL, TINY) if args.tiny else (Sizes(), LLAMAS)
    names = args.models.split(",") if args.models else list(shapes)
    wanted = args.backends.split(",") if args.backends else BACKENDS[device.type]
    samples: Samples = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    backends: dict[str, Attention] = {}

    def guarded(name: str, run: Callable[[], None]) -> None:
        """Time on a device is scarce: what breaks must not take the rest with it."""
        print(f"[{time.strftime('%H:%M:%S')}] {name}", flush=True)
        try:
            run()
        except Exception:
            failed[name] = traceback.format_exc()
            print(failed[name], file=sys.stderr, flush=True)

    with torch.inference_mode():
        limit = limits(sizes, device, samples)
        for name in wanted:
            try:
                backends[name] = choose(name, device)
            except (ImportError, RuntimeError) as error:
                skipped[name] = str(error)
        for name, attention in list(backends.items()):
            guarded(f"compare {name}", lambda n=name, a=attention: compare({n: a}, sizes, device, samples, skipped))  # type: ignore[misc]
        for name in names:
            longest = sizes.context + sizes.steps * (sizes.repeats + 1) + 3 + max(filling(n, sizes) for n in sizes.batches)
            model = llama(shapes[name], max(sizes.chunk, longest), device)
            for backend, attention in backends.items():
                if reason := unfit(attention, model.layers[0]):
                    skipped[f"{name}_{backend}"] = reason
                    continue
                key = f"{name}_{backend}"
                guarded(key, lambda k=key, m=model, a=attention: measure(k, m, a, sizes, limit, samples))  # type: ignore[misc]
                whole = key not in failed and not (backend in SLOW and device.type == "cuda")
                depths = (1,) if getattr(attention, "waits", False) else (1, 2)
                for num, depth in product(sizes.batches[:2] if whole else (), depths):
                    at, given = f"{key}_decode_{num}", (model, backend, num, depth, sizes, samples)
                    guarded(f"{at}_depth_{depth}", lambda k=at, g=given: engine(k, *g))  # type: ignore[misc]
                model.detach()  # or its pools would stay while the next ones are made
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            del model
    report(samples, args.json)
    for title, notes in (("skipped", skipped), ("failed", failed)):
        for name, why in notes.items():
            print(f"{title} {name}: {why.strip().splitlines()[-1]}")
    if args.json:
        written = json.loads(args.json.read_text())
        written["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        written["torch"] = torch.__version__
        written["skipped"], written["failed"] = skipped, failed
        args.json.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
