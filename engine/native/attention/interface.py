"""The one place where transformers meets the paged KV: a function under the name "lengthwise" in its attention interface.

No mask function goes with it, so that transformers builds no mask at all. What an attention module needs hangs on the module as
an object; an index would be baked into compiled graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ..batch import Batch
from ..pool import LayerSpec, Pool
from .backend import Attention

NAME = "lengthwise"


@dataclass(slots=True, eq=False)
class Current:
    """Which Batch the forward under way computes; one object for all layers of a model."""

    batch: Batch | None = None


@dataclass(slots=True, eq=False)
class Attached:
    """What one attention module finds under its attribute `lengthwise`."""

    spec: LayerSpec
    attention: Attention
    pool: Pool
    current: Current


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, Hq, N, K), key (1, Hkv, N, K), value (1, Hkv, N, V) of the packed tokens of one Batch; gives (1, N, Hq, V).
    Mutates the module's pool. What else may come in `kwargs` was looked at when the model was loaded (probe.py)."""
    attached: Attached = module.lengthwise  # type: ignore[assignment]
    batch, spec = attached.current.batch, attached.spec
    if batch is None:
        raise ValueError("the attention of a served model ran outside ServedModel.forward: there is no batch")
    query = query[0].transpose(0, 1).contiguous()  # views of one projection (Phi-3, GPT-2) are copied, others are contiguous
    key = key[0].transpose(0, 1).contiguous()
    value = value[0].transpose(0, 1).contiguous()
    attached.attention.store(attached.pool, key, value, batch.groups[spec.group].slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attached.attention.attend(attached.pool, query, batch, spec.group, scale, spec.window, softcap)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
