"""TritonPaged: paged attention in our own Triton kernels, for any head size, dtype, window and softcap on a GPU.

Layout and precision of the pool are TorchPaged's, so that either can read what the other has kept.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..batch import Batch
from ..pool import LayerSpec, Pool
from .scaled import LARGEST
from .torch_layout import TorchLayout
from .triton_kernels import combine_kernel, decode_kernel, prefill_kernel, store_kernel

MAX_SPLITS = 64
TOKENS_PER_SPLIT = 128  # fewer are not worth a program of their own


class TritonPaged(TorchLayout):
    """Pool tensors as TorchPaged has them, every dtype of KV_DTYPES (fp8 wants compute capability 8.9). Everything runs on the
    device without a look at it, so that steps can be captured in CUDA graphs.

    num_splits: programs that share one row's context while decoding; None chooses by rows and context, so that few rows fill
    the device. Fixed, a row's result does not depend on how many others there are. Raises RuntimeError where no kernel runs.
    """

    name = "triton"
    captures = True

    def __init__(self, num_splits: int | None = None) -> None:
        if reason := available():
            raise RuntimeError(reason)
        if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits {num_splits} is not within 1 to {MAX_SPLITS}")
        self.num_splits = num_splits

    def unfit(self, spec: LayerSpec, block_size: int, dtype: str, softcap: float | None = None) -> str | None:
        """Why such a layer cannot be served, or None."""
        if dtype == "fp8" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            return f"fp8 KV needs compute capability 8.9, this device has {torch.cuda.get_device_capability()}"
        return None

    def store(self, pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Mutates `pool`."""
        store(pool, key, value, slots)

    def attend(
        self, pool: Pool, query: Tensor, batch: Batch, group: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], pool.tensors[1].shape[-1])
        table, limits = batch.groups[group].block_tables, {"WINDOW": window or 0, "SOFTCAP": softcap or 0.0}
        if batch.num_decode:
            self._decode(pool, query, out, batch, table, scale, limits)
        if batch.num_rows > batch.num_decode:
            self._prefill(pool, query, out, batch, table, scale, limits)
        return out

    def _decode(
        self, pool: Pool, query: Tensor, out: Tensor, batch: Batch, table: Tensor, scale: float, limits: dict[str, float]
    ) -> None:
        rows, num_heads, v_dim = batch.num_decode, *out.shape[1:]
        num_kv_heads = pool.tensors[0].shape[2]
        reach = min(batch.max_context, int(limits["WINDOW"]) or batch.max_context)
        splits = self.num_splits or choose_splits(rows * num_kv_heads, reach, num_programs(query.device))
        parts, sums = out, out  # not read where nothing is split
        if splits > 1:
            parts = torch.empty(rows, num_heads, splits, v_dim, dtype=torch.float32, device=out.device)
            sums = torch.empty(rows, num_heads, splits, 2, dtype=torch.float32, device=out.device)
        sizes = tile(query, pool, num_heads // num_kv_heads, decoding=True)
        decode_kernel[(rows, num_kv_heads, splits)](
            query, *pointers(pool), table, batch.context_len, out, parts, sums, scale, table.stride(0),
            SPLITS=splits, **limits, **sizes,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(rows, num_heads)](
                parts, sums, out, NUM_HEADS=num_heads, SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), V_DIM=v_dim,
                V_PAD=sizes["V_PAD"],
            )  # fmt: skip

    def _prefill(
        self, pool: Pool, query: Tensor, out: Tensor, batch: Batch, table: Tensor, scale: float, limits: dict[str, float]
    ) -> None:
        num_kv_heads = pool.tensors[0].shape[2]
        heads = query.shape[1] // num_kv_heads
        sizes = tile(query, pool, heads, decoding=False)
        tiles = triton.cdiv(batch.max_query * heads, sizes["ROWS"])
        prefill_kernel[(tiles, num_kv_heads, batch.num_rows - batch.num_decode)](
            query, *pointers(pool), table, batch.query_start, batch.context_len, out, scale, table.stride(0), batch.num_decode,
            **limits, **sizes,
        )  # fmt: skip


def available() -> str | None:
    """Why no kernel can run here, or None."""
    if interpreted() or torch.cuda.is_available():
        return None
    return "Triton kernels need a GPU (or TRITON_INTERPRET=1 before triton is imported)"


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on the CPU."""
    return not isinstance(decode_kernel, triton.JITFunction)


def num_programs(device: torch.device) -> int:
    """Programs that keep the device busy."""
    if device.type != "cuda":
        return 16
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(num_tiles: int, context: int, wanted: int) -> int:
    """A power of two of programs for each of `num_tiles` (row, KV head), so that about `wanted` run; few for short contexts."""
    most = min(MAX_SPLITS, max(wanted // num_tiles, 1), max(context // TOKENS_PER_SPLIT, 1))
    return 1 << (most.bit_length() - 1)


def pointers(pool: Pool) -> tuple[Tensor, ...]:
    """Keys, values and the scales of both; where there are none, the keys stand in and are not read."""
    keys, values, *scales = pool.tensors
    return (keys, values, *(scales or (keys, keys)))


def tile(query: Tensor, pool: Pool, heads: int, decoding: bool) -> dict[str, int | bool]:
    """Compile-time sizes. ROWS: query rows of a program ((token, head) pairs of one KV head's group); COLUMNS: keys at once."""
    keys, values = pool.tensors[:2]
    k_pad, v_pad = (max(16, triton.next_power_of_2(t.shape[-1])) for t in (keys, values))
    wide = max(k_pad, v_pad) * query.element_size() > 256  # bytes of one key: shared memory holds two tiles of keys and values
    columns = 32 if wide else 64
    if decoding:
        rows, warps = max(16, triton.next_power_of_2(heads)), 4
    else:
        rows, warps = (64, 4) if wide else (128, 8)
    if query.element_size() == 4:  # no tensor cores: the products are held in registers
        rows, columns = rows if decoding else 32, 16
    return dict(
        NUM_KV_HEADS=keys.shape[2], HEADS=heads, K_DIM=keys.shape[-1], V_DIM=values.shape[-1], K_PAD=k_pad, V_PAD=v_pad,
        BLOCK_SIZE=pool.block_size, SCALED=len(pool.tensors) > 2, ROWS=rows, COLUMNS=columns,
        num_warps=warps, num_stages=2,
    )  # fmt: skip


def store(pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """key (N, Hkv, K), value (N, Hkv, V) into `slots` (N,); a negative slot keeps nothing. Mutates `pool`."""
    keys = pool.tensors[0]
    _, num_kv_heads, k_dim = key.shape
    limit = LARGEST.get(keys.dtype, 0.0)
    store_kernel[(slots.shape[0],)](
        key.contiguous(), value.contiguous(), slots, *pointers(pool),
        NUM_KV_HEADS=num_kv_heads, HEADS_PAD=triton.next_power_of_2(num_kv_heads), K_DIM=k_dim, V_DIM=value.shape[-1],
        K_PAD=triton.next_power_of_2(k_dim), V_PAD=triton.next_power_of_2(value.shape[-1]), LIMIT=limit,
        ROUND=keys.dtype == torch.int8,
    )  # fmt: skip
