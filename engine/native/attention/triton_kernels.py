"""Triton kernels of paged attention: store, decode, combine, prefill. triton_paged.py launches them.

One loop over keys (`_walk`) serves decoding rows, which split their context over several programs and combine the parts, and
chunks, which share each loaded key among all queries of its group of heads.

Flash-decoding (Dao et al. 2023) for the split, FlashAttention-2 (ICLR 2024) for the loop, PagedAttention (SOSP 2023) for the
blocks. Pools are as TorchPaged has them: keys (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, K_DIM), values (..., V_DIM), and for one
byte a number the scales of both (num_blocks, BLOCK_SIZE, NUM_KV_HEADS). Compile-time sizes: HEADS query heads of one KV head,
ROWS query rows of a program, COLUMNS keys at once; a PAD is the power of two above. No kernel asks the host for anything.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away rounds fp32 to the nearest even integer


@triton.jit
def _store_part(source, target, scales, token, slot, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
                PAD: tl.constexpr, LIMIT: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    head, at = tl.arange(0, HEADS_PAD), tl.arange(0, PAD)
    inside = (head < HEADS)[:, None] & (at < DIM)[None, :]
    offset = head[:, None] * DIM + at[None, :]
    numbers = tl.load(source + token * (HEADS * DIM) + offset, mask=inside, other=0.0)
    if LIMIT > 0:
        numbers = numbers.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-30) / LIMIT
        tl.store(scales + slot * HEADS + head, scale, mask=head < HEADS)
        numbers = tl.minimum(tl.maximum(numbers / scale[:, None], -LIMIT), LIMIT)
        if ROUND:
            numbers = (numbers + ROUNDER) - ROUNDER
    tl.store(target + slot * (HEADS * DIM) + offset, numbers.to(target.dtype.element_ty), mask=inside)


@triton.jit
def store_kernel(key, value, slots, keys, values, key_scales, value_scales, NUM_KV_HEADS: tl.constexpr,
                 HEADS_PAD: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
                 LIMIT: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """One program a token: key (N, NUM_KV_HEADS, K_DIM) and value into slots (N,); a negative slot keeps nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        _store_part(key, keys, key_scales, token, slot, NUM_KV_HEADS, HEADS_PAD, K_DIM, K_PAD, LIMIT, ROUND)
        _store_part(value, values, value_scales, token, slot, NUM_KV_HEADS, HEADS_PAD, V_DIM, V_PAD, LIMIT, ROUND)


@triton.jit
def _walk(query, position, keys, values, key_scales, value_scales, table, kv_head, first, last, scale,
          NUM_KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
          BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
          SOFTCAP: tl.constexpr):  # fmt: skip
    """Attend keys first <= j < last: query (ROWS, K_PAD) at position (ROWS,) -> the weighted sum of values (ROWS, V_PAD), the
    greatest score of each row, in powers of two, and the sum of weights. Blocks outside of first to last are not looked at: a
    window has passed them, and they may hold anything."""
    k_at, v_at = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_PAD], tl.float32)
    for start in range(first, last, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at < last
        block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = (block * BLOCK_SIZE + at % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        key = tl.load(keys + place[None, :] * K_DIM + k_at[:, None], mask=inside[None, :] & (k_at < K_DIM)[:, None], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
        if SCALED:
            scores *= tl.load(key_scales + place, mask=inside, other=0.0)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)  # tanh
        seen = inside[None, :] & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        floor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores - floor[:, None])
        decay = tl.exp2(top - floor)
        value = tl.load(
            values + place[:, None] * V_DIM + v_at[None, :], mask=inside[:, None] & (v_at < V_DIM)[None, :], other=0.0
        )
        if SCALED:
            value = value.to(tl.float32) * tl.load(value_scales + place, mask=inside, other=0.0)[:, None]
        sums = sums * decay[:, None] + tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        top = higher
    return sums, top, total


@triton.jit
def decode_kernel(queries, keys, values, key_scales, value_scales, tables, context_len, out, parts, part_sums, scale,
                  table_width, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
                  K_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """One program a (row, KV head, share of the context): out of rows that are not split, else parts (D, Hq, SPLITS, V_DIM) and
    part_sums (D, Hq, SPLITS, 2), both fp32, for combine_kernel."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_len + row)
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(context - first, SPLITS), COLUMNS) * COLUMNS
    first += split * share
    last = tl.minimum(first + share, context)
    head, k_at, v_at = tl.arange(0, ROWS), tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    at = row * (NUM_KV_HEADS * HEADS) + kv_head * HEADS + head  # of (row, head)
    real = (head < HEADS)[:, None]
    query = tl.load(queries + at[:, None] * K_DIM + k_at[None, :], mask=real & (k_at < K_DIM)[None, :], other=0.0)
    position = tl.zeros([ROWS], tl.int32) + context - 1
    sums, top, total = _walk(
        query, position, keys, values, key_scales, value_scales, tables + row * table_width, kv_head, first, last, scale,
        NUM_KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, SCALED, ROWS, COLUMNS, WINDOW, SOFTCAP,
    )  # fmt: skip
    inside = real & (v_at < V_DIM)[None, :]
    if SPLITS == 1:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] * V_DIM + v_at[None, :], sums.to(out.dtype.element_ty), mask=inside)
    else:
        at = at * SPLITS + split
        tl.store(parts + at[:, None] * V_DIM + v_at[None, :], sums, mask=inside)
        tl.store(part_sums + at * 2, top, mask=head < HEADS)
        tl.store(part_sums + at * 2 + 1, total, mask=head < HEADS)


@triton.jit
def combine_kernel(parts, part_sums, out, NUM_HEADS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
                   V_DIM: tl.constexpr, V_PAD: tl.constexpr):  # fmt: skip
    """One program a (row, head): the parts of decode_kernel, weighted by what each has seen."""
    at = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    split, v_at = tl.arange(0, SPLITS_PAD), tl.arange(0, V_PAD)
    part = at * SPLITS + split
    top = tl.load(part_sums + part * 2, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(part_sums + part * 2 + 1, mask=split < SPLITS, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    inside = (split < SPLITS)[:, None] & (v_at < V_DIM)[None, :]
    sums = tl.sum(tl.load(parts + part[:, None] * V_DIM + v_at[None, :], mask=inside, other=0.0) * weight[:, None], 0)
    total = tl.sum(total * weight, 0)
    result = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * V_DIM + v_at, result.to(out.dtype.element_ty), mask=v_at < V_DIM)


@triton.jit
def prefill_kernel(queries, keys, values, key_scales, value_scales, tables, query_start, context_len, out, scale, table_width,
                   num_decode, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
                   K_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """One program a (ROWS pairs of token and head, KV head, row from num_decode on)."""
    row, kv_head = tl.program_id(2).to(tl.int64) + num_decode, tl.program_id(1)
    start, end, context = tl.load(query_start + row), tl.load(query_start + row + 1), tl.load(context_len + row)
    length = end - start
    base = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the last tokens attend most: they begin first
    if base < length * HEADS:
        pair = base + tl.arange(0, ROWS)
        token, head = pair // HEADS, pair % HEADS
        k_at, v_at = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        real = token < length
        before = context - length
        last = tl.minimum(before + (base + ROWS - 1) // HEADS + 1, context)
        first = context * 0
        if WINDOW > 0:
            first = tl.maximum(before + base // HEADS - WINDOW + 1, 0)
        at = (start.to(tl.int64) + token) * (NUM_KV_HEADS * HEADS) + kv_head * HEADS + head
        there = real[:, None] & (k_at < K_DIM)[None, :]
        query = tl.load(queries + at[:, None] * K_DIM + k_at[None, :], mask=there, other=0.0)
        sums, _, total = _walk(
            query, before + token, keys, values, key_scales, value_scales, tables + row * table_width, kv_head, first, last,
            scale, NUM_KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, SCALED, ROWS, COLUMNS, WINDOW, SOFTCAP,
        )  # fmt: skip
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        inside = real[:, None] & (v_at < V_DIM)[None, :]
        tl.store(out + at[:, None] * V_DIM + v_at[None, :], sums.to(out.dtype.element_ty), mask=inside)
