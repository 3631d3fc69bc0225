"""LMCache agent traces: sessions of tool-using agents, call by call, with prefix hashes of 16 tokens.

A call's prompt holds all before it, so that nearly everything is a prefix seen already. Sessions were recorded one after
another: their own arrival times mean nothing and are generated (`arrivals=sessions`), while gaps within a session are kept.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..dataset import Dataset, Floats, Ints
from .columns import at_cap, cap_notes, kept, lengths, refuse, times, whole
from .mooncake import block_ids
from .origin import File, Origin, open_origin, stated
from .reading import read_columns

TIME, PROMPT, OUTPUT, HASHES = "timestamp_us", "input_length", "output_length", "hash_ids"
SESSION, TURN, SUITE = "session_id", "turn", "suite"
BLOCK = 16  # tokens of a hashed piece
SUITES = ("miniswe", "magagent")
LEAST_OUTPUT = 100  # tokens; of shorter answers most of the time is not decoding
HASHED_SHA = "a725f3654e91909c2a41d90ade998a94e21503a00787428b9cbb0b5ecfe09447"

ORIGINS = {
    "lmcache": Origin(
        "the LMCache agent traces, suites miniswe and magagent",
        "LMCache/lmcache-agent-trace",
        "https://github.com/LMCache/lmcache-agent-trace",
        "Apache-2.0",
        (File("lmcache_agent_traces_hashed16.jsonl", HASHED_SHA, 1_863_419),),
        how="made of the project's miniswe/*.jsonl and magagent/*.jsonl: per line suite, session_id, turn, timestamp_us, "
        "input_length and output_length in cl100k tokens, hash_ids of whole pieces of 16 tokens, chained",
    )
}


def load(
    suite: str,
    path: str | None = None,
    *,
    seconds_per_token: float | None = None,
    max_output: int | None = 10_000,
    zero_len: str = "drop",
    max_prompt_len: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """One suite's calls as a Dataset with session, turn, gap and block_hashes, sessions in file order, calls in order of time.

    gap: the file stamps the start of each call, so the time between two starts holds the model's own answer too. What is kept
    is that time less the previous output x seconds_per_token, at least 0, and 0 for a session's first call: agent, tools,
    prefill and network. seconds_per_token None: the least time per output token between any two calls (of answers of at
    least LEAST_OUTPUT tokens), so that no more is taken off than the fastest answer took; 0.0 takes nothing off.

    max_output: outputs of this length are cut off, censored. zero_len: calls recorded without a prompt, "drop" or "error".
    max_prompt_len: leave out longer prompts, counted. Gaps reach over calls left out. path: another file of these fields.
    Raises FileNotFoundError, or ValueError naming the row and the value.
    """
    if suite not in SUITES:
        raise ValueError(f"suite {suite!r} is not one of {', '.join(SUITES)}")
    if seconds_per_token is not None and not 0.0 <= seconds_per_token < float("inf"):
        raise ValueError(f"seconds_per_token {seconds_per_token} must be a finite number >= 0")
    origin = ORIGINS["lmcache"]
    file = open_origin(origin, path)
    table = read_columns(file, [SUITE, SESSION, TURN, TIME, PROMPT, OUTPUT, HASHES], None)
    mine = np.flatnonzero(table[SUITE] == suite)
    if not mine.size:
        raise ValueError(f"{file.name} has no rows of suite {suite!r}")
    refuse(table[SESSION], table[SESSION].isna(), "a call of no session")
    turn = whole(table[TURN])
    prompt, output = lengths(table[PROMPT]), lengths(table[OUTPUT])
    hashes = block_ids(table[HASHES], prompt, BLOCK, whole=True)
    keep, dropped = kept({PROMPT: prompt[mine], OUTPUT: output[mine]}, zero_len, PROMPT, max_prompt_len)
    rows = mine[keep]
    session, names = pd.factorize(table[SESSION])
    seconds, _ = times(table[TIME], "us")
    rows = rows[np.lexsort((seconds[rows], session[rows]))]  # stable: calls of one time stay in file order
    between = since_last(seconds[rows], session[rows])
    answered = np.concatenate(([0], output[rows][:-1]))
    rate = fastest(between, answered) if seconds_per_token is None else seconds_per_token
    gap = np.maximum(np.nan_to_num(between) - answered * rate, 0.0)
    censored = at_cap(output[rows], max_output)
    return Dataset(
        name=f"lmcache_{suite}",
        prompt_len=prompt[rows],
        output_len=output[rows],
        unit="cl100k tokens",
        censored=censored,
        group=session[rows].astype(np.int64),
        max_new_tokens=max_new_tokens,
        dropped={**dropped, "rows_other_suites": len(table) - len(mine)},
        columns={
            "session": np.asarray(names, dtype=str)[session[rows]],
            "turn": turn[rows],
            "gap": gap,
        },
        notes={
            "file": file.name,
            "num_sessions": len(np.unique(session[rows])),
            "gap": f"s between the starts of two calls, less {rate:.5f} s per output token of the first, at least 0",
            "seconds_per_token": rate,
            **cap_notes(max_output, censored),
        },
        block_hashes=[hashes[row] for row in rows.tolist()],
        hash_tokens=BLOCK,
        **stated(origin, file),
    )


def since_last(start: Floats, session: Ints) -> Floats:
    """Seconds from the session's call before to each call, rows sorted by session and time; NaN for the first."""
    between = np.diff(start, prepend=np.nan)
    between[np.diff(session, prepend=-1) != 0] = np.nan
    return between


def fastest(between: Floats, answered: Ints) -> float:
    """The least seconds per output token of any call that another followed; 0 without one of LEAST_OUTPUT tokens."""
    long = (answered >= LEAST_OUTPUT) & np.isfinite(between)
    return float((between[long] / answered[long]).min()) if long.any() else 0.0
