"""Steps in flight: the next one is launched before the tokens of this one are read, where it can be foreseen.

A plan that may be repeated says what comes next: the same rows, one token on. While the device computes that, the host reads
tokens, books and plans. A plan that turns out otherwise has the step thrown away and its own launched, which costs time and
nothing else: what the step has written of KV lies where the rows' next tokens go anyway, or in blocks that nobody holds, and
whoever writes there next comes later in the device's order. A row that has ended is dropped from a step that is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lengthwise.sched import Plan

from .batch import Batch
from .generation import Generation
from .greatest import Greatest
from .rows import Rows


class Computed(NamedTuple):
    """What the device makes of a step, maybe still to come; None for a step that emits nothing. greatest: None too where only
    one step is in flight."""

    logits: Tensor | None
    states: Tensor | None
    greatest: Greatest | None


class InFlight(NamedTuple):
    """A step under way since `begun` (s). emitting: generations that get a token, decoding rows first. order: where each of
    them stands in `computed`; None: in this order."""

    plan: Plan
    emitting: list[Generation]
    computed: Computed
    begun: float
    order: list[int] | None = None


Compute = Callable[[Batch, InFlight], Computed]  # of a batch whose rows feed in what the step before emits


class Foreseen(NamedTuple):
    """The step after: its rows, and what is computed of it since `begun` (s), if it was launched, which took `launch` s."""

    rows: list[Generation]
    computed: Computed | None
    begun: float
    launch: float


class Pace:
    """Whether going ahead pays: a step that is used saves the `gap` between two launches, one thrown away costs a `step`.
    Running means of what was measured: `hits`, the share of steps that came as foreseen, and both in seconds."""

    def __init__(self) -> None:
        self.hits, self.gap, self.step = 1.0, 0.0, 0.0
        self._read = 0.0

    @property
    def pays(self) -> bool:
        return self.hits * self.gap > (1.0 - self.hits) * self.step

    def note_read(self, begun: float) -> None:
        """The tokens of a decode step that has begun at `begun` (s) are there."""
        now = time.perf_counter()
        self.step += 0.1 * (now - max(begun, self._read) - self.step)
        self._read = now

    def note_next(self, hit: bool, launch: float) -> None:
        """A step is launched that came as foreseen, or not; what was done of it before the tokens were read took `launch` s."""
        self.hits += 0.1 * (hit - self.hits)
        if hit:
            self.gap += 0.1 * (time.perf_counter() - self._read + launch - self.gap)


class Ahead:
    """Goes one step ahead of the plans: always where it can, or where it pays. launched, used, discarded: such steps so far."""

    def __init__(self, rows: Rows, always: bool) -> None:
        self.launched = self.used = self.discarded = 0
        self.pace = Pace()
        self._rows = rows
        self._always = always
        self._next: Foreseen | None = None

    def go(self, step: InFlight, compute: Compute) -> None:
        """Launch the step after `step`, whose tokens nobody has read, if its plan and its rows let that be foreseen."""
        begun, rows, computed = time.perf_counter(), self._rows, None
        if step.plan.repeat == 1 or not all(generation.goes_on for generation in step.emitting):
            return  # somebody else may come in, or is to look at the logits
        if self._always or self.pace.pays:
            batch = rows.ahead(step.plan.num_padding)
            if batch is None:
                return
            computed = compute(batch, step)
            self.launched += 1
        self._next = Foreseen([*rows.members], computed, begun, time.perf_counter() - begun)

    def step(self, plan: Plan, launch: Callable[[Plan], InFlight]) -> InFlight:
        """The step of `plan`, whose leaves have left: the one under way if it is that, else as `launch` makes it. Mutates block
        tables."""
        there, self._next = self._next, None
        if there is None:
            return launch(plan)
        rows, step = self._rows, None
        hit = not (plan.chunks or plan.joins or plan.moves)
        if there.computed is not None:
            if hit and rows.grow(foreseen=True):
                step = InFlight(plan, [*rows.members], there.computed, there.begun, _places(there.rows, rows.members))
            self.used += step is not None
            self.discarded += step is None
        step = step or launch(plan)
        self.pace.note_next(hit, there.launch if there.computed is not None else 0.0)
        return step


def _places(there: list[Generation], rows: list[Generation]) -> list[int] | None:
    """Where each of `rows` stands; None where they stand alike."""
    if rows == there:
        return None
    place = {generation: i for i, generation in enumerate(there)}
    return [place[generation] for generation in rows]
