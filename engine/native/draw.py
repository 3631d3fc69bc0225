"""Draw: which token a uniform number falls on. The number is a function of (seed, tokens so far), the token of it and its row.

So a request draws the same tokens in whatever batch it runs, after any preemption, and on any device, as long as its weights
are the same: where a number falls within rounding of the border between two tokens, devices can differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

_BLOCK = 256  # tokens whose weights are added up first when drawing from a whole vocabulary
_GROUP = 16  # tokens of which only the greatest is looked at, to bound the k-th weight from below


def on_host(tensor: Tensor) -> bool:
    """Whether numpy can work on it in place; it compares, collects and finds maxima several times as fast as torch there."""
    return tensor.device.type == "cpu"


def draw_whole(weights: Tensor, uniform: Floats) -> list[int]:
    """A token of each row of weights (n, V) fp32 >= 0, by inverse CDF in vocabulary order. A weight of 0 is never drawn.

    First the block of 256 tokens that the number falls on, then the token in it: a vocabulary is summed, never scanned.
    """
    n, width = weights.shape
    if width % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - width % _BLOCK))
    blocks = weights.view(n, -1, _BLOCK)
    cdf = blocks.sum(-1).double().cumsum(-1)
    target = _below(torch.from_numpy(uniform).to(weights.device)[:, None] * cdf[:, -1:], cdf[:, -1:])
    block = (cdf <= target).sum(-1, keepdim=True)
    start = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks[torch.arange(n, device=weights.device), block[:, 0]].double().cumsum(-1)
    token = (inside <= _below(target - start, inside[:, -1:])).sum(-1)
    tokens: list[int] = (block[:, 0] * _BLOCK + token).tolist()
    return tokens


def _below(target: Tensor, total: Tensor) -> Tensor:
    """target, kept in [0, total): rounding must not carry it past the last token that has weight."""
    return torch.minimum(target.clamp_min(0.0), torch.nextafter(total, torch.zeros_like(total)))


def draw_cut(
    weights: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float], uniform: Floats
) -> list[int]:
    """A token of each row of weights (n, V) fp32 >= 0, cut to the top k (0: all), then to the fewest whose share of what is
    left reaches top_p, then to those of at least min_p times the greatest; equal weights rank by token id. Inverse CDF from
    the likeliest token down.

    No token of the cut set lies under `bound`: it picks the candidates on the device, and they alone are ranked, on the host.
    """
    n, width = weights.shape
    k = torch.tensor([min(k, width) or width for k in top_k])
    total = weights.sum(-1)
    # tokens under (1 - p) of the total shared among all are together less than what a nucleus may leave out; half, for rounding
    bound = 0.5 * (1.0 - torch.tensor(top_p, dtype=torch.float64)).float().to(total.device) * total / width
    limited = (k < width).nonzero()[:, 0]
    if len(limited):
        on_device = limited.to(weights.device)
        part = weights if len(limited) == n else weights[on_device]
        bound[on_device] = _kth_at_least(part, k[limited].to(weights.device))
    ends, token, weight = _at_least(weights, bound)
    totals, ks = total.tolist(), k.tolist()
    drawn = []
    for r in range(n):
        own = slice(ends[r], ends[r + 1])
        share = totals[r] if ks[r] == width else None
        drawn.append(_draw_ranked(weight[own], token[own], ks[r], share, top_p[r], min_p[r], uniform[r]))
    return drawn


def _at_least(weights: Tensor, bound: Tensor) -> tuple[list[int], NDArray[np.int64], NDArray[np.float32]]:
    """The tokens (m,) of weights (n, V) that are not under their row's bound (n,), by row and id, their weights, and where each
    row's begin (n + 1)."""
    n, width = weights.shape
    if on_host(weights):
        array = weights.numpy()
        flat = np.flatnonzero(array >= bound.numpy()[:, None])
        weight = array.reshape(-1)[flat]
    else:
        at = (weights >= bound[:, None]).view(-1).nonzero()[:, 0]
        flat, weight = at.cpu().numpy(), weights.view(-1)[at].cpu().numpy()
    ends = np.searchsorted(flat, np.arange(n + 1) * width)
    return ends.tolist(), flat - np.repeat(np.arange(n) * width, np.diff(ends)), weight


def _kth_at_least(weights: Tensor, k: Tensor) -> Tensor:
    """A bound (n,) that the k-th greatest weight is not under: the k-th of the maxima of groups, 0 where there are too few."""
    n, width = weights.shape
    num_groups = width // _GROUP
    few = k <= num_groups
    most = int(torch.where(few, k, 0).max())
    if most == 0:
        return torch.zeros(n, dtype=weights.dtype, device=weights.device)
    maxima = weights[:, : num_groups * _GROUP].reshape(n, _GROUP, num_groups).amax(1)
    ranked = maxima.topk(most, dim=-1).values
    kth = ranked.gather(1, (k.clamp_max(most) - 1)[:, None])[:, 0]
    return torch.where(few, kth, 0.0)


def _draw_ranked(
    weight: NDArray[np.float32],
    token: NDArray[np.int64],
    k: int,
    total: float | None,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """One row of `draw_cut` over its candidates, in order of token id; total: of the whole row, None where the top k are it."""
    # a weight >= 0 orders like its bits; below them the token id, so that one sort of whole numbers ranks both
    key = (weight.view(np.int32).astype(np.int64) << 32) | (0xFFFFFFFF - token)
    key.sort()
    key = key[::-1][:k]
    ranked = (key >> 32).astype(np.int32).view(np.float32)
    cdf = ranked.cumsum(dtype=np.float64)
    n = len(cdf)
    if top_p < 1.0:
        n = min(n, int(cdf.searchsorted(top_p * (cdf[-1] if total is None else total))) + 1)
    if min_p > 0.0:
        n = min(n, int((ranked >= min_p * ranked[0]).sum()))
    at = int(cdf[:n].searchsorted(uniform * cdf[n - 1], side="right"))
    while at >= n or ranked[at] == 0.0:  # rounding carried it to the end
        at -= 1
    return 0xFFFFFFFF - int(key[at] & 0xFFFFFFFF)
