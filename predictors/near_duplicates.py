"""Near-duplicate prompts: what ties two prompts so closely that one in training gives the other away."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PREFIX = 60  # characters of the normalised prompt that make two prompts near duplicates
_GAP = re.compile(r"\W+")


def normalised(prompt: str) -> str:
    """Lower case, every run of blanks and marks one blank: what near-duplicate prompts have in common."""
    return _GAP.sub(" ", prompt[: 4 * PREFIX].lower()).strip()


def prompt_groups(prompts: Sequence[str], conversation: Sequence[Hashable] | NDArray[Any] | None = None) -> Ints:
    """Group ids (N,) from 0 in order of first appearance: rows are in one group if a chain of shared conversations, equal
    prompts, or equal first 60 characters of the normalised prompts ties them."""
    n = len(prompts)
    if conversation is not None and len(conversation) != n:
        raise ValueError(f"{len(conversation)} conversations for {n} prompts")
    keys: list[tuple[Hashable, ...]] = [
        (("prompt", prompt), ("start", normalised(prompt)[:PREFIX]) if normalised(prompt) else ("prompt", prompt))
        for prompt in prompts
    ]
    if conversation is not None:
        keys = [(*ks, ("conversation", c)) for ks, c in zip(keys, np.asarray(conversation).tolist(), strict=True)]
    return _union(keys)


def _union(keys: Iterable[tuple[Hashable, ...]]) -> Ints:
    rows = list(keys)
    parent = list(range(len(rows)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[Hashable, int] = {}
    for i, row_keys in enumerate(rows):
        for key in row_keys:
            a, b = root(first.setdefault(key, i)), root(i)
            parent[max(a, b)] = min(a, b)
    names: dict[int, int] = {}
    return np.array([names.setdefault(root(i), len(names)) for i in range(len(rows))], dtype=np.int64)


def prompt_keys(prompts: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash (N,) of each prompt's normalised start: equal for near duplicates."""
    out = np.empty(len(prompts), dtype=np.uint64)
    for i, prompt in enumerate(prompts):
        text = normalised(prompt)[:PREFIX] or prompt
        out[i] = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return out
