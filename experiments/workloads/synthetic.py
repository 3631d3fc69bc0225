"""Synthetic workloads: prompt and output lengths from stated distributions, drawn jointly."""

from __future__ import annotations

import numpy as np

from ..dataset import Dataset, Floats, Ints
from ..draw import stream
from .lengths import Lengths, spearman_to_normal


def load(
    *,
    num_rows: int,
    prompt_len: Lengths,
    output_len: Lengths,
    correlation: float = 0.0,
    max_len: int | None = None,
    seed: int = 0,
    name: str = "synthetic",
    max_new_tokens: int = 2048,
) -> Dataset:
    """`num_rows` rows, lengths rounded to whole tokens and kept within [1, max_len].

    correlation: Spearman's rank correlation of prompt and output length (before rounding), by a Gaussian copula. seed: of
    the rows; which of them a cell sees is up to the cell's own seed. `notes` state how many lengths max_len changed.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows {num_rows} must be at least 1")
    if not -1.0 <= correlation <= 1.0:
        raise ValueError(f"correlation {correlation} is not within [-1, 1]")
    if max_len is not None and max_len < 1:
        raise ValueError(f"max_len {max_len} must be at least 1")
    u, v = _uniforms(num_rows, spearman_to_normal(correlation), stream(seed, "lengths"))
    prompt, clipped_prompts = whole_lengths(prompt_len.quantile(u), max_len)
    output, clipped_outputs = whole_lengths(output_len.quantile(v), max_len)
    return Dataset(
        name=name,
        prompt_len=prompt,
        output_len=output,
        unit="synthetic tokens",
        source=f"{name}: prompt {prompt_len}, output {output_len}, rank correlation {correlation:g}",
        licence="none needed",
        max_new_tokens=max_new_tokens,
        notes={"dataset_seed": seed, "num_prompts_clipped": clipped_prompts, "num_outputs_clipped": clipped_outputs},
    )


def _uniforms(n: int, r: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    from scipy.special import ndtr

    a, b = rng.standard_normal((2, n))
    return ndtr(a), ndtr(r * a + np.sqrt(max(1.0 - r * r, 0.0)) * b)


def whole_lengths(lens: Floats, max_len: int | None = None) -> tuple[Ints, int]:
    """(lengths rounded to whole tokens within [1, max_len], how many max_len changed)."""
    lens = np.maximum(np.rint(lens), 1.0)
    clipped = 0 if max_len is None else int((lens > max_len).sum())
    # far tails do not fit an integer column; nothing a machine can serve is that long
    return np.minimum(lens, 2**31 - 1 if max_len is None else max_len).astype(np.int64), clipped
