"""choose: the attention backend of a device by name, or the fastest one that works there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from .backend import Attention
from .torch_paged import TorchPaged

log = logging.getLogger(__name__)

NAMES = ("auto", "cpu", "torch", "varlen", "flashinfer", "triton")
FASTEST_FIRST = {"cpu": ("cpu", "torch"), "cuda": ("varlen", "flashinfer", "triton", "torch")}
UNUSABLE = (ImportError, RuntimeError, NotImplementedError)  # how a backend says at its making that it cannot run here


def choose(
    name: str = "auto", device: torch.device | str = "cpu", unfit: Callable[[Attention], str | None] = lambda made: None
) -> Attention:
    """The backend `name`; for "auto" the first of FASTEST_FIRST that can be made and that `unfit` has nothing against, with one
    logged warning that carries the reasons if it is the last resort. Its `name` tells which one it is. Raises ValueError for an
    unknown name or one of another kind of device, RuntimeError or ImportError with the reason for one that cannot run here."""
    if name not in NAMES:
        raise ValueError(f"attention backend {name!r} is not one of {', '.join(NAMES)}")
    device = torch.device(device)
    fitting = FASTEST_FIRST.get(device.type, ("torch",))
    if name == "auto":
        return _first(fitting, device, unfit)
    if name not in fitting:
        raise ValueError(f"attention backend {name!r} does not run on {device}, which has {', '.join(fitting)}")
    return _make(name)


def _first(names: Sequence[str], device: torch.device, unfit: Callable[[Attention], str | None]) -> Attention:
    reasons = []
    for name in names[:-1]:
        try:
            made = _make(name)
        except UNUSABLE as error:
            reasons.append(f"{name}: {error}")
            continue
        reason = unfit(made)
        if reason is None:
            return made
        reasons.append(f"{name}: {reason}")
    if reasons:
        log.warning("attention on %s runs in plain torch operations, which is slow. %s", device, "; ".join(reasons))
    return _make(names[-1])


def _make(name: str) -> Attention:
    if name == "torch":
        return TorchPaged()
    if name == "cpu":
        from .cpu import CppPaged

        return CppPaged()
    if name == "varlen":
        from .varlen import VarlenPaged

        return VarlenPaged()
    if name == "flashinfer":
        from .flashinfer import FlashInferPaged

        return FlashInferPaged()
    from .triton_paged import TritonPaged

    return TritonPaged()
