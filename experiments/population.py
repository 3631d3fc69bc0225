"""Population: who asks. Clients, classes with objectives, priorities and timeouts, drawn for the requests of any workload.

Shares are of requests, or of sessions where there are any: all turns of one session are one client's. The draw depends on the
seed and the shares alone, never on lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dataset import Workload

OBJECTIVES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Population:
    """Each part is drawn on its own; one that is empty leaves the workload as it is.

    clients: name -> share. classes: name -> {share, and any of ttft, tpot, e2e (s), timeout (s)}; a request's class sets its
    objectives, and stands in its column `class`. priorities: priority -> share (lower goes first). timeouts: [{share,
    seconds}]; what is left to 1 waits for ever. Shares of clients, classes and priorities add up to 1.
    """

    clients: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    priorities: Mapping[float, float] = field(default_factory=dict)
    timeouts: Sequence[Mapping[str, float]] = ()

    def __post_init__(self) -> None:
        _shares("clients", list(self.clients.values()))
        _shares("classes", [float(c.get("share") or 0.0) for c in self.classes.values()])
        _shares("priorities", list(self.priorities.values()))
        for one in self.timeouts:
            if set(one) != {"share", "seconds"}:
                raise ValueError(f"a timeout has {sorted(one)}, it needs share and seconds")
            _above_0("timeout", one["seconds"])
        _shares("timeouts", [one["share"] for one in self.timeouts], whole=False)
        for name, kind in self.classes.items():
            if unknown := sorted(set(kind) - {"share", "timeout", *OBJECTIVES}):
                raise ValueError(f"class {name} has {unknown}; known are share, timeout, {', '.join(OBJECTIVES)}")
            for key in ("timeout", *OBJECTIVES):
                if kind.get(key) is not None:
                    _above_0(f"class {name}: {key}", kind[key])
        if self.timeouts and any(c.get("timeout") is not None for c in self.classes.values()):
            raise ValueError("timeouts are given by class and apart: give one of them")

    def columns(self, workload: Workload, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Columns (N,) for the workload's requests. Each part has random numbers of its own, so that a longer draw, and a part
        more or less, change nothing of the rest."""
        owner = _owners(workload)
        num = int(owner.max()) + 1
        of_client, of_class, of_priority, of_timeout = rng.spawn(4)
        out: dict[str, NDArray[Any]] = {}
        if self.clients:
            out["client"] = _names(self.clients)[_draw(list(self.clients.values()), num, of_client)][owner]
        if self.classes:
            kind = _draw([float(c.get("share") or 0.0) for c in self.classes.values()], num, of_class)[owner]
            out["class"] = _names(self.classes)[kind]
            for column, key in (*((f"slo_{o}", o) for o in OBJECTIVES), ("timeout", "timeout")):
                values = [c.get(key) for c in self.classes.values()]
                if any(v is not None for v in values):
                    out[column] = np.array([np.nan if v is None else float(v) for v in values])[kind]
        if self.priorities:
            levels = np.array([float(p) for p in self.priorities])
            out["priority"] = levels[_draw(list(self.priorities.values()), num, of_priority)][owner]
        if self.timeouts:
            shares = [t["share"] for t in self.timeouts]
            seconds = np.array([*(float(t["seconds"]) for t in self.timeouts), np.inf])
            drawn = seconds[_draw([*shares, max(1.0 - sum(shares), 0.0)], len(owner), of_timeout)]
            if workload.after is not None:  # turns of sessions come in another order at another rate: by session, not by time
                drawn[np.argsort(owner, kind="stable")] = drawn.copy()
            out["timeout"] = drawn
        return out

    def describe(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """What was asked for and how many requests came to have each value."""
        counts = {}
        for name in ("client", "class", "priority"):
            if name in columns:
                values, n = np.unique(np.asarray(columns[name]).astype(str), return_counts=True)
                counts[name] = dict(zip(values.tolist(), n.tolist(), strict=True))
        timeouts = [{"share": float(t["share"]), "seconds": float(t["seconds"])} for t in self.timeouts]
        return {"classes": {name: dict(one) for name, one in self.classes.items()}, "timeouts": timeouts, "drawn": counts}


def _owners(workload: Workload) -> NDArray[np.int64]:
    """Which draw each request takes (N,): its session's, numbered by first appearance, else its own."""
    session = workload.column("session")
    if session is None:
        return np.arange(len(workload), dtype=np.int64)
    _, first, of = np.unique(np.asarray(session).astype(str), return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[of], dtype=np.int64)


def _names(named: Mapping[str, Any]) -> NDArray[Any]:
    return np.array([str(name) for name in named], dtype=object)


def _draw(shares: Sequence[float], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """n choices by the shares: one uniform each, so that n more shift none."""
    ends = np.cumsum(shares)
    found = np.searchsorted(ends, rng.random(n) * ends[-1], side="right")
    return np.asarray(np.minimum(found, len(shares) - 1), dtype=np.int64)


def _above_0(name: str, seconds: float | None) -> None:
    if seconds is None or not 0 < seconds < float("inf"):
        raise ValueError(f"{name} {seconds} s must be a finite number above 0")


def _shares(name: str, shares: Sequence[float], *, whole: bool = True) -> None:
    if any(not 0 <= share <= 1 for share in shares):
        raise ValueError(f"{name}: shares {list(shares)} must be from 0 to 1")
    total = sum(shares)
    if shares and (abs(total - 1) > 1e-9 if whole else total > 1 + 1e-9):
        raise ValueError(f"{name}: shares {list(shares)} add up to {total:g}, {'not 1' if whole else 'more than 1'}")
