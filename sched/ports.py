"""Ports: what the step loop is given from outside. Swap Clock and Executor and a simulation becomes the real engine."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .outlook import Outlook, Total
    from .plan import Outcome, Plan
    from .prediction import LengthDistribution
    from .request import Request
    from .scheduler import Scheduler

Ticket = Any  # what `submit` returns and `collect` wants back


class Clock(Protocol):
    """Seconds on the run's clock. `wait` returns at `until` at the latest; a wall clock may return early on new input."""

    @property
    def now(self) -> float: ...
    def wait(self, until: float) -> None: ...
    def advance(self, to: float) -> None: ...


class Executor(Protocol):
    """Executes plans. It knows the truth: EOS, or an array of true lengths; it applies min(truth, max_new_tokens).

    `collect` ends at the first finish, after `plan.repeat` steps, or at the first step boundary at or after `until`.
    """

    def submit(self, plan: Plan) -> Ticket: ...
    def collect(self, ticket: Ticket, until: float) -> Outcome: ...


class EventKind(IntEnum):
    ARRIVAL = 0
    PREDICTION_READY = 1
    ABORT = 2
    TIMEOUT = 3
    SWAP_DONE = 4
    TRANSFER_DONE = 5
    TRANSFER_FAILED = 6
    TOOL_RETURN = 7
    TIMER = 8


class Event(NamedTuple):
    """Something that happens to a request at `time` (s)."""

    time: float
    kind: EventKind
    request: Request


class Source(Protocol):
    """Where events come from: a workload, a trace, a server's inbox."""

    def peek(self) -> float:
        """The time of the next event that may change a plan; infinity when there is none for now."""
        ...

    def pop(self, now: float) -> Iterable[Event]:
        """All events with time <= now, in order; ties in file order."""
        ...

    def on_finish(self, request: Request, now: float) -> None:
        """A request ended: closed loops, sessions and agents answer with new arrivals."""
        ...


class Predictor(Protocol):
    """Predicts output lengths from what a client sent."""

    def predict(self, requests: Sequence[Request]) -> list[LengthDistribution]: ...
    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution]: ...


class Refiner(Protocol):
    """Predicts anew the whole lengths of requests that have `generated` tokens by now, None for as before; probes: what the
    executor has brought of them (`Outcome.probes`)."""

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> Sequence[LengthDistribution | None]: ...


class Observer(Protocol):
    """Watches a run: a recorder, a progress bar, a checker."""

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None: ...
    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        """`reason`: stop, length, rejected: ..., aborted, timeout or failed: ...."""
        ...


class View(Protocol):
    """What a policy may know. Truth is not in it."""

    now: float  # s
    step_time: float  # s of the last step: an estimate of the next one
    max_num_seqs: int  # rows that may run at once

    @property
    def step(self) -> int:
        """Decode steps taken so far."""
        ...

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def free_tokens(self) -> int: ...
    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that admission may fill: the pool less its watermark."""
        ...

    def generated(self, req: Request) -> int:
        """Tokens emitted so far, in every phase."""
        ...

    def computed(self, req: Request) -> int:
        """Tokens whose KV is resident (of a swapped request: in its tier), in every phase."""
        ...

    @property
    def cache_epoch(self) -> int:
        """Changes whenever the `cached_len` of somebody who waits may have: what a policy whose keys hold it returns as
        its `key_epoch`."""
        ...

    def cached_len(self, req: Request) -> int:
        """Tokens of the prompt that are cached: of a request without KV, now; of any other, when it was last admitted, so that
        a key by them does not rise with the admission it has won."""
        ...

    def client_running(self, client: str | None) -> int: ...
    def outlook(self, total: Total, renews: bool = False) -> Outlook:
        """KV that the running set will come to hold if each request ends as `total` says; to be made once and kept."""
        ...

    def future_peak(self) -> float:
        """Greatest KV tokens the running set will hold if predictions are right (Past-Future, ASPLOS 2025, section 4)."""
        ...
