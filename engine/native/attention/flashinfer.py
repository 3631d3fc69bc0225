"""FlashInferPaged: paged attention by the FlashInfer package, softcap and window included.

FlashInfer divides the work of a batch on the host before its kernels run (`plan`). A plan is made once for each kind of layer
of a Batch, never for each layer; that of a Batch which CUDA graphs replay is made again, in place, before every replay.

FlashInfer (Ye et al., MLSys 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import Batch
from ..pool import LayerSpec, Pool
from .torch_layout import TorchLayout

HEAD_DIMS = (64, 128, 256)
DTYPES = ("bf16", "fp16")
WORKSPACE = 128 * 2**20  # bytes
PLAIN_GROUPS = (1, 2)  # query heads per KV head that decode without tensor cores: with more these are faster


class Kind(NamedTuple):
    """What layers must share to share a plan."""

    group: int
    num_heads: int
    num_kv_heads: int
    dim: int
    num_blocks: int
    block_size: int
    scale: float
    window: int | None
    softcap: float | None
    query_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(slots=True)
class Plans:
    """Plans of one Batch by kind of layer. kept: for replays, in buffers that stay where they are."""

    batch: Batch
    kept: bool
    decode: dict[Kind, Any] = field(default_factory=dict)
    prefill: dict[Kind, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Pages:
    """Rows of a batch as FlashInfer wants them: row r has pages indices[starts[r]] to indices[starts[r + 1]], the last of them
    with last_len[r] tokens. starts and last_len on the host, indices on the device; all int32."""

    starts: Tensor
    indices: Tensor
    last_len: Tensor


class FlashInferPaged(TorchLayout):
    """Pool tensors as TorchPaged has them, bf16 or fp16. Kernels are compiled at first use where the package brings none.
    Raises ImportError or RuntimeError where it cannot run."""

    name = "flashinfer"
    captures = True
    waits = True  # for the lengths in each batch, before its kernels are launched

    def __init__(self) -> None:
        if reason := available():
            raise RuntimeError(reason)
        self._flashinfer: Any = import_module("flashinfer")
        self._workspace: Tensor | None = None
        self._last: Plans | None = None  # of the batch under way
        self._spare: dict[tuple[str, bool], list[Any]] = {}  # wrappers of the batch before, for the next one
        self._kept: list[Plans] = []

    def unfit(self, spec: LayerSpec, block_size: int, dtype: str, softcap: float | None = None) -> str | None:
        """Why such a layer cannot be served, or None."""
        return unfit(spec, dtype)

    def attend(
        self, pool: Pool, query: Tensor, batch: Batch, group: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = pool.tensors
        _, _, num_kv_heads, dim = keys.shape
        kind = Kind(
            group, query.shape[1], num_kv_heads, dim, pool.num_blocks, pool.block_size, scale, window, softcap, query.dtype,
            keys.dtype,
        )  # fmt: skip
        plans, num = self._plans(batch), batch.num_decode
        out = torch.empty_like(query)
        if num:
            if kind not in plans.decode:
                self._plan_decode(plans, kind)
            part = plans.decode[kind].run(query[:num], (keys, values))
            out[:num] = part.masked_fill_((batch.context_len[:num] == 0)[:, None, None], 0.0)
        if batch.num_rows > num:
            if kind not in plans.prefill:
                self._plan_prefill(plans, kind)
            out[num:] = plans.prefill[kind].run(query[num:], (keys, values))
        return out

    # --- CUDA graphs --------------------------------------------------------------------------------------------------

    def keep(self, batch: Batch) -> None:
        """`batch`, of decoding rows only, will be captured and replayed: call before its warm-up."""
        self._kept.append(Plans(batch, kept=True))

    def replan(self, batch: Batch) -> None:
        """The tensors of a kept batch have new contents: plan anew before the graph is replayed."""
        plans = self._plans(batch)
        for kind in plans.decode:
            self._plan_decode(plans, kind)

    # --- plans --------------------------------------------------------------------------------------------------------

    def _plans(self, batch: Batch) -> Plans:
        for plans in self._kept:
            if plans.batch is batch:
                return plans
        if self._last is None or self._last.batch is not batch:
            if self._last is not None:
                for name, wrappers in (("decode", self._last.decode), ("prefill", self._last.prefill)):
                    for kind, wrapper in wrappers.items():
                        self._spare.setdefault((name, tensor_cores(kind)), []).append(wrapper)
            self._last = Plans(batch, kept=False)
        return self._last

    def _plan_decode(self, plans: Plans, kind: Kind) -> None:
        batch, num = plans.batch, plans.batch.num_decode
        table = batch.groups[kind.group].block_tables[:num]
        pages = pages_of(batch.context_len[:num], table, kind)
        wrapper = plans.decode.get(kind) or self._new_decode(plans, kind, num, table.numel())
        wrapper.plan(
            pages.starts, pages.indices, pages.last_len, kind.num_heads, kind.num_kv_heads, kind.dim, kind.block_size,
            window_left=-1 if kind.window is None else kind.window - 1, logits_soft_cap=kind.softcap, sm_scale=kind.scale,
            q_data_type=kind.query_dtype, kv_data_type=kind.kv_dtype,
        )  # fmt: skip
        plans.decode[kind] = wrapper

    def _plan_prefill(self, plans: Plans, kind: Kind) -> None:
        batch, num = plans.batch, plans.batch.num_decode
        pages = pages_of(batch.context_len[num:], batch.groups[kind.group].block_tables[num:], kind)
        spare = self._spare.get(("prefill", tensor_cores(kind)))
        wrapper = spare.pop() if spare else self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._space(batch), "NHD")
        wrapper.plan(
            (batch.query_start[num:] - num).cpu(), pages.starts, pages.indices, pages.last_len, kind.num_heads,
            kind.num_kv_heads, kind.dim, kind.block_size, causal=True,
            window_left=-1 if kind.window is None else kind.window - 1, logits_soft_cap=kind.softcap, sm_scale=kind.scale,
            q_data_type=kind.query_dtype, kv_data_type=kind.kv_dtype,
        )  # fmt: skip
        plans.prefill[kind] = wrapper

    def _new_decode(self, plans: Plans, kind: Kind, num_rows: int, num_pages: int) -> Any:
        cores = tensor_cores(kind)
        wrap = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        space = self._space(plans.batch)
        if not plans.kept:
            spare = self._spare.get(("decode", cores))
            return spare.pop() if spare else wrap(space, "NHD", use_tensor_cores=cores)
        starts, indices, last = (
            torch.zeros(size, dtype=torch.int32, device=space.device) for size in (num_rows + 1, num_pages, num_rows)
        )
        return wrap(
            space, "NHD", use_cuda_graph=True, use_tensor_cores=cores, paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
        )  # fmt: skip

    def _space(self, batch: Batch) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=batch.token_ids.device)
        return self._workspace


def tensor_cores(kind: Kind) -> bool:
    """Whether decoding rows of such layers go by tensor cores."""
    return kind.num_heads // kind.num_kv_heads not in PLAIN_GROUPS


def pages_of(context_len: Tensor, tables: Tensor, kind: Kind) -> Pages:
    """Rows of context_len (R,) int32 and tables (R, B) int32 as Pages. A padding row gets one token of its first block, so that
    no row is empty; what comes out of it is thrown away. Waits for `context_len`."""
    lens = context_len.cpu().clamp_min(1)
    counts = (lens + kind.block_size - 1) // kind.block_size
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    wanted = torch.arange(tables.shape[1])[None, :] < counts[:, None]
    at = wanted.flatten().nonzero().squeeze(1).to(tables.device, non_blocking=True)
    # entries that a window has passed may hold anything: they are masked, but must name a block
    indices = tables.flatten().index_select(0, at).clamp(0, kind.num_blocks - 1)
    return Pages(starts, indices, lens - (counts - 1) * kind.block_size)


def available() -> str | None:
    """Why it cannot run here, or None. Raises ImportError without the package."""
    flashinfer = import_module("flashinfer")
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        if not hasattr(getattr(flashinfer, name, None), "plan"):
            return f"flashinfer {getattr(flashinfer, '__version__', '')} has no {name}.plan; 0.2 or later is needed"
    return None if torch.cuda.is_available() else "FlashInfer needs a CUDA device"


def unfit(spec: LayerSpec, dtype: str) -> str | None:
    """Why FlashInfer cannot serve such a layer, or None."""
    if dtype not in DTYPES:
        return f"FlashInfer keeps KV in {' or '.join(DTYPES)} here, not {dtype}"
    if spec.k_dim != spec.v_dim or spec.k_dim not in HEAD_DIMS:
        return f"FlashInfer wants keys and values of {', '.join(map(str, HEAD_DIMS))}, not {spec.k_dim} and {spec.v_dim}"
    return None
