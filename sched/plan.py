"""Plan and Outcome: the only words the scheduler exchanges with whatever executes.

A Plan says what one engine step computes and how often it may be repeated unasked; an Outcome says what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Request

FinishReason = Literal["stop", "length"]
DEVICE = "device"  # the memory that a step computes in; swap tiers have names of their own


class Chunk(NamedTuple):
    """Prefill work: compute KV of tokens [start, start + length) of prompt + generated. The `last` chunk emits a token."""

    request: Request
    start: int
    length: int
    last: bool


class Swap(NamedTuple):
    """A copy of `num_blocks` blocks of KV of `request` between two memory tiers, done before the step computes. One to the
    device brings what the device has not kept, maybe nothing, and frees what the tier has of the request. blocks: their ids on
    the device, where ids are kept; one to the device brings the last `num_blocks` of what the tier has."""

    request: Request
    num_blocks: int
    source: str
    target: str
    blocks: Sequence[int] = ()


class Copy(NamedTuple):
    """`num_blocks` blocks of KV on the device copied to blocks of `request`'s own, in which it writes. sources, targets: their
    ids, where ids are kept; all sources are read before a target is written, as the two may overlap."""

    request: Request
    num_blocks: int
    sources: Sequence[int] = ()
    targets: Sequence[int] = ()


class Finished(NamedTuple):
    """A request that ended with this outcome after `num_tokens` generated tokens (EOS included)."""

    request: Request
    num_tokens: int
    reason: FinishReason


class Failure(NamedTuple):
    """A request the executor could not go on with."""

    request: Request
    reason: str


@dataclass(slots=True)
class Plan:
    """What one engine step computes.

    joins, leaves: changes of the decode set since the last Outcome (finished rows leave by themselves).
    num_decode: decoding rows that run in this step, one token each. num_padding: finished rows that a static batch still
    carries. context_tokens: tokens attended by the decoding rows in the first step; each further step adds num_decode.
    repeat: the step may be repeated this often (decodes only; 1 whenever a chunk or a copy is planned). The executor stops at
    the first finish, so a request's max_new_tokens needs no bound here.
    stable_until: absolute time (s) from which the policy may decide otherwise, or a lease ends.
    swaps: block copies between memory tiers, outs first; synchronous with the step, which begins when they are done. Between
    leaves and joins: after a plan that came to nothing, one request may leave, be copied out and in, and join.
    copies: copies of blocks on the device; `moves` says when.
    """

    chunks: list[Chunk] = field(default_factory=list)
    joins: list[Request] = field(default_factory=list)
    leaves: list[Request] = field(default_factory=list)
    num_decode: int = 0
    num_padding: int = 0
    context_tokens: int = 0
    repeat: int = 1
    stable_until: float = float("inf")
    swaps: Sequence[Swap] = ()
    copies: Sequence[Copy] = ()
    sends: Sequence[Any] = ()  # KV to another engine
    receives: Sequence[Any] = ()  # KV from another engine
    probe_rows: Sequence[Request] = ()  # rows whose hidden state a predictor wants back
    lookahead: int = 0  # speculative tokens per row

    @property
    def moves(self) -> list[Swap | Copy]:
        """What is to be done before the step, in this order: swaps out, copies, swaps in. A block may be swapped out and be the
        target of a copy, or be the source of a copy, evicted since, and swapped into or written by the step."""
        outs = [swap for swap in self.swaps if swap.source == DEVICE]
        return [*outs, *self.copies, *(swap for swap in self.swaps if swap.source != DEVICE)]


@dataclass(slots=True)
class Outcome:
    """What came of a Plan: `num_steps` >= 1 steps, `ends` their end times (s), `finished` all at `ends[-1]`: those of chunks,
    then decoding ones as they joined, for an index of prefixes remembers who let go of one last.

    advance: tokens emitted per decoding row, a uniform int or one value per row where rows differ (speculation).
    """

    num_steps: int
    ends: Sequence[float]
    advance: int | Sequence[int]
    finished: list[Finished] = field(default_factory=list)
    probes: Any = None
    failures: list[Failure] = field(default_factory=list)
