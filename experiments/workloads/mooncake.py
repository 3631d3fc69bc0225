"""Mooncake: arrivals, lengths and prefix blocks of Kimi's service (FAST 2025); the prefixes are what it is used for.

A prompt is named by the chained hashes of its pieces of 512 tokens, the last one partial. Arrival times of the real traces are
rounded to about 3 s, so that most requests share their time with others.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..dataset import Dataset, Floats, Ints
from ..draw import stream
from .columns import at_cap, cap_notes, in_time_order, kept, lengths, refuse, times
from .origin import File, Origin, github, open_origin, origin_of, stated
from .reading import read_columns

TIME, PROMPT, OUTPUT, HASHES = "timestamp", "input_length", "output_length", "hash_ids"
PROJECT = "kvcache-ai/Mooncake"
COMMIT = "3b5a594133958449a1feaf1c9e0fc1b553e34a28"
TRACES = "FAST25-release/traces"


def _origin(name: str, what: str, sha: str | None = None, size: int | None = None) -> Origin:
    own = github(PROJECT, COMMIT, f"{TRACES}/{name}_trace.jsonl", sha, size)
    files = (own, File(f"mooncake_fast25_{name}.jsonl", sha, size))
    page = f"https://github.com/{PROJECT}/tree/main/FAST25-release"
    return Origin(f"the Mooncake {name} trace, {what}", PROJECT, page, "Apache-2.0 (cite Mooncake, FAST 2025)", files)


CONVERSATION_SHA = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
SYNTHETIC_SHA = "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131"
ORIGINS = {
    "mooncake_conversation": _origin("conversation", "one hour", CONVERSATION_SHA, 3_029_533),
    "mooncake_toolagent": _origin("toolagent", "one hour"),
    "mooncake_synthetic": _origin("synthetic", "made of public sets, Poisson", SYNTHETIC_SHA, 1_136_313),
}


def load(
    trace: str,
    path: str | None = None,
    *,
    block: int = 512,
    jitter: float = 0.0,
    seed: int = 0,
    max_output: int | None = None,
    zero_len: str = "error",
    max_prompt_len: int | None = None,
    limit: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """A trace of ORIGINS as a Dataset with arrivals and block_hashes, ties in file order. Nothing is downloaded.

    path: another JSONL file of the fields timestamp (ms), input_length, output_length, hash_ids. block: tokens of a hashed
    piece; a row must have ceil(input_length / block) ids. jitter: spread requests that share a time uniformly over so many
    seconds after it, by the stream "jitter" of `seed`, their order kept and never past the next time; 0 leaves ties.
    max_output: the service's limit, rows at it are censored. zero_len, max_prompt_len, limit as in `table`. Raises
    FileNotFoundError, or ValueError naming the row.
    """
    if block < 1:
        raise ValueError(f"block {block} must be at least 1 token")
    if not 0.0 <= jitter < float("inf"):
        raise ValueError(f"jitter {jitter} s must be a finite number >= 0")
    origin = origin_of(ORIGINS, trace)
    file = open_origin(origin, path)
    table = read_columns(file, [TIME, PROMPT, OUTPUT, HASHES], limit)
    lens = {name: lengths(table[name]) for name in (PROMPT, OUTPUT)}
    hashes = block_ids(table[HASHES], lens[PROMPT], block)
    keep, dropped = kept(lens, zero_len, PROMPT, max_prompt_len)
    rows, arrival, notes = in_time_order(*times(table[TIME], "ms"), np.flatnonzero(keep), "ms")
    notes["num_ties"] = int((np.diff(arrival) == 0).sum())
    if jitter and rows.size:
        spread = spread_ties(arrival, jitter, stream(seed, "jitter"))
        arrival = spread - spread[0]
        notes.update(jitter=jitter, jitter_seed=seed, arrival_offset=notes["arrival_offset"] + float(spread[0]))
    output_len = lens[OUTPUT][rows]
    censored = at_cap(output_len, max_output)
    return Dataset(
        name=trace,
        prompt_len=lens[PROMPT][rows],
        output_len=output_len,
        unit="tokens of the served model (not named)",
        censored=censored,
        arrival=arrival,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        notes={
            "file": file.name,
            **notes,
            **cap_notes(max_output, censored),
        },
        block_hashes=[hashes[row] for row in rows.tolist()],
        hash_tokens=block,
        **stated(origin, file),
    )


def block_ids(column: pd.Series, prompt_len: Ints, block: int, *, whole: bool = False) -> list[tuple[int, ...]]:
    """The hash ids of each row, checked: ceil(prompt_len / block) whole numbers, or floor when only whole pieces have one.

    Raises ValueError naming the row and the rule.
    """
    refuse(column, [not isinstance(ids, list) for ids in column], "not a list of hash ids")
    got = np.fromiter(map(len, column), dtype=np.int64, count=len(column))
    want = prompt_len // block if whole else -(-prompt_len // block)
    bad = np.flatnonzero(got != want)
    if bad.size:
        row = int(bad[0])
        rule = f"{'floor' if whole else 'ceil'}({prompt_len[row]} / {block}) = {want[row]}"
        more = f" (and {bad.size - 1} more rows)" if bad.size > 1 else ""
        raise ValueError(f"{column.name} of row {row} has {got[row]} ids, not {rule}{more}: is block={block} the trace's own?")
    kinds = {type(i) for ids in column for i in ids}
    if kinds - {int}:
        refuse(column, [any(type(i) is not int for i in ids) for ids in column], "hash ids must be whole numbers")
    return [tuple(ids) for ids in column]


def spread_ties(arrival: Floats, jitter: float, rng: np.random.Generator) -> Floats:
    """Sorted `arrival` (N,) with each moved by a uniform share of [0, jitter) s, no further than the next distinct time; the
    order is kept, among equals too."""
    at, first, count = np.unique(arrival, return_index=True, return_counts=True)
    room = np.minimum(np.diff(at, append=np.inf), jitter)
    moved: Floats = arrival + rng.random(len(arrival)) * np.repeat(room, count)
    for start, n in zip(first[count > 1].tolist(), count[count > 1].tolist(), strict=True):
        moved[start : start + n].sort()
    return moved
