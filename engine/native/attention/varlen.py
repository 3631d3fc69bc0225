"""VarlenPaged: paged attention by torch's own flash attention (torch.nn.attention.varlen), without any other package.

What it can do hangs on the kernel behind it. FlashAttention-2, which torch carries, reads pages of a multiple of 256 tokens;
FlashAttention-3 and 4, activated by the user, read pages of any size. None of them has a softcap here.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..pool import LayerSpec, Pool
from .torch_layout import TorchLayout

log = logging.getLogger(__name__)

PAGE_STEP = 256  # FlashAttention-2
MAX_HEAD_DIM = 256
DTYPES = ("bf16", "fp16")


class VarlenPaged(TorchLayout):
    """Pool tensors as TorchPaged has them, bf16 or fp16: keys and values (num_blocks, block_size, Hkv, K) with K = V.

    num_splits: programs that share one row's keys; None: 1 with FlashAttention-2 (splits of paged KV have been seen to give NaN
    there), the kernel's choice otherwise. Raises RuntimeError where torch or the device has no such kernel.
    """

    name = "varlen"
    captures = True

    def __init__(self, num_splits: int | None = None) -> None:
        if reason := available():
            raise RuntimeError(reason)
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn: Any = varlen_attn
        self.implementation = implementation()
        self.num_splits = 1 if num_splits is None and self.implementation == "FA2" else num_splits

    def unfit(self, spec: LayerSpec, block_size: int, dtype: str, softcap: float | None = None) -> str | None:
        """Why such a layer cannot be served, or None."""
        return unfit(self.implementation, spec, block_size, dtype, softcap)

    def attend(
        self, pool: Pool, query: Tensor, batch: Batch, group: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Decoding rows and chunks in a call each, so that neither waits for tiles of the other's size."""
        if softcap is not None:
            raise ValueError(f"torch's varlen attention has no softcap, the model wants {softcap}")
        table = batch.groups[group].block_tables
        if window is not None:  # the kernel may look up entries just before the window: any block will do, they are masked
            table = table.clamp(0, pool.num_blocks - 1)
        num, starts, lens = batch.num_decode, batch.query_start, batch.context_len
        out = torch.empty_like(query)
        if num:
            part = self._call(
                pool, query[:num], starts[: num + 1], lens[:num], table[:num], 1, batch.max_context, scale, window
            )
            out[:num] = part.masked_fill_((lens[:num] == 0)[:, None, None], 0.0)
        if batch.num_rows > num:
            out[num:] = self._call(
                pool,
                query[num:],
                starts[num:] - num,
                lens[num:],
                table[num:],
                batch.max_query,
                batch.max_context,
                scale,
                window,
            )
        return out

    def _call(
        self, pool: Pool, query: Tensor, starts: Tensor, lens: Tensor, table: Tensor, max_query: int, max_context: int,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        keys, values = pool.tensors
        out: Tensor = self._varlen_attn(
            query.contiguous(), keys, values, starts,
            starts if self.implementation == "FA2" else None,  # it wants one, and with seqused_k does not read it
            max_query, max(max_context, 1),
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=lens, block_table=table, num_splits=self.num_splits,
        )  # fmt: skip
        return out


def available() -> str | None:
    """Why it cannot run here, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = {"block_table", "seqused_k", "num_splits", "enable_gqa"} - set(inspect.signature(varlen_attn).parameters)
    if missing:
        return f"varlen_attn of torch {torch.__version__} lacks {', '.join(sorted(missing))}"
    if not torch.cuda.is_available():
        return "torch's varlen attention needs a CUDA device"
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        return f"flash attention needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    return None


def implementation() -> str:
    """FA2 unless the user has activated another flash attention."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return (current() if current else None) or "FA2"


def unfit(implementation: str, spec: LayerSpec, block_size: int, dtype: str, softcap: float | None = None) -> str | None:
    """Why `implementation` cannot serve such a layer, or None."""
    if dtype not in DTYPES:
        return f"torch's varlen attention keeps KV in {' or '.join(DTYPES)}, not {dtype}"
    if spec.k_dim != spec.v_dim:
        return f"torch's varlen attention wants keys as long as values, not {spec.k_dim} and {spec.v_dim}"
    if spec.k_dim % 8 or spec.k_dim > MAX_HEAD_DIM:
        return f"head dim {spec.k_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if implementation == "FA2" and block_size % PAGE_STEP:
        return f"FlashAttention-2 reads pages of a multiple of {PAGE_STEP} tokens, block_size is {block_size}"
    if softcap is not None:
        return f"torch's varlen attention has no softcap, the model wants {softcap}"
    return None
