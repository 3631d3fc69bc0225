"""How much KV fits: bytes of a token's KV, memory that is free, and what a step needs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .attention.scaled import LARGEST
from .model import ServedModel
from .pool import KV_DTYPES, LayerSpec

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
LIVE = 4  # tensors as wide as the residual stream, and as the widest projection, that are alive at once in a layer


def kv_bytes_per_token(layers: Sequence[LayerSpec], kv_dtype: str) -> int:
    """Bytes that all `layers` keep of one token; with one byte a number also an fp32 scale for each key and value head. Raises
    ValueError for an unknown dtype."""
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"KV dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    kept = KV_DTYPES[kv_dtype]
    scales = 8 if kept in LARGEST else 0
    return sum(spec.numbers_per_token * kept.itemsize + spec.num_kv_heads * scales for spec in layers)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on `device`: on the CPU what the kernel says, within the control group's limit; on a GPU what
    the driver says and what torch holds unused. Raises ValueError where neither can be asked."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu" or not MEMINFO.exists():
        raise ValueError(f"free memory of {device} is not known here: give the KV pool's number of blocks")
    (line,) = [line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")]
    free = int(line.split()[1]) * 1024
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, max(int(most) - int(used.read_text()) + cached_files(), 0))
    return free


def cached_files() -> int:
    """Bytes that count as used by the control group and are only files read before, which the kernel gives up when asked."""
    stat = CGROUP / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def activation_bytes(model: ServedModel, max_tokens: int, max_rows: int) -> int:
    """Bytes that a forward of `max_tokens` tokens, `max_rows` of them emitting, needs beside weights and KV: an estimate from
    the shapes of the weights, on the high side, without running one."""
    layer: int = max_tokens * (model.hidden_size + model.widest) * LIVE * model.dtype.itemsize
    logits: int = (
        max_rows * model.vocab_size * (model.dtype.itemsize + 3 * 4)
    )  # in the model's precision, then fp32 while sampling
    return layer + logits


def pool_tokens(model: ServedModel, kv_dtype: str, share: float, max_tokens: int = 2048, max_rows: int = 256) -> int:
    """Tokens of KV that fit into `share` of the memory free now, less a step's activations. Raises ValueError, with the
    numbers, when none do."""
    free, step = free_memory(model.device), activation_bytes(model, max_tokens, max_rows)
    each = kv_bytes_per_token(model.layers, kv_dtype)
    tokens = (int(free * share) - step) // each
    if tokens < 1:
        raise ValueError(
            f"no memory left for KV on {model.device}: {share:g} of {free:,} free bytes, less {step:,} for a step of "
            f"{max_tokens} tokens, hold no token of {each:,} bytes"
        )
    return tokens
