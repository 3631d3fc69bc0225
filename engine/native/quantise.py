"""Weight-only int8: each output channel of a linear layer in 8 bits, symmetric, with one fp32 scale.

Activations stay bf16: cpp/linear.cpp widens the weight exactly and sums in fp32, so that the only error is the rounding of the
weight, at most half a step of max |weight| / 127 of its channel.
"""

from __future__ import annotations

import logging
from collections import deque

import torch
from torch import Tensor, nn

from .linear import PANEL, PackedLinear, kernel, linears, pack_weight, replace_linears, weight_and_bias

log = logging.getLogger(__name__)

SIGN = 0x80  # codes are a sign and seven bits of magnitude


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (out, in) -> int8 (out, in) in -127..127 and fp32 scales (out,), weight ~ int8 * scale; a channel of zeros has
    scale 1."""
    wide = weight.float()
    most = wide.abs().amax(dim=1)
    scale = torch.where(most > 0, most / 127, torch.ones_like(most))
    return torch.round(wide / scale[:, None]).clamp_(-127, 127).to(torch.int8), scale


def pack_int8(weight: Tensor) -> Tensor:
    """int8 (out, in) -> the codes that the kernel reads, uint8 (P, ceil(in / 2), 32, 2). In the 64 bytes of a pair of inputs
    the halves of a panel are woven, so that AVX-512's unpack, which works within 16 bytes, puts the outputs in order."""
    magnitude = weight.abs().to(torch.uint8)
    codes = pack_weight(torch.where(weight < 0, magnitude | SIGN, magnitude))
    panels, pairs = codes.shape[:2]
    woven = codes.view(panels, pairs, 2, 4, 4, 2).transpose(2, 3).contiguous()
    return woven.view(panels, pairs, PANEL, 2)


def quantised(linear: nn.Module) -> PackedLinear:
    """A PackedLinear with 8-bit weights of nn.Linear or transformers' Conv1D, any float dtype; the bias is kept in fp32."""
    weight, bias = weight_and_bias(linear)
    codes, scale = to_int8(weight)
    return PackedLinear(pack_int8(codes), scale, bias, weight.shape[1], weight.shape[0])


def quantise(model: nn.Module, weights: str = "int8") -> int:
    """Replace every linear layer of `model`, the head included, by one with 8-bit weights; how many were. Mutates `model`.
    Embeddings (a tied one keeps its own weight), norms and biases stay as they are. Raises ValueError for other `weights` and
    for a model that is not on the CPU, RuntimeError without a compiler."""
    if weights != "int8":
        raise ValueError(f"weights {weights!r}: only int8")
    found = deque(linears(model))
    for *_, child in found:
        if child.weight.device.type != "cpu":
            raise ValueError(f"8-bit weights are for the CPU, not {child.weight.device}")
    which = kernel()
    count = replace_linears(model, found, quantised, num_bytes=1)
    if count and which == "plain":
        log.warning("8-bit linear layers run in plain loops, without AVX-512 bf16: right, but slower than torch's bf16")
    return count
