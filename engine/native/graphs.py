"""DecodeGraphs: decode steps replayed from CUDA graphs, so that the host launches one thing instead of hundreds.

A graph is captured for each of a few batch sizes over buffers that stay where they are. A step copies its batch into them, pads
to the least captured size with rows of context 0 that keep nothing (slot -1), and replays; whatever has a chunk runs eagerly.
CUDA graphs for decode as in nano-vllm and vLLM; ideas, no code.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention.backend import Attention
from .batch import Batch, Placed
from .model import ServedModel

log = logging.getLogger(__name__)

Step = Callable[[], Tensor]
Capture = Callable[[Step], Step]  # of a step over static buffers: what repeats it and returns the same tensor every time


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 16 up to 256 and every 64 beyond, and max_num_seqs itself, ascending."""
    sizes = [1, 2, 4, 8, *range(16, min(max_num_seqs, 256) + 1, 16), *range(320, max_num_seqs + 1, 64), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


class DecodeGraphs:
    """Runs batches of `model`, whose layers are attached to pools of `attention`: decodes from graphs where they fit.

    max_num_seqs: the most rows. max_model_len: the longest context in tokens. sizes: rows of the graphs; None: capture_sizes.
    capture: how a step is captured; None: as a CUDA graph. num_replayed, num_eager: steps so far. Capturing happens here, runs
    the model on padding rows only, and so changes no pool. Raises ValueError for a backend whose steps cannot be captured.
    """

    def __init__(
        self,
        model: ServedModel,
        attention: Attention,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        sizes: Sequence[int] | None = None,
        capture: Capture | None = None,
    ) -> None:
        if reason := cannot_capture(attention):
            raise ValueError(reason)
        self.sizes = sorted(set(sizes)) if sizes is not None else capture_sizes(max_num_seqs)
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f"capture sizes {self.sizes} are not positive numbers of rows")
        self.num_replayed = self.num_eager = 0
        self.max_context = max_model_len
        self._model = model
        self._attention: Any = attention
        num_groups = 1 + max(spec.group for spec in model.layers)
        self._buffers = Buffers(self.sizes[-1], -(-max_model_len // block_size), max_model_len, num_groups, model.device)
        self._replays: dict[int, Step] = {}
        capture = capture or CudaCapture()
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            batch = self._buffers.batch(size)
            if hasattr(attention, "keep"):
                attention.keep(batch)
            self._replays[size] = capture(self._step(batch))

    def fits(self, batch: Batch) -> bool:
        """Whether `batch` is of decoding rows only, and neither more nor longer than the graphs take."""
        num = batch.num_rows
        return (
            0 < num <= self.sizes[-1]
            and num == batch.num_decode
            and batch.max_context <= self.max_context
            and batch.groups[0].block_tables.shape[1] <= self._buffers.width
        )

    def run(self, batch: Batch) -> Tensor:
        """model.forward(batch), (E, hidden). Mutates the attached pools. The result is the caller's own."""
        if not self.fits(batch):
            self.num_eager += 1
            return self._model.forward(batch)
        self.num_replayed += 1
        size = self.size_of(batch.num_rows)
        static = self._buffers.fill(batch, size)
        if hasattr(self._attention, "replan"):
            self._attention.replan(static)
        return self._replays[size]().index_select(0, batch.emit)

    def size_of(self, num_rows: int) -> int:
        """The least captured size for num_rows."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def _step(self, batch: Batch) -> Step:
        return lambda: self._model.forward(batch)


class Buffers:
    """Static inputs: one set of tensors, of which the Batch of each size takes the first rows."""

    def __init__(self, rows: int, width: int, max_context: int, num_groups: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.width = width
        self._max_context = max_context
        self._token_ids, self._positions = zeros(rows), zeros(rows)
        self._context_len = zeros(rows, dtype=torch.int32)
        self._order = torch.arange(rows + 1, device=device)
        self._groups = [Placed(zeros(rows) - 1, zeros(rows, width, dtype=torch.int32)) for _ in range(num_groups)]
        self._batches: dict[int, Batch] = {}

    def batch(self, size: int) -> Batch:
        """The one Batch of `size` rows. Its max_context is the most there can be: kernels are laid out for that."""
        if size not in self._batches:
            self._batches[size] = Batch(
                token_ids=self._token_ids[:size],
                positions=self._positions[:size],
                query_start=self._order[: size + 1].int(),
                context_len=self._context_len[:size],
                num_decode=size,
                max_query=1,
                max_context=self._max_context,
                emit=self._order[:size],
                groups=[Placed(group.slots[:size], group.block_tables[:size]) for group in self._groups],
            )
        return self._batches[size]

    def fill(self, batch: Batch, size: int) -> Batch:
        """Copy `batch` in and pad it to `size`. Mutates the buffers; returns the Batch of that size."""
        num = batch.num_rows
        self._token_ids[:num].copy_(batch.token_ids)
        self._positions[:num].copy_(batch.positions)
        self._context_len[:num].copy_(batch.context_len)
        for group, source in zip(self._groups, batch.groups, strict=True):
            group.slots[:num].copy_(source.slots)
            group.block_tables[:num, : source.block_tables.shape[1]].copy_(source.block_tables)
            if size > num:
                group.slots[num:size] = -1
        if size > num:
            self._context_len[num:size] = 0
        return self.batch(size)


class CudaCapture:
    """Captures steps as CUDA graphs that share one memory pool. They must be replayed one at a time."""

    def __init__(self, num_warmups: int = 2) -> None:
        self._num_warmups = num_warmups
        self._pool: Any = None

    def __call__(self, step: Step) -> Step:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels, makes plans, lets libraries allocate
            for _ in range(self._num_warmups):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def cannot_capture(attention: Attention) -> str | None:
    """Why steps with this backend cannot be captured, or None: its kernels must be laid out by what the host knows beforehand
    (rows and the longest context there can be), and wait for nothing."""
    if getattr(attention, "captures", False):
        return None
    return f"decode steps with the attention backend {attention.name!r} cannot be captured; varlen, flashinfer and triton can"


def decode_graphs(model: ServedModel, attention: Attention, **settings: Any) -> DecodeGraphs | None:
    """DecodeGraphs where the device and the backend have them, else None with the reason logged: decodes then run eagerly."""
    reason = cannot_capture(attention) if model.device.type == "cuda" else f"CUDA graphs need a GPU, not {model.device}"
    if model.num_ranks > 1:
        reason = f"what {model.num_ranks} ranks tell each other cannot be captured"
    if reason:
        log.info("decodes run eagerly: %s", reason)
        return None
    return DecodeGraphs(model, attention, **settings)
