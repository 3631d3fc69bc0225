"""Conversations and agent programs from stated distributions: turns whose prompt is all that was said before.

Every turn's prompt is the system prompt, the earlier turns with their answers, and what is new; so turns of one session share
a prefix, and sessions of one group share the system prompt. Pauses (thinking, a tool at work) are drawn by the arrival process.
"""

from __future__ import annotations

import numpy as np

from ..dataset import Dataset, Ints
from ..draw import stream
from ..prefixes import SPAN, Shared
from .lengths import Lengths
from .synthetic import whole_lengths

PIECE = 16  # tokens of one prefix name


def load(
    *,
    num_sessions: int,
    turns: Lengths,
    new_len: Lengths,
    output_len: Lengths,
    system_len: int = 0,
    num_groups: int = 1,
    max_prompt_len: int = 6144,
    seed: int = 0,
    name: str = "conversations",
    max_new_tokens: int = 2048,
) -> Dataset:
    """`num_sessions` sessions; columns session, turn, program (the group whose system prompt it has).

    turns: turns of a session; new_len: tokens that each adds to the context; output_len: of each answer, which the next turn's
    prompt holds whole; all drawn independently. system_len: tokens of the system prompt of each of num_groups groups. A session
    ends early where its prompt would pass max_prompt_len, counted in `notes`.
    """
    for key, value, least in (
        ("num_sessions", num_sessions, 1), ("num_groups", num_groups, 1), ("system_len", system_len, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{key} {value} must be at least {least}")

    def drawn(lens: Lengths, n: int, name: str) -> Ints:
        return whole_lengths(lens.quantile(stream(seed, name).random(n)))[0]

    num_turns = drawn(turns, num_sessions, "turns")
    total = int(num_turns.sum())
    new, output = drawn(new_len, total, "new_len"), drawn(output_len, total, "output_len")
    group = stream(seed, "groups").integers(0, num_groups, num_sessions)
    first = np.cumsum(num_turns) - num_turns
    session = np.repeat(np.arange(num_sessions), num_turns)
    turn = np.arange(total) - first[session]
    said = np.cumsum(new + output)
    prompt = system_len + new + (said - new - output) - (said - new - output)[first[session]]
    keep = prompt <= max_prompt_len  # it only grows, so what is dropped is a session's end
    if not keep.any():
        raise ValueError(f"no turn of {name} fits max_prompt_len {max_prompt_len}; system_len is {system_len}")
    session, turn = session[keep], turn[keep]
    shared = system_len // PIECE
    hashes = [
        Shared(range(g * SPAN, (g + 1) * SPAN), shared, range((num_groups + s) * SPAN, (num_groups + s + 1) * SPAN))
        for s, g in zip(session.tolist(), group[session].tolist(), strict=True)
    ]
    return Dataset(
        name=name,
        prompt_len=prompt[keep],
        output_len=output[keep],
        unit="synthetic tokens",
        source=f"{name}: turns {turns}, new {new_len}, output {output_len}, system prompt {system_len}, {num_groups} groups",
        licence="none needed",
        group=session.astype(np.int64),
        max_new_tokens=max_new_tokens,
        columns={
            "session": np.array([f"s{s}" for s in session.tolist()], dtype=object),
            "turn": turn,
            "program": np.array([f"g{g}" for g in group[session].tolist()], dtype=object),
        },
        notes={"dataset_seed": seed, "num_sessions": num_sessions, "num_turns_over_max_prompt_len": int((~keep).sum())},
        block_hashes=hashes,
        hash_tokens=PIECE,
    )
