"""Refreshed: keys that move with time, each in its own way, computed anew every so often and frozen in between."""

from __future__ import annotations

from abc import abstractmethod

from ..policy import FOREVER, INF, Key, Policy
from ..ports import View
from ..request import Request

SHORT = 64  # a queue up to this is refreshed as often as asked
KEYS = 10  # beyond, keys computed a decode step, on the mean: a long queue is refreshed less often


class Refreshed(Policy):
    """Give `worth` instead of `key`. A refresh costs O(waiting), and comes every max(every, (waiting - SHORT) / KEYS) decode
    steps: so a decision costs the same however many wait. Raises ValueError unless every is at least 1."""

    remembers = False  # True: what `refresh` notes hangs on how often it was called

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every} steps, the least is 1")
        self._every = every
        self._due = 0  # decode step of the next refresh
        self._epoch = 0
        self._frozen: dict[int, Key] = {}  # rid -> key

    @abstractmethod
    def worth(self, req: Request, view: View) -> Key:
        """The key of `req` as of the last refresh, or of its arrival since."""

    def refresh(self, view: View) -> bool:
        """Note here what keys stand on, the time among it. Whether any may be another than before, so that all are computed
        anew."""
        return True

    def key(self, req: Request, view: View) -> Key:
        key = self._frozen.get(req.rid)
        if key is None:
            key = self._frozen[req.rid] = self.worth(req, view)
        return key

    def key_epoch(self, view: View) -> object:
        if view.step >= self._due:
            self._due = view.step + max(self._every, (view.num_waiting - SHORT) // KEYS)
            if self.refresh(view):
                self._epoch += 1
                self._frozen.clear()
        return self._epoch

    def stable(self, view: View) -> tuple[int, float]:
        if self._every == 1 and not self.remembers and not view.num_waiting:
            return FOREVER, INF
        return max(self._due - view.step, 1), INF

    def on_finish(self, req: Request) -> None:
        self._frozen.pop(req.rid, None)
