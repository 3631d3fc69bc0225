"""Philox4x32-10: random numbers that are a function of a key and a counter, and of nothing that was drawn before.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MASK = 0xFFFFFFFFFFFFFFFF
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words of each of four counter words and two key words; all arrays of 32-bit numbers kept in 64 bits,
    of shapes that broadcast."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (q >> _HALF) ^ b ^ k, q & _WORD, (p >> _HALF) ^ d ^ m, p & _WORD
        k, m = (k + np.uint64(0x9E3779B9)) & _WORD, (m + np.uint64(0xBB67AE85)) & _WORD
    return a, b, c, d


def halves(number: Words) -> tuple[Words, Words]:
    """The low and the high 32 bits."""
    return number & _WORD, number >> _HALF


def uniforms(seeds: Sequence[int], counts: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, one for each (seed modulo 2^64, count)."""
    key = np.array([seed & MASK for seed in seeds], dtype=np.uint64)
    zero = np.zeros_like(key)
    high, low, _, _ = philox((*halves(np.array(counts, dtype=np.uint64)), zero, zero), halves(key))
    return ((high >> np.uint64(5)).astype(np.float64) * 2.0**26 + (low >> np.uint64(6))) * 2.0**-53
