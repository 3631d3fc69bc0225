"""Tensor parallelism of weights: every rank keeps a slice of each projection, by the plan in the model's configuration.

Columns first, rows second (Megatron-LM, 2019, section 3): a layer's first projections are cut by output, so that each rank has
whole heads, the one after them by input, and the ranks' sums are added up. Both remain plain linear layers.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

COLUMNS, ROWS = "colwise", "rowwise"
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}  # kept whole here; their results are the same on every rank


class SummedRows(nn.Module):
    """Its input is a slice; the ranks' products are added up, then the bias."""

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.bias, self.group = linear, bias, group

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias


class GatheredColumns(nn.Module):
    """Each rank computes a slice of the output; all of them get the whole."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        own = self.linear(x).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim=-1)


def shard(model: Any, group: dist.ProcessGroup) -> bool:
    """Keep this rank's share of `model`, a whole one and the same on every rank; it is changed in place. Returns whether the
    head is shared too: it is where the vocabulary divides evenly. Raises ValueError for a model without a plan, and for
    projections that the plan shares in another way or that do not divide evenly."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name, plan = type(model).__name__, plan_of(model)
    base = model.base_model
    for path, linear in [(path, part) for path, part in base.named_modules() if isinstance(part, nn.Linear)]:
        style = style_of(path, plan)
        if style in (COLUMNS, ROWS):
            base.set_submodule(path, shared(linear, style, f"{name} {path}", rank, size, group))
    head = model.get_output_embeddings()
    if head.out_features % size:
        return False
    model.set_output_embeddings(GatheredColumns(columns(head, rank, size), group))
    return True


def plan_of(model: Any) -> dict[str, str]:
    """Style of each kind of projection, by its path with * for a layer. Raises ValueError when there is none, or one with other
    styles than these."""
    name, plan = type(model).__name__, getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"{name} has no plan for tensor parallelism")
    strange = sorted({style for style in plan.values() if style not in WHOLE | {COLUMNS, ROWS}})
    if strange:
        raise ValueError(f"{name} is not shared between ranks: its plan asks for {', '.join(strange)}")
    return dict(plan)


def style_of(path: str, plan: dict[str, str]) -> str | None:
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path):
            return style
    return None


def shared(linear: nn.Linear, style: str, name: str, rank: int, size: int, group: dist.ProcessGroup) -> nn.Module:
    """What stands in place of `linear` on this rank. Raises ValueError when it does not divide evenly."""
    width = linear.out_features if style == COLUMNS else linear.in_features
    if width % size:
        raise ValueError(f"{name} is {width} wide, which {size} ranks cannot share evenly")
    if style == COLUMNS:
        return columns(linear, rank, size)
    share = width // size
    return SummedRows(like(linear.weight[:, rank * share : (rank + 1) * share], None), linear.bias, group)


def columns(linear: nn.Linear, rank: int, size: int) -> nn.Linear:
    """This rank's outputs of `linear`."""
    share = linear.out_features // size
    part = slice(rank * share, (rank + 1) * share)
    return like(linear.weight[part], None if linear.bias is None else linear.bias[part])


def like(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of these."""
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made
