"""The requests of the throughput benchmark: the same prompts, as token ids, for every system and every repetition.

`1`, `8`, `32`: as many requests of 128 tokens in and 128 out. `mixed8`, `mixed32`: 64 requests of log-normal lengths, 8 or 32
at a time. Prompts share no prefix.
"""

from __future__ import annotations

import math

import numpy as np

from .job import Point

POINTS = ("1", "8", "32", "mixed8", "mixed32")
SHORT = 128
NUM_MIXED = 64
MIXED_PROMPT = (math.log(64), 0.8, 4, 512)  # mu and sigma of the logarithm, least, greatest (tokens)
MIXED_OUTPUT = (math.log(32), 0.9, 2, 256)
SEED = 0


def lengths(rng: np.random.Generator, law: tuple[float, float, int, int], n: int) -> list[int]:
    mu, sigma, least, greatest = law
    return [int(x) for x in np.clip(np.rint(rng.lognormal(mu, sigma, n)), least, greatest)]


def make_points(names: list[str], vocab_size: int, max_len: int, quick: bool = False) -> list[Point]:
    """Points of these names for a model with this vocabulary that takes `max_len` positions. quick: an eighth of every length
    and of the mixed requests. Raises ValueError for a name that there is not."""
    cut = 8 if quick else 1
    points = []
    for name in names:
        if name not in POINTS:
            raise ValueError(f"point {name!r}: one of {', '.join(POINTS)}")
        rng = np.random.default_rng(np.random.SeedSequence([SEED, 0 if name.startswith("mixed") else 1]))
        concurrency = int(name.removeprefix("mixed"))
        if name.startswith("mixed"):
            prompt_lens, output_lens = lengths(rng, MIXED_PROMPT, NUM_MIXED), lengths(rng, MIXED_OUTPUT, NUM_MIXED)
            prompt_lens, output_lens = prompt_lens[: NUM_MIXED // cut], output_lens[: NUM_MIXED // cut]
        else:
            prompt_lens, output_lens = [SHORT] * concurrency, [SHORT] * concurrency
        prompt_lens = [max(min(n // cut, max_len // 2), 1) for n in prompt_lens]
        output_lens = [max(min(n // cut, max_len - p), 1) for n, p in zip(output_lens, prompt_lens, strict=True)]
        low = vocab_size // 10  # past the special tokens
        prompts = [rng.integers(low, vocab_size - low, n).tolist() for n in prompt_lens]
        points.append(Point(name, concurrency, prompts, output_lens))
    return points
