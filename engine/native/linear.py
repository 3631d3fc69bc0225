"""PackedLinear: nn.Linear for inference, its weight packed once so that few rows run at memory speed and many at GEMM speed.

The kernel is cpp/linear.cpp. It reads one layout at any number of rows, so that a weight is held once; sums are fp32.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from .cpp import build

log = logging.getLogger(__name__)

PANEL = 32  # outputs that lie side by side in a packed weight


class PackedLinear(nn.Module):
    """y = x weight^T + bias for x (..., in_features), without a gradient; made by `pack` or `quantised`.

    packed: (P, in / 2, 32, 2), bf16, or uint8 codes with `scale` (out,) fp32. kernel: "avx512_bf16", or "plain", the C++ loops
    that run anywhere, right but slow. wide: y is fp32; else it has x's dtype. What is not bf16 in x is rounded to it.
    """

    def __init__(self, packed: Tensor, scale: Tensor | None, bias: Tensor | None, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        none = torch.empty(0)
        self.packed: Tensor
        self.scale: Tensor
        self.bias: Tensor
        self.register_buffer("packed", packed)
        self.register_buffer("scale", none if scale is None else scale.float().contiguous())
        self.register_buffer("bias", none if bias is None else bias.detach().float().contiguous())
        self.wide = False
        self.kernel = kernel()

    @property
    def bits(self) -> int:
        return 8 * self.packed.element_size()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} inputs for a layer of {self.in_features}")
        given = x.dtype
        if given != torch.bfloat16:
            x = x.to(torch.bfloat16)
        wide = self.wide or given != torch.bfloat16
        out: Tensor = torch.ops.lengthwise.linear(x, self.packed, self.scale, self.bias, self.out_features, wide)
        return out.to(given) if given == torch.float16 and not self.wide else out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, kernel={self.kernel}"


def kernel(isa: str | None = None) -> str:
    """Which kernel runs here; builds it first, for `isa` or the best there is. Raises RuntimeError without a compiler."""
    build.load("linear", isa)
    _register_fakes()
    return "avx512_bf16" if torch.ops.lengthwise.linear_is_fast() else "plain"


class Memory:
    """One piece of memory for packed weights, on large pages, handed out in order; pages are used once they are written to."""

    def __init__(self, layers: Iterable[nn.Module], element_size: int) -> None:
        """Room for the weights of `layers` in numbers of `element_size` bytes."""
        sizes = (prod(packed_shape(*weight_and_bias(layer)[0].shape)) for layer in layers)
        self._left: Tensor = torch.ops.lengthwise.large(element_size * sum(sizes))

    def keep(self, packed: Tensor) -> Tensor:
        """A copy of `packed` that lies here."""
        here = self._left[: packed.nbytes].view(packed.dtype).view(packed.shape)
        self._left = self._left[packed.nbytes :]
        return here.copy_(packed)


def packed_shape(num_out: int, num_in: int) -> tuple[int, int, int, int]:
    return -(-num_out // PANEL), -(-num_in // 2), PANEL, 2


def pack_weight(weight: Tensor) -> Tensor:
    """(out, in) numbers of one or two bytes -> (P, ceil(in / 2), 32, 2), zeros where there is nothing."""
    num_out, num_in = weight.shape
    panels, pairs, *_ = packed_shape(num_out, num_in)
    if (panels * PANEL, pairs * 2) != (num_out, num_in):
        padded = weight.new_zeros(panels * PANEL, pairs * 2)
        padded[:num_out, :num_in] = weight
        weight = padded
    return weight.view(panels, PANEL, pairs, 2).permute(0, 2, 1, 3).contiguous()


def pack(linear: nn.Module) -> PackedLinear:
    """A PackedLinear of a bf16 nn.Linear or transformers' Conv1D (whose weight is (in, out)). Raises ValueError for others."""
    weight, bias = weight_and_bias(linear)
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        raise ValueError(f"a weight is packed in bf16 on the CPU, not in {weight.dtype} on {weight.device}")
    return PackedLinear(pack_weight(weight), None, bias, weight.shape[1], weight.shape[0])


def weight_and_bias(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(out, in) weight and (out,) bias."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    return weight.detach() if isinstance(linear, nn.Linear) else weight.detach().T, bias


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, layer) of all that can be packed, in order; subclasses have a forward of their own and are left."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear or type(child).__name__ == "Conv1D":
                yield parent, name, child


def pack_linears(model: nn.Module) -> int:
    """Replace the bf16 linear layers of `model` by packed ones where the fast kernel runs; how many were. Mutates `model`. A
    tied head is packed beside the embedding, which keeps its own weight; its logits are fp32. Others (fp32, fp16, a processor
    without AVX-512 bf16, no compiler) stay torch's, and the log says why."""
    found = deque(entry for entry in linears(model) if entry[2].weight.dtype == torch.bfloat16)
    if not found:
        return 0
    try:
        which = kernel()
    except RuntimeError as error:
        log.warning("linear layers stay torch's: %s", error)
        return 0
    if which != "avx512_bf16":
        log.info("linear layers stay torch's: no AVX-512 bf16 here")
        return 0
    return replace_linears(model, found, pack, num_bytes=2)


def replace_linears(
    model: nn.Module, found: deque[tuple[nn.Module, str, nn.Module]], made: Callable[[nn.Module], PackedLinear], num_bytes: int
) -> int:
    """Put made(layer) in the place of each layer in `found`, which is used up; how many. num_bytes: of a number of a packed
    weight. The layer that makes logits makes them in fp32. Mutates `model`."""
    head, memory = output_layer(model), Memory((child for *_, child in found), num_bytes)
    count = len(found)
    while found:  # which lets go of each weight once it is packed
        parent, name, child = found.popleft()
        layer = made(child)
        layer.packed = memory.keep(layer.packed)
        layer.wide = child is head
        setattr(parent, name, layer)
    return count


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that makes logits, where the model tells."""
    ask = getattr(model, "get_output_embeddings", None)
    return ask() if ask is not None else None


@cache
def _register_fakes() -> None:
    """What torch.compile and torch.export must know of the operators: the shapes that come out."""

    def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, num_out: int, wide: bool) -> Tensor:
        return x.new_empty((*x.shape[:-1], num_out), dtype=torch.float32 if wide else torch.bfloat16)

    def many(
        x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor], num_outs: list[int], wide: bool
    ) -> list[Tensor]:
        return [linear(x, *each, wide) for each in zip(weights, scales, biases, num_outs, strict=True)]

    torch.library.register_fake("lengthwise::linear", linear)
    torch.library.register_fake("lengthwise::linears", many)
    torch.library.register_fake("lengthwise::hold", torch.empty_like)
