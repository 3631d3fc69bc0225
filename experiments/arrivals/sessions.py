"""Sessions: whole conversations (or agent programs) start by a process; each next turn waits for the answer and a pause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataset import Dataset, Ints, Workload
from .pause import Pause
from .poisson import Poisson

if TYPE_CHECKING:
    from ..draw import Arrivals


@dataclass(frozen=True)
class Sessions:
    """starts: the process by which sessions start. think: pauses before turns whose row has no `gap` of its own.

    A rate (or load) counts requests, so that sessions start at rate / turns per session. Sessions are drawn whole, in random
    order; the last one is cut where num_requests is reached.
    """

    starts: Arrivals = field(default_factory=Poisson)
    think: Pause = field(default_factory=lambda: Pause(10.0))

    def order(self, dataset: Dataset, n: int, rng: np.random.Generator) -> Ints:
        """Rows of whole sessions in random order, each session's in order of turn, the first n of them."""
        session = dataset.columns.get("session")
        if session is None:
            raise ValueError(f"dataset {dataset.name} has no column `session`: arrivals=sessions needs one")
        names, of = np.unique(np.asarray(session).astype(str), return_inverse=True)
        turn = np.asarray(dataset.columns.get("turn", np.arange(len(dataset))))
        place = rng.permutation(len(names))[of]
        return np.lexsort((turn, place))[:n].astype(np.int64)

    def lay(self, dataset: Dataset, rows: Ints, rate: float | None, rng: np.random.Generator) -> Workload:
        """The workload of these rows (N,), a session's one after another. arrival is the earliest that each can come."""
        n = len(rows)
        session = np.asarray(dataset.columns["session"])[rows]
        begins = np.concatenate(([True], session[1:] != session[:-1]))
        number = np.cumsum(begins) - 1
        num_sessions = int(number[-1]) + 1
        start = self.starts.times(num_sessions, None if rate is None else rate * num_sessions / n, rng)
        gap = self.think.times(n, rng)
        own = dataset.columns.get("gap")
        if own is not None:
            known = np.asarray(own, dtype=np.float64)[rows]
            gap = np.where(np.isnan(known), gap, known)
        gap[begins] = 0.0
        passed = np.cumsum(gap)
        arrival = start[number] + passed - passed[begins][number]
        order = np.argsort(arrival, kind="stable")
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n)
        before = np.where(begins, -1, np.concatenate(([0], place[:-1])))
        notes = {"sessions": {"num_sessions": num_sessions, "turns_mean": n / num_sessions, "gap_mean": _mean(gap[~begins])}}
        return Workload(dataset, rows[order], arrival[order], notes, after=before[order], gap=gap[order])

    def describe(self) -> dict[str, Any]:
        return {"process": "sessions", "starts": dict(self.starts.describe()), "think": self.think.describe()}

    @property
    def keeps_times(self) -> bool:
        """Whether the starts need no rate."""
        return bool(getattr(self.starts, "keeps_times", False))


def _mean(gaps: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(gaps.mean()) if gaps.size else None
