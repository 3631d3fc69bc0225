"""Preemption: what becomes of a request that must yield."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preemption:
    """How a running request yields its slot. For KV it always yields by recompute: its blocks are freed, its generated
    tokens kept, and prompt + generated is prefilled again when it comes back.

    keeps_kv: paused in place: off the batch, KV kept and counted, freed only when somebody before it in order needs it.
    """

    keeps_kv: bool


def recompute() -> Preemption:
    """Free the victim's KV at once (vLLM)."""
    return Preemption(keeps_kv=False)


def pause() -> Preemption:
    """Keep the victim's KV while nobody needs it (as TRAIL, ICLR 2025, whose victims stay in the prefix cache)."""
    return Preemption(keeps_kv=True)
