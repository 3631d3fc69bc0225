"""Qwen-Bailian: calls to one Qwen model at Alibaba, with prefix blocks of 16 tokens and who follows whom (ATC 2025).

Each call names the call it continues, so that sessions are found by following parents up to a root.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..dataset import Dataset, Ints
from .columns import in_time_order, kept, lengths, refuse, times, whole
from .mooncake import block_ids
from .origin import File, Origin, open_origin, origin_of, stated
from .reading import read_columns

CHAT, PARENT, TURN, KIND = "chat_id", "parent_chat_id", "turn", "type"
TIME, PROMPT, OUTPUT, HASHES = "timestamp", "input_length", "output_length", "hash_ids"
ROOT = -1  # the parent of a call that continues none
PROJECT = "alibaba-edu/qwen-bailian-usagetraces-anon"
ADDRESS = f"https://github.com/{PROJECT}/raw/main/"


def _origin(name: str, what: str) -> Origin:
    file = f"qwen_{name}_blksz_16.jsonl"
    licence = "Apache-2.0 (cite KVCache in the Wild, ATC 2025)"
    return Origin(f"Qwen-Bailian, {what}", PROJECT, f"https://github.com/{PROJECT}", licence, (File(file, url=ADDRESS + file),))


ORIGINS = {
    "bailian_a": _origin("traceA", "chat of people"),
    "bailian_b": _origin("traceB", "calls by programs"),
    "bailian_coder": _origin("coder", "coding"),
    "bailian_thinking": _origin("thinking", "reasoning"),
}


def load(
    trace: str,
    path: str | None = None,
    *,
    block: int = 16,
    zero_len: str = "drop",
    max_prompt_len: int | None = None,
    limit: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """A trace of ORIGINS as a Dataset with arrivals, session, turn (from 0) and block_hashes.

    A session is all calls that go back to one root, or to one call that the file does not hold (counted in the notes). Two
    calls may continue the same one (asked again, or in parallel); `turn` is the place in the session in order of time, so that
    these are apart, and the notes count them. How long a user or program waited is not told: there is no gap. block: tokens of
    a hashed piece; a row must have ceil(input_length / block) ids. zero_len: rows of length 0, "drop" or "error". path: another
    file of this form; limit: only its first rows. Raises FileNotFoundError, or ValueError naming the row and the value.
    """
    if block < 1:
        raise ValueError(f"block {block} must be at least 1 token")
    origin = origin_of(ORIGINS, trace)
    file = open_origin(origin, path)
    table = read_columns(file, [CHAT, PARENT, TIME, PROMPT, OUTPUT, TURN, HASHES], limit)
    lens = {name: lengths(table[name]) for name in (PROMPT, OUTPUT)}
    hashes = block_ids(table[HASHES], lens[PROMPT], block)
    chat, parent, turn = whole(table[CHAT]), whole(table[PARENT]), whole(table[TURN], 1)
    refuse(table[CHAT], table[CHAT].duplicated(), "a chat_id that an earlier row has")
    session, num_absent = roots(chat, parent)
    keep, dropped = kept(lens, zero_len, PROMPT, max_prompt_len)
    rows, arrival, notes = in_time_order(*times(table[TIME], "s"), np.flatnonzero(keep), "s")
    return Dataset(
        name=trace,
        prompt_len=lens[PROMPT][rows],
        output_len=lens[OUTPUT][rows],
        unit="tokens of the served model (not named)",
        group=session[rows],
        arrival=arrival,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        columns={
            "session": session[rows].astype(str),
            "turn": pd.Series(session[rows]).groupby(session[rows]).cumcount().to_numpy(),
        },
        notes={
            "file": file.name,
            **notes,
            "num_sessions": len(np.unique(session[rows])),
            "num_parents_absent": num_absent,
            "num_side_calls": int(pd.DataFrame({"s": session[rows], "t": turn[rows]}).duplicated().sum()),
        },
        block_hashes=[hashes[row] for row in rows.tolist()],
        hash_tokens=block,
        **stated(origin, file),
    )


def roots(chat: Any, parent: Any) -> tuple[Ints, int]:
    """(the id of each call's oldest known ancestor (N,), how many parents are named that are no row).

    Raises ValueError when parents go round in a circle.
    """
    of = dict(zip(np.asarray(chat).tolist(), np.asarray(parent).tolist(), strict=True))
    root: dict[int, int] = {}
    absent = set()
    for call in of:
        path, at = [], call
        while at not in root:
            path.append(at)
            up = of.get(at, ROOT)
            if up == ROOT:
                root[at] = at
                if at not in of:
                    absent.add(at)
            elif len(path) > len(of):
                raise ValueError(f"chat_id {call}: its parents go round in a circle")
            else:
                at = up
        for one in path:
            root[one] = root[at]
    return np.array([root[call] for call in of], dtype=np.int64), len(absent)
