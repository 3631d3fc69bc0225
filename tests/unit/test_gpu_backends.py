"""What the CUDA backends hand to their kernels, with stand-ins that do on the CPU what the kernels' documentation says.

The kernels themselves are compared on a device (tests/gpu, benchmarks/gpu_engine.py).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import attention_batch
from torch import Tensor

from lengthwise.engine.native.attention import flashinfer, torch_layout, varlen
from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.batch import Batch
from lengthwise.engine.native.pool import LayerSpec, Pool

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = [(1, 40), (1, 1), (1, 17), (1, 0), (5, 5), (1, 9), (13, 30)]
DIM = 16


def scene(
    rows: list[tuple[int, int]] = ROWS, num_decode: int = 4, heads: tuple[int, int] = (4, 2), window: int | None = None
) -> tuple[Pool, Tensor, Batch]:
    rng, draw, block_size = np.random.default_rng(0), torch.Generator().manual_seed(0), 8
    counts, lens = [queries for queries, _ in rows], [context for _, context in rows]
    needs = [-(-context // block_size) for context in lens]
    num_blocks = sum(needs) + 2
    pool = TorchPaged().new_pool(LayerSpec(heads[1], DIM, DIM), num_blocks, block_size, "fp32", CPU)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    tables, order = np.full((len(rows), max(needs) + 1), 2**28, np.int32), rng.permutation(num_blocks)
    for row, need in enumerate(needs):
        tables[row, :need] = order[sum(needs[:row]) : sum(needs[: row + 1])]
        if window is not None:  # passed: anything may stand there
            tables[row, : max(0, lens[row] - counts[row] - window + 1) // block_size] = -(2**28)
    batch = attention_batch(counts, lens, num_decode, tables)
    return pool, torch.randn(sum(counts), heads[0], DIM, generator=draw), batch


def naive(query: Tensor, key: Tensor, value: Tensor, scale: float, left: int, softcap: float = 0.0) -> Tensor:
    """query (q, Hq, K) are the last of key (L, Hkv, K); left: positions before its own that a query attends, -1 for all."""
    length, share = len(key), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,lhd->hql", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(length - len(query), length)[:, None]
    seen = torch.arange(length)[None, :] <= own
    if left >= 0:
        seen &= torch.arange(length)[None, :] >= own - left
    probs = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("hql,lhd->qhd", probs, value)


# --- torch's varlen attention -----------------------------------------------------------------------------------------


def varlen_stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    num_splits: int | None,
) -> Tensor:  # fmt: skip
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(cu_seq_q) == len(seqused_k) + 1 == len(block_table) + 1
    assert int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().max()) <= max_q and int(seqused_k.max()) <= max_k and window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[2]
    out = torch.full_like(query, torch.nan)  # of rows without keys nothing is promised
    size = key.shape[1]
    for row, length in enumerate(seqused_k.tolist()):
        start, end = cu_seq_q[row : row + 2].tolist()
        if length:
            blocks = block_table[row, : -(-length // size)].long()
            keys, values = (t[blocks].flatten(0, 1)[:length] for t in (key, value))
            out[start:end] = naive(query[start:end], keys, values, scale, window_size[0])
    return out


def varlen_backend(implementation: str = "FA3") -> varlen.VarlenPaged:
    backend = varlen.VarlenPaged.__new__(varlen.VarlenPaged)  # the door is shut without a device
    backend._varlen_attn = varlen_stand_in
    backend.implementation, backend.num_splits = implementation, None
    return backend


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("implementation", ["FA2", "FA3"])
def test_varlen(window: int | None, heads: tuple[int, int], implementation: str) -> None:
    pool, query, batch = scene(heads=heads, window=window)
    settings = (batch, 0, 0.3, window, None)
    found = varlen_backend(implementation).attend(pool, query, *settings)
    torch.testing.assert_close(found, TorchPaged().attend(pool, query, *settings), rtol=1e-5, atol=1e-5)


def test_varlen_takes_what_it_is_given() -> None:
    """The installed function has every argument that we pass, under the same name."""
    if ((reason := varlen.available()) and "lacks" in reason) or "no torch.nn" in (reason or ""):
        pytest.skip(str(reason))
    from torch.nn.attention.varlen import varlen_attn

    wanted = inspect.signature(varlen_stand_in).parameters
    given = inspect.signature(varlen_attn).parameters
    assert list(wanted)[:7] == list(given)[:7] and set(wanted) <= set(given)
    assert all(given[name].kind == wanted[name].kind for name in wanted)


def test_varlen_refuses_softcap() -> None:
    pool, query, batch = scene()
    with pytest.raises(ValueError, match=r"no softcap, the model wants 30"):
        varlen_backend().attend(pool, query, batch, 0, 0.3, None, 30.0)


@pytest.mark.parametrize(
    ("spec", "block_size", "dtype", "softcap", "reason"),
    [
        (LayerSpec(2, 64, 64), 16, "bf16", None, "multiple of 256 tokens, block_size is 16"),
        (LayerSpec(2, 64, 64), 256, "fp8", None, "not fp8"),
        (LayerSpec(2, 64, 32), 256, "bf16", None, "64 and 32"),
        (LayerSpec(2, 320, 320), 256, "bf16", None, "head dim 320"),
        (LayerSpec(2, 64, 64), 256, "bf16", 50.0, "no softcap, the model wants 50"),
        (LayerSpec(2, 64, 64), 512, "fp16", None, None),
    ],
)
def test_what_flash_attention_2_cannot_serve(
    spec: LayerSpec, block_size: int, dtype: str, softcap: float | None, reason: str | None
) -> None:
    found = varlen.unfit("FA2", spec, block_size, dtype, softcap)
    assert found is None if reason is None else reason in str(found)
    if reason and "softcap" not in reason:
        with pytest.raises(ValueError, match=reason):
            varlen_backend("FA2").new_pool(spec, 2, block_size, dtype, CPU)


def test_flash_attention_3_takes_small_pages() -> None:
    assert varlen.unfit("FA3", LayerSpec(2, 64, 64), 16, "bf16") is None


def test_a_store_without_triton_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "lengthwise.engine.native.attention.triton_paged", None)
    torch_layout._store_kernel.cache_clear()
    assert torch_layout._store_kernel() is torch_layout._store_kernel() is None
    torch_layout._store_kernel.cache_clear()
    assert caplog.text.count("stored by plain torch operations") == 1


def test_varlen_says_why_it_is_not_available() -> None:
    reason = varlen.available()
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert reason is not None
    with pytest.raises(RuntimeError, match=r"CUDA|torch"):
        varlen.VarlenPaged()


# --- FlashInfer -------------------------------------------------------------------------------------------------------


class Wrapper:
    """Decode and prefill wrapper in one: plans are told in pages, kernels read the pool."""

    made = planned = 0

    def __init__(self, space: Tensor, layout: str, **settings: Any) -> None:
        assert layout == "NHD"
        type(self).made += 1
        self.plans, self.fixed = 0, settings.get("use_cuda_graph", False)
        self.cores = settings.get("use_tensor_cores")
        self.buffer = settings.get("paged_kv_indices_buffer")
        if self.fixed:
            assert len(settings["paged_kv_indptr_buffer"]) == len(settings["paged_kv_last_page_len_buffer"]) + 1
            self.rows = len(settings["paged_kv_last_page_len_buffer"])

    def plan(self, *args: Any, causal: bool | None = None, **settings: Any) -> None:
        type(self).planned += 1
        if causal is None:
            starts, indices, last, heads, kv_heads, dim, size = args
            query = torch.arange(len(last) + 1)
        else:
            query, starts, indices, last, heads, kv_heads, dim, size = args
            assert causal
        assert len(last) == len(starts) - 1 == len(query) - 1 and int(starts[-1]) == len(indices)
        assert {t.dtype for t in (starts, indices, last)} == {torch.int32} and starts.device.type == "cpu"
        assert int(last.min()) >= 1 and int(last.max()) <= size and heads % kv_heads == 0 and dim == DIM
        if self.fixed:
            assert len(last) == self.rows and len(indices) <= len(self.buffer)
        self.told, self.plans = (query.tolist(), starts.tolist(), indices.clone(), last.tolist(), settings), self.plans + 1

    def run(self, query: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
        begins, starts, indices, last, settings = self.told
        out = torch.empty_like(query)
        for row, tail in enumerate(last):
            pages = indices[starts[row] : starts[row + 1]].long()
            assert int(pages.min()) >= 0 and int(pages.max()) < len(pool[0])
            length = (len(pages) - 1) * pool[0].shape[1] + tail
            keys, values = (t[pages].flatten(0, 1)[:length] for t in pool)
            part = slice(begins[row], begins[row + 1])
            cap = settings["logits_soft_cap"] or 0.0
            out[part] = naive(query[part], keys, values, settings["sm_scale"], settings["window_left"], cap)
        return out


class Package:
    BatchDecodeWithPagedKVCacheWrapper = Wrapper
    BatchPrefillWithPagedKVCacheWrapper = Wrapper


def flashinfer_backend() -> flashinfer.FlashInferPaged:
    backend = flashinfer.FlashInferPaged.__new__(flashinfer.FlashInferPaged)
    backend._flashinfer = Package
    backend._workspace, backend._last, backend._spare, backend._kept = None, None, {}, []
    Wrapper.made = Wrapper.planned = 0
    return backend


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (7, 2.0)])
@pytest.mark.parametrize("num_decode", [0, 4])
def test_flashinfer(window: int | None, softcap: float | None, num_decode: int) -> None:
    rows = ROWS if num_decode else [row for row in ROWS if row[1]]
    pool, query, batch = scene(rows, num_decode, window=window)
    settings = (batch, 0, 0.3, window, softcap)
    found = flashinfer_backend().attend(pool, query, *settings)
    torch.testing.assert_close(found, TorchPaged().attend(pool, query, *settings), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "cores"), [((2, 2), False), ((4, 2), False), ((6, 2), True), ((8, 1), True)])
def test_tensor_cores_are_for_larger_groups_of_heads(heads: tuple[int, int], cores: bool) -> None:
    backend, (pool, query, batch) = flashinfer_backend(), scene(heads=heads)
    backend.attend(pool, query, batch, 0, 0.3, None, None)
    assert backend._last is not None
    assert [wrapper.cores for wrapper in backend._last.decode.values()] == [cores]


def test_one_plan_for_all_layers_of_a_batch() -> None:
    backend, (pool, query, batch) = flashinfer_backend(), scene()
    for _ in range(5):
        backend.attend(pool, query, batch, 0, 0.3, None, None)
    assert backend._last is not None
    (decode,), (prefill,) = backend._last.decode.values(), backend._last.prefill.values()
    assert decode.plans == prefill.plans == 1
    backend.attend(pool, query, batch, 0, 0.3, 7, None)  # a layer of another kind has a plan of its own
    assert len(backend._last.decode) == 2 and Wrapper.made == 4
    for _ in range(3):  # further batches plan anew, with the wrappers that are there
        _, _, other = scene()
        backend.attend(pool, query, other, 0, 0.3, None, None)
    assert (Wrapper.made, Wrapper.planned) == (4, 4 + 3 * 2)


def test_a_kept_batch_is_planned_anew_in_place() -> None:
    backend, (pool, query, batch) = flashinfer_backend(), scene([(1, 40), (1, 9), (1, 17)], 3)
    backend.keep(batch)
    backend.attend(pool, query, batch, 0, 0.3, None, None)  # the warm-up
    (wrapper,) = backend._kept[0].decode.values()
    batch.context_len.copy_(torch.tensor([33, 3, 0], dtype=torch.int32))  # a later step, with a padding row
    backend.replan(batch)
    assert wrapper.fixed and wrapper.plans == 2 and backend._kept[0].decode == {next(iter(backend._kept[0].decode)): wrapper}
    found = backend.attend(pool, query, batch, 0, 0.3, None, None)
    torch.testing.assert_close(found, TorchPaged().attend(pool, query, batch, 0, 0.3, None, None), rtol=1e-5, atol=1e-5)
    assert wrapper.plans == 2 and not found[2].any()


def test_what_flashinfer_cannot_serve() -> None:
    assert flashinfer.unfit(LayerSpec(2, 128, 128), "bf16") is None
    assert "not int8" in str(flashinfer.unfit(LayerSpec(2, 128, 128), "int8"))
    with pytest.raises(ValueError, match="64, 128, 256, not 80 and 80"):
        flashinfer_backend().new_pool(LayerSpec(2, 80, 80), 2, 16, "bf16", CPU)


def test_flashinfer_says_why_it_is_not_available() -> None:
    try:
        import flashinfer as package  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="flashinfer"):
            flashinfer.FlashInferPaged()
    else:
        pytest.skip("flashinfer is installed")


# --- the script for a device --------------------------------------------------------------------------------------------


def test_the_script_for_a_device_runs_in_small_without_one(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks/gpu_engine.py"
    command = [
        sys.executable,
        str(script),
        "--tiny",
        "--device",
        "cpu",
        "--backends",
        "torch",
        "--json",
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out.json").read_text())
    assert made["failed"] == made["skipped"] == {}
    figures = made["figures"]
    assert figures["error_torch_window"] == 0.0 and figures["gemm_tflop_per_s"] > 0.0
    for name in ("decode_1", "decode_4", "prefill"):
        assert figures[f"tiny_torch_{name}_tokens_per_s"] > 0.0
    assert 0.0 < figures["tiny_torch_decode_4_eager_limit_share"] < 1.0
