"""KV of one byte a number: one fp32 scale per token and KV head, so that the largest number of each vector just fits."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the greatest number that each holds


def quantise(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """numbers (..., dim) -> the same in `dtype`, and scales (...) fp32 to multiply them by."""
    numbers, limit = numbers.float(), LARGEST[dtype]
    scale = numbers.abs().amax(-1).clamp_min(1e-30) / limit
    scaled = (numbers / scale[..., None]).clamp_(-limit, limit)  # the quotient may round past the limit
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale
