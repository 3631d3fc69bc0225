"""What every client is asked to do, and what is compared of it: requests of one length, a few at a time, and mean times."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """num_requests, never more than `concurrency` at once. Prompts have about prompt_len tokens (a chat template adds some),
    answers exactly output_len, whatever their tokens (ignore_eos)."""

    num_requests: int = 20
    concurrency: int = 2
    prompt_len: int = 256
    output_len: int = 32


class Times(NamedTuple):
    """Of num requests, means in s: to the first token, and per token by the definition of whoever measured it. e2e: to the last
    token, where it is known."""

    num: int
    ttft: float
    tpot: float
    e2e: float | None = None
