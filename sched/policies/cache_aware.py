"""Cache-aware orders of SGLang (NeurIPS 2024; schedule_policy.py of 2026): what they share beside their key.

When many wait, matching costs more than it brings, and they fall back to first come first served; and of several prompts that
begin alike with something not cached yet, one goes first and the others later, when they find it.
"""

from __future__ import annotations

from abc import abstractmethod

from ..policy import FOREVER, INF, Policy
from ..ports import View
from ..request import Request
from .sharing import RUNS

RUNNING = -float(1 << 39)  # below any rank, and finite: a guard puts its own before it


class CacheAware(Policy):
    """Key: `rank`; infinity for whom another one warms the cache; 0 for all while more than `max_waiting` wait (released: 128).
    Non-preemptive. When the cache changes, each of the waiting is looked up anew: at most `max_waiting` of them.

    shared: tokens (released: 32). Who has no more than these cached, and begins with as many as somebody does who came before
    and waits, is put off. piece: tokens of a piece that `block_hashes` name: prompts are compared in whole pieces. Who runs has
    no rank: KV yields latest arrival first.
    """

    needs = frozenset({"cached_len"})

    def __init__(self, max_waiting: int = 128, shared: int = 32, piece: int = 16) -> None:
        if max_waiting < 0 or shared < 0 or piece < 1:
            raise ValueError(f"max_waiting={max_waiting} and shared={shared} must be >= 0, piece={piece} >= 1")
        self.max_waiting = max_waiting
        self.shared = shared
        self.piece = piece
        self._place = max(-(-shared // piece), 1) - 1  # of the piece that ends at or behind `shared` tokens
        self._live: dict[Request, None] = {}
        self._falls_back = False
        self._later: dict[Request, None] = {}
        self._version = 0
        self._seen: tuple[object, ...] = ()
        self._changes = 0  # arrivals, ends, ways on to the batch and off it: of two at once the number waiting tells nothing

    @abstractmethod
    def rank(self, req: Request, view: View) -> float:
        """Lower runs first, among those that wait."""

    def key(self, req: Request, view: View) -> float:
        if req.phase in RUNS:
            return RUNNING
        if self._falls_back:
            return 0.0
        return INF if req in self._later else self.rank(req, view)

    def key_epoch(self, view: View) -> object:
        falls_back = view.num_waiting > self.max_waiting
        seen = (falls_back,) if falls_back else (view.cache_epoch, self._changes, view.num_waiting)
        if seen != self._seen:
            later = {} if falls_back else self._duplicates(view)
            if falls_back != self._falls_back or later != self._later:
                self._falls_back, self._later = falls_back, later
                self._version += 1
            self._seen = seen
        return self._version if falls_back else (self._version, view.cache_epoch)

    def _duplicates(self, view: View) -> dict[Request, None]:
        if not self.shared:
            return {}
        later: dict[Request, None] = {}
        first: set[int] = set()
        for req in self._live:
            names = req.block_hashes
            if req.phase in RUNS or names is None or req.prompt_len < self.shared:
                continue
            there = names[self._place : self._place + 1]  # never len(names): a range may be longer than that can say
            if not len(there):
                continue
            name = there[0]
            if name not in first:
                if view.cached_len(req) <= self.shared:
                    first.add(name)
            elif view.cached_len(req) <= self.shared:
                later[req] = None
        return later

    def stable(self, view: View) -> tuple[int, float]:
        return FOREVER, INF

    def on_arrival(self, req: Request) -> None:
        self._live[req] = None
        self._changes += 1

    def on_schedule(self, req: Request, view: View) -> None:
        self._changes += 1

    def on_preempt(self, req: Request, view: View) -> None:
        self._changes += 1

    def on_finish(self, req: Request) -> None:
        self._live.pop(req, None)
        self._changes += 1
