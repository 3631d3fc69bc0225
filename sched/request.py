"""Request: what the client sent and what the predictor said. It holds no true length: the truth lives in the executor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .prediction import LengthDistribution


class Phase(IntEnum):
    """Where a request stands. Every injected request is in exactly one phase at every step."""

    PENDING = 0  # waits for its prediction
    WAITING = 1  # holds no KV
    PREFILLING = 2
    DECODING = 3
    PAUSED = 4  # off the batch, KV kept
    SWAPPED = 5  # off the batch, KV in a tier below
    TRANSFERRING = 6
    FINISHED = 7
    REJECTED = 8
    ABORTED = 9
    FAILED = 10


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency objectives in seconds; None means no objective of that kind."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


def covers_answers(block_hashes: Sequence[int]) -> bool:
    """Whether names go on into the answers, by place in a conversation: those of a `range`, or of a sequence that says so."""
    return isinstance(block_hashes, range) or getattr(block_hashes, "covers_answers", False)


class Request:
    """One generation request. Lengths in tokens, times in seconds on the run's clock.

    Public fields are what the client sent and what the predictor said. Private slots hold progress; only the scheduler
    writes them, and `View.generated` / `View.computed` are the way to read them.
    """

    __slots__ = (
        "_cached", "_computed", "_decode_from", "_entry", "_first_scheduled", "_first_token", "_found", "_generated",
        "_left_with", "_lost", "_num_preemptions", "_phase", "_prefilled", "_recomputed", "_resumes", "_ticket",
        "answers_before", "arrival", "block_hashes", "client", "max_new_tokens", "prediction", "priority", "program", "prompt",
        "prompt_ids", "prompt_len", "rid", "session", "slo", "timeout", "turn", "weight",
    )  # fmt: skip

    def __init__(
        self,
        rid: int,
        arrival: float,
        prompt_len: int,
        max_new_tokens: int = 2048,
        *,
        prediction: LengthDistribution | None = None,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        block_hashes: Sequence[int] | None = None,
        client: str | None = None,
        session: str | None = None,
        program: str | None = None,
        turn: int = 0,
        answers_before: Sequence[int] | None = None,
        priority: float = 0.0,
        weight: float = 1.0,
        slo: SLO | None = None,
        timeout: float | None = None,
    ) -> None:
        self.rid = rid
        self.arrival = arrival
        self.prompt_len = prompt_len
        self.max_new_tokens = max_new_tokens
        self.prediction = prediction
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.block_hashes = block_hashes
        self.client = client
        self.session = session
        self.program = program
        self.turn = turn
        self.answers_before = answers_before  # tokens of each earlier answer in its conversation, oldest first
        self.priority = priority
        self.weight = weight
        self.slo = slo
        self.timeout = timeout
        self._phase = Phase.PENDING
        self._entry = -1  # order of entry, the last tie-breaker
        self._ticket = 0  # version of this request's entry in any lazy-deletion heap
        self._computed = 0  # tokens whose KV is resident, exact while not decoding
        self._generated = 0  # tokens emitted, exact while not decoding
        self._prefilled = False  # its KV is complete but for the last token: it decodes, or is paused while decoding
        self._decode_from = -1  # decode step at which it joined the decode set
        self._first_scheduled = -1.0
        self._first_token = -1.0
        self._num_preemptions = 0
        self._left_with = -1  # tokens generated when it was last preempted
        self._recomputed = 0  # KV tokens thrown away by preemption, to be computed again
        self._cached = 0  # tokens of the prompt found cached when it was first admitted
        self._found = 0  # tokens found cached when it was last admitted
        self._lost = 0  # the most tokens that an eviction has thrown away: found again, they are not computed again
        self._resumes: list[float] | None = None  # left, back, left, back, ... in s, kept only when preempted

    def __repr__(self) -> str:
        return f"Request(rid={self.rid}, arrival={self.arrival}, prompt_len={self.prompt_len}, phase={self._phase.name})"

    @property
    def phase(self) -> Phase:
        return self._phase


def predicted(req: Request) -> LengthDistribution:
    """What was predicted of `req`. Raises ValueError when there is nothing."""
    if req.prediction is None:
        raise ValueError(f"request {req.rid} has no prediction; choose a predictor other than `none`")
    return req.prediction
