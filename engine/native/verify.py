"""The last guard at load: the packed path and the model's own forward must agree on a short random text.

Whatever an architecture does that neither its configuration nor its calls of the attention interface tell shows here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention.interface import NAME
from .attention.torch_paged import TorchPaged
from .batch import Batch, Placed
from .probe import choose_attention

if TYPE_CHECKING:
    from .model import ServedModel

BLOCK_SIZE = 4
LENGTHS = 19, 10  # two texts
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}  # of the spread of the logits


def verify(served: ServedModel, seed: int = 0) -> float:
    """Compare two random texts, packed, in two chunks and a decode step, with the model's own eager forward. Returns the root
    mean square error as a share of the logits' spread; raises ValueError where it is too great. Leaves no pool attached."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, served.vocab_size, (n,), generator=generator) for n in LENGTHS]
    own = torch.cat([own_logits(served, text) for text in texts])
    packed = packed_logits(served, texts)
    served.detach()
    error = float((packed - own).pow(2).mean().sqrt() / own.std())
    limit = TOLERANCE.get(served.dtype, TOLERANCE[torch.bfloat16])
    if not error <= limit:
        raise ValueError(
            f"{served.name} is not served: this model does something that the packed path does not know "
            f"(logits differ by {error:.3g} of their spread, the limit is {limit:g})"
        )
    return error


def own_logits(served: ServedModel, text: Tensor) -> Tensor:
    """fp32 logits (n, V*) of `text` (n,) by the model's own forward."""
    ids = text.to(served.device)[None]
    choose_attention(served.model, "eager")
    try:
        with torch.no_grad():
            logits: Tensor = served.model(input_ids=ids, use_cache=False).logits[0].float()
            return logits
    finally:
        choose_attention(served.model, NAME)


def packed_logits(served: ServedModel, texts: list[Tensor]) -> Tensor:
    """fp32 logits of all tokens of two texts, one after the other: a chunk of both, the rest of the first but its last token,
    the rest of the second beside a decode of the first."""
    first, second = texts
    num_blocks = [-(-len(text) // BLOCK_SIZE) for text in texts]
    tables = torch.zeros(2, max(num_blocks), dtype=torch.int32)
    tables[0, : num_blocks[0]] = (
        torch.arange(num_blocks[0]) * 2 + 1
    )  # interleaved, so that order in memory is not order in text
    tables[1, : num_blocks[1]] = torch.arange(num_blocks[1]) * 2
    served.new_pools(TorchPaged(), 2 * max(num_blocks), BLOCK_SIZE, "fp32")
    out = [torch.empty(len(text), served.vocab_size) for text in texts]
    a, b, end = 7, 5, len(first) - 1
    for pieces, num_decode in (([(0, 0, a), (1, 0, b)], 0), ([(0, a, end)], 0), ([(0, end, end + 1), (1, b, len(second))], 1)):
        batch = pack(pieces, texts, tables, num_decode, served)
        logits = served.logits(served.forward(batch)).cpu()
        at = 0
        for row, start, stop in pieces:
            out[row][start:stop] = logits[at : at + stop - start]
            at += stop - start
    return torch.cat(out).to(served.device)


def pack(
    pieces: list[tuple[int, int, int]], texts: list[Tensor], tables: Tensor, num_decode: int, served: ServedModel
) -> Batch:
    """A Batch of (row, start, stop) pieces that wants the hidden state of every token."""
    device = served.device
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
    rows = torch.cat([torch.full((stop - start,), row) for row, start, stop in pieces])
    lens = [stop - start for _, start, stop in pieces]
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    placed = Placed(slots.to(device), tables[[row for row, _, _ in pieces]].to(device))
    return Batch(
        token_ids=torch.cat([texts[row][start:stop] for row, start, stop in pieces]).to(device),
        positions=positions.to(device),
        query_start=torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32),
        context_len=torch.tensor([stop for _, _, stop in pieces], dtype=torch.int32, device=device),
        num_decode=num_decode,
        max_query=max(lens),
        max_context=max(stop for _, _, stop in pieces),
        emit=torch.arange(len(positions), device=device),
        groups=[placed] * (1 + max(spec.group for spec in served.layers)),
    )
