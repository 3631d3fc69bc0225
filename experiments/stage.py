"""Stage: where the plans of a cell are executed, made from its `executor` node: the only place where a simulated cell differs
from a real one.

A cell asks its stage for clock and executor, memory and prices, for rows that it can serve, and for what is to be said beside
the results. Everything else (order, windows, recording, metrics) is the same code. Where somebody else schedules, there is
nothing to execute: all we do is ask (`Asking`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from lengthwise.engine.simulated.cost import CostModel
from lengthwise.sched import Clock, Executor, KVCache, Request

from .dataset import Dataset, Workload
from .nodes import Config
from .run import Run

if TYPE_CHECKING:
    from .asked import Asked


class Begun(NamedTuple):
    """What one run is driven with. forget: drops what the executor keeps of a request that has ended; None: nothing to drop."""

    clock: Clock
    executor: Executor
    forget: Callable[[Request], object] | None = None


class Stage(Protocol):
    """What a cell is given to run on. cfg: the cell's resolved config."""

    default_hardware: ClassVar[str | None]  # the node that stands where none is chosen
    look: int  # ended requests between looks at the wall clock: how often progress may be told

    def check(self, cfg: Config) -> None:
        """Raises ValueError on a config that cannot be run here, before anything heavy is loaded."""
        ...

    def rows_key(self) -> dict[str, Any]:
        """What `rows` depends on, as plain values; empty where it changes nothing."""
        ...

    def rows(self, dataset: Dataset) -> Dataset:
        """The dataset as it can be served here: the same rows in the same order."""
        ...

    def named(self, dataset: Dataset, kv: KVCache) -> Dataset:
        """The dataset with names for the pieces of its prompts, where `kv` keeps prefixes and they can be had."""
        ...

    def names(self, cfg: Config) -> dict[str, Any]:
        """Beside the usual ones, what a reader tells cells apart by."""
        ...

    def pool_tokens(self, cfg: Config) -> int:
        """Tokens of the KV pool."""
        ...

    def max_model_len(self, cfg: Config) -> int:
        """Prompt + output tokens that a request may have."""
        ...

    def cost(self, cfg: Config) -> CostModel | None:
        """What tells the latency on an idle engine, and utilisation; None where nothing can."""
        ...

    def kv_bytes(self, cfg: Config) -> float:
        """Bytes of KV of a token."""
        ...

    def begin(self, cfg: Config, kv: KVCache, workload: Workload) -> Begun:
        """Clock and executor of one run; a wall clock runs from here on."""
        ...

    def provenance(self, cfg: Config) -> dict[str, Any]:
        """What the numbers rest on: `hardware`, and whatever else belongs to it."""
        ...

    def marks(self, cfg: Config, run: Run) -> list[str]:
        """What makes the results doubtful, or must be known to read them."""
        ...

    def measured(self, executor: Any, cpu: float, num_steps: int) -> dict[str, Any]:
        """Volatile numbers of a run of `num_steps` steps whose loop took `cpu` seconds of CPU time; among them
        overhead_us_per_step."""
        ...


@runtime_checkable
class Asking(Protocol):
    """In place of a Stage, a server that schedules by itself."""

    default_hardware: ClassVar[str | None]
    schedules: ClassVar[bool]  # whether what the cell's config says of scheduling has a say there

    def check(self, cfg: Config) -> None:
        """As of a Stage."""
        ...

    def rows_key(self) -> dict[str, Any]:
        """As of a Stage."""
        ...

    def rows(self, dataset: Dataset) -> Dataset:
        """As of a Stage."""
        ...

    def saturation(self, cfg: Config, dataset: Dataset) -> dict[str, Any]:
        """Requests per second that it completes when there is always work (`rate`), and how that is known."""
        ...

    def run(self, cfg: Config, asked: Asked) -> Run:
        """Send the requests at their times and record what comes back."""
        ...
