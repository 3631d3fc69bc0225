"""On a CUDA device: every backend against the reference, and steps replayed from CUDA graphs against eager ones.

Run by `pytest -m gpu tests/gpu`; benchmarks/gpu_engine.py measures what these compare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import Ask, Case
from native import play_native

from lengthwise.engine.native.attention.choose import choose
from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.batch import Batch, Placed
from lengthwise.engine.native.graphs import DecodeGraphs
from lengthwise.engine.native.pool import KV_DTYPES, LayerSpec, Pool
from lengthwise.engine.native.tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
ROWS = [(1, 900), (1, 1), (1, 17), (1, 0), (1, 256), (5, 5), (300, 700)]
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2}


def backend(name: str) -> Any:
    try:
        return choose(name, "cuda")
    except (ImportError, RuntimeError) as reason:
        pytest.skip(str(reason))


def scene(attention: Any, dtype: str, query_dtype: str, window: int | None, dim: int) -> tuple[Pool, torch.Tensor, Batch]:
    """Rows (query tokens, context) of ROWS, 8 query and 2 KV heads, in shuffled blocks; what a window has passed is -1."""
    rng, draw = np.random.default_rng(0), torch.Generator().manual_seed(0)
    block_size = 256 if attention.name == "varlen" else 16
    counts, lens = [queries for queries, _ in ROWS], [context for _, context in ROWS]
    needs = [-(-n // block_size) for n in lens]
    order, tables = rng.permutation(sum(needs)), np.zeros((len(ROWS), max(needs)), np.int32)
    pool = attention.new_pool(LayerSpec(2, dim, dim, window), len(order), block_size, dtype, torch.device("cuda"))
    kept = KV_DTYPES[query_dtype]
    for row, (length, need) in enumerate(zip(lens, needs, strict=True)):
        tables[row, :need] = order[sum(needs[:row]) : sum(needs[:row]) + need]
        at = np.arange(length)
        key, value = (torch.randn(length, 2, dim, generator=draw).to(kept).cuda() for _ in range(2))
        if length:
            slots = tables[row, at // block_size].astype(np.int64) * block_size + at % block_size
            attention.store(pool, key, value, torch.from_numpy(slots).cuda())
        if window is not None:
            tables[row, : max(0, length - counts[row] - window + 1) // block_size] = -1
    nothing = torch.zeros(sum(counts), dtype=torch.int64, device="cuda")
    batch = Batch(
        nothing, nothing, torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device="cuda"),
        torch.tensor(lens, dtype=torch.int32, device="cuda"), 5, max(counts), max(lens), nothing[:0],
        [Placed(nothing, torch.from_numpy(tables).cuda())],
    )  # fmt: skip
    return pool, torch.randn(sum(counts), 8, dim, generator=draw).to(kept).cuda(), batch


@pytest.mark.parametrize("name", ["triton", "varlen", "flashinfer"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 5.0), (1, None)])
@pytest.mark.parametrize("dim", [64, 128])
def test_backends_agree(name: str, window: int | None, softcap: float | None, dim: int) -> None:
    attention = backend(name)
    if reason := attention.unfit(LayerSpec(2, dim, dim, window), 256, "bf16", softcap):
        pytest.skip(reason)
    settings = (0, dim**-0.5, window, softcap)
    pool, query, batch = scene(attention, "bf16", "bf16", window, dim)
    found = attention.attend(pool, query, batch, *settings)
    wanted = TorchPaged().attend(pool, query, batch, *settings)
    assert found.dtype == query.dtype and float((found - wanted).abs().max()) < TOLERANCE["bf16"]
    assert not found[3].any()  # the padding row


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("query_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", [80, 256])
def test_triton_dtypes(dtype: str, query_dtype: str, dim: int) -> None:
    attention = backend("triton")
    if reason := attention.unfit(LayerSpec(2, dim, dim), 16, dtype):
        pytest.skip(reason)
    pool, query, batch = scene(attention, dtype, query_dtype, None, dim)
    reference = TorchPaged()
    ours = attention.attend(pool, query, batch, 0, dim**-0.5, None, None)
    wanted = reference.attend(pool, query, batch, 0, dim**-0.5, None, None)
    assert float((ours.float() - wanted.float()).abs().max()) < TOLERANCE[query_dtype]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8", "fp8"])
def test_triton_stores_what_torch_stores(dtype: str) -> None:
    attention, draw = backend("triton"), torch.Generator().manual_seed(1)
    key, value = (torch.randn(6, 3, dim, generator=draw).cuda() for dim in (24, 5))
    slots = torch.tensor([5, -1, 0, 23, -1, 8], device="cuda")
    pools = [which.new_pool(LayerSpec(3, 24, 5), 6, 4, dtype, torch.device("cuda")) for which in (attention, TorchPaged())]
    attention.store(pools[0], key, value, slots)
    TorchPaged().store(pools[1], key, value, slots)
    for ours, reference in zip(pools[0].tensors, pools[1].tensors, strict=True):
        apart = (ours.float() - reference.float()).abs() > 1e-6 * reference.float().abs()
        assert float(apart.float().mean()) < (0.02 if dtype in ("int8", "fp8") else 1e-9)  # a quotient may round the other way


@pytest.mark.parametrize("name", ["triton", "varlen", "flashinfer"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_graphs_equal_eager(name: str, family: str) -> None:
    """Ten steps over a block boundary, with a row that leaves, from graphs and eagerly. Tokens are given: a near tie would else
    send the two apart."""
    attention, block_size = backend(name), 256 if name == "varlen" else 16
    model = tiny(family, dtype="bf16", device="cuda", hidden_size=256, head_dim=64)
    if any(attention.unfit(spec, block_size, "bf16") for spec in model.layers):
        pytest.skip(f"{name} does not serve {family}")
    tables = torch.arange(6, device="cuda", dtype=torch.int32).view(3, 2)
    tokens = torch.randint(0, 128, (10, 3), generator=torch.Generator().manual_seed(0)).cuda()
    outs: list[list[torch.Tensor]] = []
    for replayed in (False, True):
        pools = [attention.new_pool(spec, 6, block_size, "bf16", model.device) for spec in model.layers]
        model.attach(attention, pools)
        graphs = DecodeGraphs(model, attention, block_size=block_size, max_num_seqs=4, max_model_len=512) if replayed else None
        outs.append([])
        for step in range(10):
            num, at = (3 if step < 6 else 2), 12 + step
            order = torch.arange(num + 1, device="cuda")
            batch = Batch(
                tokens[step, :num], torch.full((num,), at, device="cuda"), order.int(),
                torch.full((num,), at + 1, dtype=torch.int32, device="cuda"), num, 1, at + 1, order[:num],
                [Placed(tables[:num, at // block_size].long() * block_size + at % block_size, tables[:num])]
                * (1 + max(spec.group for spec in model.layers)),
            )  # fmt: skip
            outs[-1].append(graphs.run(batch) if graphs is not None else model.forward(batch))
        if graphs is not None:
            assert (graphs.num_replayed, graphs.num_eager) == (10, 0)
    for eager, graph in zip(*outs, strict=True):
        torch.testing.assert_close(graph, eager, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["triton", "varlen"])
def test_two_steps_in_flight_give_the_tokens_of_one(name: str) -> None:
    """Rows that come, open blocks and leave; graphs feed in what the device has."""
    backend(name)
    size = 256 if name == "varlen" else 16
    asks = tuple(Ask(0.0, 9 + 40 * i, 30 + 17 * i, 300) for i in range(6))
    case, answers = Case(asks, pool=64 * size, block_size=size, max_num_seqs=3), []
    for depth in (1, 2):
        model = tiny("llama", dtype="bf16", device="cuda", hidden_size=256, head_dim=64)
        result = play_native(case, model, attention=name, asked={"depth": depth})
        answers.append((result.log.steps, result.log.tokens))
    assert answers[0] == answers[1] and result.executor.ahead.used > 50
