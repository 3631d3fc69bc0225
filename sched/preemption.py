"""Preemption: what becomes of a request that must yield."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Preemption:
    """How a running request yields its slot, and its KV.

    keeps_kv: for a slot it is paused in place: off the batch, KV kept and counted, given up only when somebody before it in
    order needs it. KV is given up by swapping where one of `tiers` has room: it is copied, and the request later goes on where
    it was. Else by recompute: its blocks are freed, its generated tokens kept, and prompt + generated is prefilled again.
    tiers: tokens of KV that each holds, by name, the first to be filled first.
    """

    keeps_kv: bool
    tiers: Mapping[str, int] = field(default_factory=dict)


def recompute() -> Preemption:
    """Free the victim's KV at once (vLLM)."""
    return Preemption(keeps_kv=False)


def pause() -> Preemption:
    """Keep the victim's KV while nobody needs it (as TRAIL, ICLR 2025, whose victims stay in the prefix cache)."""
    return Preemption(keeps_kv=True)


def swap(cpu: int = 65_536, disk: int = 0, keeps_kv: bool = False) -> Preemption:
    """Copy the victim's KV to the CPU, or to the disk when the CPU's room is used up (vLLM before V1; vllm-ltr, NeurIPS 2024).

    cpu, disk: tokens of KV. keeps_kv: pause for a slot, swap for KV. Raises ValueError for a negative size."""
    for name, tokens in (("cpu", cpu), ("disk", disk)):
        if tokens < 0:
            raise ValueError(f"swap tier {name}={tokens} tokens, the least is 0")
    return Preemption(keeps_kv, {"cpu": cpu, "disk": disk})
