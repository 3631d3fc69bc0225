"""Our Triton kernels, in Triton's interpreter on the CPU, against TorchPaged; and that they compile for a GPU without one.

The interpreter is chosen when triton is imported, so the tests below `interpreted` run in a process of their own, which
`test_in_the_interpreter` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from batches import attention_batch

from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.batch import Batch
from lengthwise.engine.native.pool import KV_DTYPES, LayerSpec, Pool

torch.set_num_threads(1)
CPU = torch.device("cpu")
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_in_the_interpreter starts")
compiled = pytest.mark.skipif(INSIDE, reason="runs outside of the interpreter")
pytest.importorskip("triton", reason="triton is not installed: pip install triton")


@compiled
def test_in_the_interpreter() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib --strict-markers -m 'not slow'"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def scene(
    rows: list[tuple[int, int]],
    num_decode: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    block_size: int = 8,
    dtype: str = "fp32",
    query_dtype: str = "fp32",
    window: int | None = None,
    seed: int = 0,
) -> tuple[Pool, torch.Tensor, Batch]:
    """A filled pool, queries and a batch of rows (query tokens, context). What no row may see is NaN, or a block that is not
    there."""
    rng, draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    counts, lens = [queries for queries, _ in rows], [context for _, context in rows]
    needs = [-(-context // block_size) for context in lens]
    num_blocks = sum(needs) + 2
    pool = TorchPaged().new_pool(LayerSpec(heads[1], *dims, window), num_blocks, block_size, dtype, CPU)
    kept = KV_DTYPES[query_dtype]
    key, value = (torch.randn(num_blocks * block_size, heads[1], dim, generator=draw).to(kept) for dim in dims)
    tables = np.full((len(rows), max(needs) + 1), -(2**28), dtype=np.int32)
    order, used, seen = rng.permutation(num_blocks), 0, np.zeros(num_blocks * block_size, bool)
    for row, (queries, context) in enumerate(rows):
        tables[row, : needs[row]] = order[used : used + needs[row]]
        used += needs[row]
        low = 0 if window is None else max(0, context - queries - window + 1)
        at = np.arange(low, context)
        seen[tables[row, at // block_size] * block_size + at % block_size] = True
        tables[row, : low // block_size] = -(2**28)
    TorchPaged().store(pool, key, value, torch.arange(num_blocks * block_size))
    for tensor in pool.tensors[-2:]:
        tensor.view(num_blocks * block_size, -1)[torch.from_numpy(~seen)] = torch.nan
    batch = attention_batch(counts, lens, num_decode, tables)
    return pool, torch.randn(sum(counts), heads[0], dims[0], generator=draw).to(kept), batch


def error(
    pool: Pool,
    query: torch.Tensor,
    batch: Batch,
    splits: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> float:
    from lengthwise.engine.native.attention.triton_paged import TritonPaged

    settings = (batch, 0, query.shape[2] ** -0.5, window, softcap)
    found = TritonPaged(splits).attend(pool, query, *settings)
    wanted = TorchPaged().attend(pool, query, *settings)
    assert found.dtype == query.dtype and found.shape == wanted.shape
    assert wanted.abs().max() > 0.1 or not int(batch.context_len.max())
    return float((found.float() - wanted.float()).abs().max())


ROWS = [(1, 40), (1, 1), (1, 17), (1, 0), (5, 5), (1, 9), (13, 30)]


@interpreted
@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (None, 7), (3, 7), (1, 1), (2, 1000)])
def test_windows_and_splits(splits: int | None, window: int | None) -> None:
    assert error(*scene(ROWS, 4, window=window), splits=splits, window=window) < 1e-5


@interpreted
@pytest.mark.parametrize("num_decode", [0, 2])
def test_decoding_rows_as_chunks(num_decode: int) -> None:
    assert error(*scene([(1, 40), (1, 1), (1, 17), (1, 0)], num_decode)) < 1e-5


@interpreted
def test_splits_of_a_long_row_beside_short_ones() -> None:
    assert error(*scene([(1, 700), (1, 3), (1, 0)], 3), splits=8) < 1e-5
    assert error(*scene([(1, 700), (1, 90)], 2, window=300), splits=4, window=300) < 1e-5


@interpreted
def test_chunk_of_several_tiles() -> None:
    assert error(*scene([(1, 3), (140, 170)], 1, heads=(3, 1))) < 1e-5


@interpreted
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_block_sizes(block_size: int) -> None:
    assert error(*scene(ROWS, 4, block_size=block_size)) < 1e-5


@interpreted
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 3), (8, 1), (17, 1)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    assert error(*scene(ROWS, 4, heads=heads), splits=2) < 1e-5


@interpreted
@pytest.mark.parametrize("dims", [(5, 3), (24, 16), (16, 40), (80, 80)])
def test_head_dims(dims: tuple[int, int]) -> None:
    assert error(*scene(ROWS, 4, dims=dims), splits=2) < 1e-5


@interpreted
def test_softcap() -> None:
    pool, query, batch = scene(ROWS, 4)
    query *= 20.0  # far into the cap
    assert error(pool, query, batch, splits=2, softcap=1.5) < 1e-5
    assert error(pool, query, batch, softcap=50.0) < 1e-4


@interpreted
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("query_dtype", ["fp32", "fp16"])  # the interpreter multiplies bf16 as if it were integers
def test_dtypes(dtype: str, query_dtype: str) -> None:
    limit = {"fp32": 1e-5, "fp16": 4e-3}[query_dtype]
    assert error(*scene(ROWS, 4, dtype=dtype, query_dtype=query_dtype), splits=2) < limit


@interpreted
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8", "fp8"])
def test_store_keeps_what_torch_keeps(dtype: str) -> None:
    from lengthwise.engine.native.attention.triton_paged import TritonPaged

    draw = torch.Generator().manual_seed(1)
    key, value = (torch.randn(6, 3, dim, generator=draw) for dim in (24, 5))
    if dtype == "bf16":
        key, value = key.bfloat16().float(), value.bfloat16().float()  # the interpreter cuts where a device rounds
    key[2] = 0.0  # nothing to scale by
    slots = torch.tensor([5, -1, 0, 23, -1, 8])
    pools = []
    for backend in (TritonPaged(), TorchPaged()):
        pool = backend.new_pool(LayerSpec(3, 24, 5), 6, 4, dtype, CPU)
        backend.store(pool, key, value, slots)
        pools.append(pool)
    for i, (ours, reference) in enumerate(zip(*(pool.tensors for pool in pools), strict=True)):
        wrong = ours.float() != reference.float()
        if dtype == "fp8" and i < 2:  # the interpreter rounds some numbers to a neighbour
            assert float(wrong.float().mean()) < 0.05
        else:
            assert not wrong.any()
    assert int((pools[0].tensors[1].float().flatten(2).abs().sum(2) > 0).sum()) == 4


@interpreted
def test_a_store_that_keeps_nothing() -> None:
    from lengthwise.engine.native.attention.triton_paged import TritonPaged

    pool = TritonPaged().new_pool(LayerSpec(2, 16, 16), 2, 4, "fp32", CPU)
    TritonPaged().store(pool, torch.ones(3, 2, 16), torch.ones(3, 2, 16), torch.full((3,), -1))
    assert not any(tensor.any() for tensor in pool.tensors)


@compiled
def test_outside_of_the_interpreter_it_needs_a_gpu() -> None:
    from lengthwise.engine.native.attention import triton_paged

    if torch.cuda.is_available():
        assert triton_paged.available() is None
    else:
        with pytest.raises(RuntimeError, match="need a GPU"):
            triton_paged.TritonPaged()


@compiled
@pytest.mark.parametrize(
    ("num_tiles", "context", "splits"), [(1, 8192, 64), (8, 8192, 32), (8, 300, 2), (2048, 8192, 1), (1, 0, 1), (100, 8192, 2)]
)
def test_few_rows_are_split(num_tiles: int, context: int, splits: int) -> None:
    from lengthwise.engine.native.attention.triton_paged import choose_splits

    assert choose_splits(num_tiles, context, 264) == splits


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dims", "window", "softcap"),
    [("bf16", (128, 128), 0, 0.0), ("fp8", (128, 128), 0, 0.0), ("int8", (64, 64), 0, 0.0), ("fp16", (80, 48), 100, 0.0),
     ("bf16", (256, 256), 512, 50.0), ("fp32", (128, 128), 0, 0.0)],
)  # fmt: skip
def test_kernels_compile_for_hopper(
    dtype: str, dims: tuple[int, int], window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is needed to compile for one. What every kernel takes of shared memory must be there."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns that the default will change
    from lengthwise.engine.native.attention import triton_kernels as kernels
    from lengthwise.engine.native.attention import triton_paged as ours

    names = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8e4nv", "int8": "i8"}
    queries = dtype if dtype in ("fp16", "fp32") else "bf16"
    spec = LayerSpec(8, *dims)
    pool = TorchPaged().new_pool(spec, 2, 16, dtype, CPU)
    query = torch.empty(1, 32, dims[0], dtype=KV_DTYPES[queries])
    kept, scales = "*" + names[dtype], "*fp32" if len(pool.tensors) > 2 else "*" + names[dtype]
    common = {"queries": "*" + names[queries], "keys": kept, "values": kept, "key_scales": scales, "value_scales": scales}
    common |= {"tables": "*i32", "context_len": "*i32", "out": "*" + names[queries], "scale": "fp32", "table_width": "i32"}
    limits = {"WINDOW": window, "SOFTCAP": softcap}
    decode = {**ours.tile(query, pool, 4, decoding=True), **limits, "SPLITS": 4}
    assert shared_bytes(kernels.decode_kernel, {**common, "parts": "*fp32", "part_sums": "*fp32"}, decode) < 227 * 1024
    chunks = {**ours.tile(query, pool, 4, decoding=False), **limits}
    assert shared_bytes(kernels.prefill_kernel, {**common, "query_start": "*i32", "num_decode": "i32"}, chunks) < 227 * 1024


def shared_bytes(kernel: object, types: dict[str, str], constants: dict[str, object]) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}  # type: ignore[attr-defined]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert done.asm["cubin"]
    return int(done.metadata.shared)
