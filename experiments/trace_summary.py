"""What a dataset is like, in one row of numbers: its arrivals, its lengths, its prefixes, its sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from .arrivals.summary import describe_arrivals
from .dataset import Dataset, Ints
from .prefixes import Shared

LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def summarise(dataset: Dataset) -> dict[str, Any]:
    """One flat dict; what a dataset does not have is None.

    rate (requests/s), gap_cv, longest_gap, span (s), num_ties: of its own arrivals. prompt_ and output_ mean, p50, p90, p99,
    max: tokens. rank_correlation and linear_correlation of the two lengths. censored: share of outputs that were cut.
    piece_hit_share, token_hit_share, request_hit_share: see `prefix_hits`. num_sessions, turns_mean, turns_max; gap_p50,
    gap_p90 (s) between the turns of a session, where known.
    """
    n = len(dataset)
    out: dict[str, Any] = {"name": dataset.name, "n": n, "unit": dataset.unit}
    times = {} if dataset.arrival is None else describe_arrivals(dataset.arrival)
    out.update({key: times.get(key) for key in ("span", "rate", "gap_cv", "longest_gap", "num_ties")})
    for name, lens in (("prompt", dataset.prompt_len), ("output", dataset.output_len)):
        out[f"{name}_mean"] = float(lens.mean())
        out.update({f"{name}_{key}": float(np.quantile(lens, level)) for key, level in LEVELS.items()})
        out[f"{name}_max"] = int(lens.max())
    ranks = [pd.Series(lens).rank().to_numpy() for lens in (dataset.prompt_len, dataset.output_len)]
    out["rank_correlation"] = correlation(*ranks)
    out["linear_correlation"] = correlation(dataset.prompt_len, dataset.output_len)
    out["censored"] = None if dataset.censored is None else float(dataset.censored.mean())
    out.update(prefix_hits(dataset) or dict.fromkeys(("piece_hit_share", "token_hit_share", "request_hit_share")))
    out.update(_sessions(dataset))
    return out


def summary_frame(datasets: Iterable[Dataset]) -> pd.DataFrame:
    """`summarise` of several, one row each, by name."""
    return pd.DataFrame([summarise(dataset) for dataset in datasets]).set_index("name")


def correlation(x: Any, y: Any) -> float | None:
    """Pearson's, None when one of them does not vary."""
    a, b = (np.asarray(v, dtype=np.float64) - np.mean(v) for v in (x, y))
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else None


def prefix_hits(dataset: Dataset) -> dict[str, float] | None:
    """Shares a prefix cache without limit would hit if each request ended before the next row's began; None without hashes.

    piece_hit_share: named pieces seen before, of all; token_hit_share: prompt tokens in them; request_hit_share: requests
    with a hit. A hit is a run of pieces from the prompt's start. Answers count as seen where pieces are named by their place
    in a conversation, and only then.
    """
    if dataset.block_hashes is None:
        return None
    hits, pieces = _hits(dataset)
    tokens = np.minimum(hits * dataset.hash_tokens, dataset.prompt_len)
    return {
        "piece_hit_share": float(hits.sum() / max(pieces.sum(), 1)),
        "token_hit_share": float(tokens.sum() / dataset.prompt_len.sum()),
        "request_hit_share": float((hits > 0).mean()),
    }


def _hits(dataset: Dataset) -> tuple[Ints, Ints]:
    """(pieces hit, pieces named) of each prompt."""
    assert dataset.block_hashes is not None
    size = dataset.hash_tokens
    seen: set[int] = set()
    told: dict[int, int] = {}  # conversation -> pieces of it that are there
    hits, pieces = np.zeros((2, len(dataset)), dtype=np.int64)
    lens = zip(dataset.prompt_len.tolist(), dataset.output_len.tolist(), strict=True)
    for row, (names, (prompt, output)) in enumerate(zip(dataset.block_hashes, lens, strict=True)):
        if isinstance(names, range | Shared):
            pieces[row] = prompt // size
            own, common, num_shared = _places(names)
            there = told.get(own, 0) or min(told.get(common, 0), num_shared)
            hits[row] = min(there, prompt // size)
            told[own] = max(told.get(own, 0), (prompt + output - 1) // size)
            told[common] = max(told.get(common, 0), min(num_shared, prompt // size))
            continue
        pieces[row] = len(names)
        hits[row] = next((k for k, name in enumerate(names) if name not in seen), len(names))
        seen.update(names)
    return hits, pieces


def _places(names: range | Shared) -> tuple[int, int, int]:
    """(a conversation's own first name, the first of those it shares, how many pieces it shares)."""
    if isinstance(names, range):
        return names.start, -1, 0
    common, num_shared, own = names.key
    return own, common, num_shared


def _sessions(dataset: Dataset) -> dict[str, Any]:
    out: dict[str, Any] = dict.fromkeys(("num_sessions", "turns_mean", "turns_max", "gap_p50", "gap_p90"))
    session = dataset.columns.get("session")
    if session is None:
        return out
    codes, names = pd.factorize(np.asarray(session))
    turns = np.bincount(codes)
    out.update(num_sessions=len(names), turns_mean=float(turns.mean()), turns_max=int(turns.max()))
    gap = dataset.columns.get("gap")
    if gap is not None:
        known = np.asarray(gap)[pd.Series(codes).duplicated().to_numpy() & ~np.isnan(gap)]
        if known.size:
            out.update(gap_p50=float(np.quantile(known, 0.5)), gap_p90=float(np.quantile(known, 0.9)))
    return out
