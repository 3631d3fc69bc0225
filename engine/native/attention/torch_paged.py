"""TorchPaged: paged attention in plain torch operations, on any device: the reference of the other backends and their fallback.

A row's blocks are gathered into one padded tensor, in fp32, and attended with an explicit softmax: simple, and right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch
from ..pool import KV_DTYPES, LayerSpec, Pool
from .scaled import LARGEST, quantise

LIMIT = {"cpu": 1 << 20}  # numbers in a gathered or score tensor, else 2^24: slices of what is larger stay in the caches


class TorchPaged:
    """Pool tensors: keys (num_blocks, block_size, Hkv, K) and values (num_blocks, block_size, Hkv, V); for int8 and fp8 also
    the scales of both, (num_blocks, block_size, Hkv) fp32. Any block size of at least 1, every dtype of KV_DTYPES."""

    name = "torch"

    def new_pool(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: str, device: torch.device) -> Pool:
        """Zeros: what is gathered and masked must at least be finite. Raises ValueError for an unknown dtype or no size."""
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")
        if block_size < 1 or num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens: both must be at least 1")
        shape = (num_blocks, block_size, spec.num_kv_heads)
        kept = KV_DTYPES[dtype]
        tensors = [torch.zeros(*shape, dim, dtype=kept, device=device) for dim in (spec.k_dim, spec.v_dim)]
        if kept in LARGEST:
            tensors += [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)]
        return Pool(tuple(tensors), block_size)

    def store(self, pool: Pool, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Without a look at `slots` on the host: a token that keeps nothing repeats the write of the first one that does."""
        if not slots.shape[0]:
            return
        kept = slots >= 0
        order = torch.arange(slots.shape[0], device=slots.device)
        source = torch.where(kept, order, kept.int().argmax())
        index, any_kept = slots[source].clamp_min(0), kept.any()
        key, value = key[source], value[source]
        parts: list[Tensor] = [key, value]
        if pool.tensors[0].dtype in LARGEST:
            (key, k_scale), (value, v_scale) = (quantise(x, pool.tensors[0].dtype) for x in (key, value))
            parts = [key, value, k_scale, v_scale]
        for tensor, part in zip(pool.tensors, parts, strict=True):
            flat = tensor.flatten(0, 1)
            flat[index] = torch.where(any_kept, part.to(tensor.dtype), flat[index])

    def attend(
        self, pool: Pool, query: Tensor, batch: Batch, group: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Decoding rows together, chunks one by one. Reads row lengths on the host only if there are chunks."""
        tables, lens, num_decode = batch.groups[group].block_tables, batch.context_len, batch.num_decode
        out = query.new_zeros(query.shape[0], query.shape[1], pool.tensors[1].shape[-1])
        per_token = pool.tensors[0].shape[2] * (query.shape[2] + out.shape[2]) + 2 * query.shape[1]
        limit = LIMIT.get(query.device.type, 1 << 24)
        reach = batch.max_context if window is None else min(batch.max_context, window)
        at_once = max(1, limit // (per_token * max(reach, 1)))
        for first in range(0, num_decode, at_once):
            rows = slice(first, min(first + at_once, num_decode))
            part = query[rows].unsqueeze(1)
            out[rows] = _attend(pool, part, lens[rows], batch.max_context, tables[rows], scale, window, softcap).squeeze(1)
        if num_decode == batch.num_rows:
            return out
        starts, contexts = batch.query_start.tolist(), lens.tolist()
        for row in range(num_decode, batch.num_rows):
            start, end, context = starts[row], starts[row + 1], contexts[row]
            if not context:
                continue
            at_once = max(16, limit // (query.shape[1] * context))
            for first in range(start, end, at_once):
                last = min(first + at_once, end)
                seen = context - (end - last)
                part, length = query[None, first:last], lens[row : row + 1] - (end - last)
                out[first:last] = _attend(pool, part, length, seen, tables[row : row + 1], scale, window, softcap)[0]
        return out


def _attend(
    pool: Pool,
    query: Tensor,
    lens: Tensor,
    longest: int,
    tables: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """query (n, q, Hq, K), the last q tokens of n rows of lens (n,) <= longest; tables (n, B) -> (n, q, Hq, V)."""
    num_rows, num_queries, num_heads, k_dim = query.shape
    block_size, num_kv_heads, v_dim = pool.block_size, pool.tensors[0].shape[2], pool.tensors[1].shape[-1]
    group = num_heads // num_kv_heads
    positions = lens[:, None] - num_queries + torch.arange(num_queries, device=lens.device)
    width, first = -(-longest // block_size), torch.zeros_like(lens)
    if window is not None:  # blocks that it has passed may hold anything by now
        first = (positions[:, 0] - window + 1).clamp_min(0) // block_size
        width = min(width, (num_queries + window + block_size - 3) // block_size + 1)
    at = (first * block_size)[:, None] + torch.arange(width * block_size, device=lens.device)
    own = torch.minimum(at, lens[:, None] - 1).clamp_min(0)  # what no query of the row attends is never read: 0 * inf is not 0
    if window is not None:
        own = torch.maximum(own, (positions[:, :1] - window + 1).clamp_min(0))
    blocks = torch.where(lens[:, None] > 0, tables.gather(1, (own // block_size).long()), 0)
    slots = (blocks.long() * block_size + own % block_size)[:, None, :]
    index = (slots * num_kv_heads + torch.arange(num_kv_heads, device=lens.device)[:, None]).flatten()
    shape = (num_rows, num_kv_heads, at.shape[1])
    key, value = _gather(pool, 0, index).view(*shape, k_dim), _gather(pool, 1, index).view(*shape, v_dim)
    unseen = at[:, None, :] > positions[:, :, None]
    if window is not None:
        unseen |= at[:, None, :] <= positions[:, :, None] - window
    parts = query.float().reshape(num_rows, num_queries, num_kv_heads, group, k_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (parts @ key.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_rows, num_kv_heads, group, num_queries, at.shape[1])
    scores.masked_fill_(unseen[:, None, None], -torch.inf)
    out = torch.softmax(scores, -1).flatten(2, 3) @ value
    out = out.view(num_rows, num_kv_heads, group, num_queries, v_dim).permute(0, 3, 1, 2, 4)
    nothing = (positions < 0)[:, :, None, None]
    return out.reshape(num_rows, num_queries, num_heads, v_dim).masked_fill_(nothing, 0.0).to(query.dtype)


def _gather(pool: Pool, which: int, index: Tensor) -> Tensor:
    """Keys (which = 0) or values (1) at index = slot * Hkv + head (n,), as fp32 (n, dim)."""
    found = pool.tensors[which].flatten(0, 2).index_select(0, index).float()
    if len(pool.tensors) > 2:
        found *= pool.tensors[which + 2].flatten()[index][:, None]
    return found
