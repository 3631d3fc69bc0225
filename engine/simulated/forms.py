"""Least-squares fits of the three forms to priced steps: affine, roofline, table.

Errors are relative (each step is weighted by 1 / its time) and every coefficient but the knee's is solved under >= 0, so that
no fitted model gets faster with more work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from .kernels import NUM_ALL_REDUCES, KernelTables
from .shapes import ModelShape
from .steps import Steps

Arguments = dict[str, Any]  # of the cost model's constructor

DIGITS = 5  # of every fitted number, so that a solver's last bits never show
TOKEN_KNOTS = (1, 64, 128, 192, 256, 320, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROW_KNOTS = (1, 8, 16, 32, 64, 128, 256)
CONTEXT_KNOTS = (1, 128, 512, 1024, 2048, 4096, 8192)


def fit_affine(steps: Steps) -> Arguments:
    columns = [np.ones_like(steps.times), steps.rows, steps.context, steps.prefill, steps.work, steps.rows > 0]
    beta, _ = solve(columns, steps.times, steps.times)
    names = ("base", "per_row", "per_context", "per_prefill", "per_attention", "decode_base")
    return {name: short(b) for name, b in zip(names, beta, strict=True)}


def fit_roofline(steps: Steps, shape: ModelShape, tables: KernelTables) -> Arguments:
    """The knee's three numbers by nonlinear least squares; for each trial of them the linear rest is solved exactly."""
    from scipy.optimize import least_squares

    flops, weights = 2.0 * shape.layer_params, 2.0 * (shape.layer_params + shape.head_params)
    peak_flops, bandwidth = shape.tp * tables.peak_flops, shape.tp * tables.bandwidth
    compute, memory = flops * steps.tokens / peak_flops, weights / bandwidth
    each = shape.elementwise_bytes * tables.elementwise[0] + all_reduce_per_token(shape, tables, steps.tokens.max())
    token = shape.num_layers * each  # known; freed, it would trade with the knee
    # nothing is faster than the device: efficiencies up to 1, so that a step has time for all its work
    per_context, per_pair = shape.kv_bytes_per_token / bandwidth, shape.attention_flops / peak_flops
    least = token * steps.tokens + per_context * steps.context + per_pair * steps.work
    rest = [np.ones_like(steps.times), steps.rows, steps.rows > 0, steps.context, steps.chunks, steps.work]

    def at(knee: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ec, em, p = knee
        roof = ((compute / ec) ** p + (memory / em) ** p) ** (1 / p)
        return solve(rest, steps.times - roof - least, steps.times)

    bounds = ([0.1, 0.1, 1.0], [1.0, 1.0, 12.0])
    knee = least_squares(lambda x: at(x)[1], [0.7, 0.75, 2.0], bounds=bounds, xtol=1e-10, ftol=1e-12).x
    base, row, decode, context, chunk, work = at(knee)[0]
    fitted = {
        "compute_efficiency": knee[0],
        "memory_efficiency": knee[1],
        "kv_efficiency": per_context / (per_context + context),
        "attention_efficiency": per_pair / (per_pair + work),
        "sharpness": knee[2],
        "base": base,
        "token": token,
        "row": row,
        "decode": decode,
        "chunk": chunk,
    }
    return {
        "flops_per_token": flops,
        "weight_bytes": weights,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "attention_flops": shape.attention_flops,
        "peak_flops": peak_flops,
        "bandwidth": bandwidth,
        **{name: short(value) for name, value in fitted.items()},
    }


def all_reduce_per_token(shape: ModelShape, tables: KernelTables, tokens: float) -> float:
    """Seconds a layer's all-reduces take for one more token, in steps of many (`tokens`); what short messages take beyond that
    is left to `base` and the knee."""
    if shape.tp == 1 or tables.all_reduce is None:
        return 0.0
    sizes, times = tables.all_reduce
    i = min(max(bisect_left(sizes, tokens * shape.hidden), 1), len(sizes) - 1)
    return NUM_ALL_REDUCES * shape.hidden * (times[i] - times[i - 1]) / (sizes[i] - sizes[i - 1])


def fit_table(
    steps: Steps,
    token_knots: Sequence[int] = TOKEN_KNOTS,
    row_knots: Sequence[int] = ROW_KNOTS,
    context_knots: Sequence[int] = CONTEXT_KNOTS,
) -> Arguments:
    """Unknowns are the rises between neighbouring knots, so that the curve and the grid are monotone."""
    num_tokens, shape = len(token_knots), (len(row_knots), len(context_knots))
    rows = np.maximum(steps.rows, 1)
    curve = _rises(steps.tokens, token_knots)
    by_row, by_context = _rises(rows, row_knots), _rises(np.maximum(steps.context / rows, 1), context_knots)
    grid = (by_row[:, :, None] * by_context[:, None, :]).reshape(len(steps.times), -1) * (steps.rows > 0)[:, None]
    columns = [*curve.T, *grid.T, steps.chunks, steps.prefill, steps.work]
    beta, _ = solve(columns, steps.times, steps.times)
    linear = np.cumsum(beta[:num_tokens])
    attention = beta[num_tokens:-3].reshape(shape).cumsum(axis=0).cumsum(axis=1)
    for i, j in np.ndindex(*shape):
        if j > 1 and row_knots[i] * context_knots[j - 1] >= steps.context.max():  # no step came here: the line goes on
            slope = (attention[i, j - 1] - attention[i, j - 2]) / (context_knots[j - 1] - context_knots[j - 2])
            attention[i, j] = attention[i, j - 1] + slope * (context_knots[j] - context_knots[j - 1])
    chunk, chunk_token, per_attention = beta[-3:]
    return {
        "tokens": list(token_knots),
        "linear": [short(v) for v in linear],
        "rows": list(row_knots),
        "contexts": list(context_knots),
        "attention": [[short(v) for v in line] for line in attention],
        "per_attention": short(per_attention),
        "chunk": short(chunk),
        "chunk_token": short(chunk_token),
    }


def short(value: float) -> float:
    """The number with `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


def _rises(x: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """(N, K) weights of the first value and the rises from knot to knot in the broken line at x (N,); the ends go on."""
    k = np.asarray(knots, dtype=np.float64)
    i = np.clip(np.searchsorted(k, x, side="right") - 1, 0, len(k) - 2)
    w = (x - k[i]) / (k[i + 1] - k[i])
    out = np.zeros((len(x), len(k)))
    at = np.arange(len(x))
    out[at, i] = 1 - w
    out[at, i + 1] = w
    return out @ np.tril(np.ones((len(k), len(k))))


def solve(columns: Sequence[np.ndarray], y: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients >= 0, residuals relative to `times`) of y (N,) on the columns (N,)."""
    from scipy.optimize import nnls

    x = np.column_stack(columns) / times[:, None]
    scale = np.sqrt((x**2).sum(axis=0))  # the columns span twelve decades
    scale[scale == 0] = 1.0
    beta, _ = nnls(x / scale, y / times, maxiter=100 * x.shape[1])
    beta = beta / scale
    return beta, x @ beta - y / times
