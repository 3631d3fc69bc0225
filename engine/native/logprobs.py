"""Logprobs: what the model gave the chosen token and the likeliest ones, before penalties, temperature or any cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOGPROBS = 20  # likeliest tokens that a request can ask for
_GROUP = 64  # tokens of which only the greatest is looked at first


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one generated token, natural logarithms. top: (token id, log probability) of the likeliest tokens, likeliest first,
    equal ones by id, without those that cannot occur; the chosen token is among them only if it is one of them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def raw_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """Of each row of the unmodified logits (n, V) fp32, its chosen token and its num_top (0 to 20) likeliest."""
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - norm)[:, 0].tolist()
    if not any(num_top):
        return [Logprobs(token, logprob) for token, logprob in zip(token_ids, chosen, strict=True)]
    values, ids = _likeliest(logits, min(MAX_LOGPROBS, logits.shape[1]))
    top_values, top_ids = (values - norm).tolist(), ids.tolist()
    return [
        Logprobs(token, logprob, tuple(pair for pair in zip(row_ids[:n], row_values[:n], strict=True) if pair[1] > -math.inf))
        for token, logprob, row_ids, row_values, n in zip(token_ids, chosen, top_ids, top_values, num_top, strict=True)
    ]


def _likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest logits of each row and their ids, (n, k) each, greatest first, equal ones by id.

    They lie in the k groups (a group: every G-th token) with the greatest maxima, so that the vocabulary is read but not
    ranked. k is the same for all rows: what a row reports does not depend on what others ask for.
    """
    n, width = logits.shape
    groups = -(-width // _GROUP)
    if groups > k:
        padded = torch.nn.functional.pad(logits, (0, groups * _GROUP - width), value=-math.inf) if width % _GROUP else logits
        grouped = padded.view(n, _GROUP, groups)
        best = grouped.amax(1).topk(k, dim=-1).indices  # (n, k)
        starts = torch.arange(0, groups * _GROUP, groups, device=logits.device)
        ids = (best[:, None, :] + starts[None, :, None]).view(n, -1)
        ids = ids.gather(1, padded.gather(1, ids).topk(k, dim=-1).indices).sort(dim=-1).values
        values = padded.gather(1, ids)
    else:
        ids = torch.arange(width, device=logits.device).expand(n, -1)
        values = logits
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return values.gather(1, order), ids.gather(1, order)
