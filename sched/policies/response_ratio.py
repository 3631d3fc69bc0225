"""Highest response ratio next, with work for time: SGLang's `hrrn` (schedule_policy.py of 2026)."""

from __future__ import annotations

from ..ports import View
from ..request import Phase, Request
from .cache_aware import CacheAware


class ResponseRatio(CacheAware):
    """Rank: -(prompt tokens that the engine has prefilled since the request came) / (its prompt tokens that are not cached).

    At a constant speed of prefill this is HRRN on the prefill, 1 + wait / time: a short prompt goes early, and a long one in
    the end. Decoding is no work here, as released. Ties by arrival.
    """

    def __init__(self, max_waiting: int = 128, shared: int = 32, piece: int = 16) -> None:
        super().__init__(max_waiting, shared, piece)
        self._processed = 0  # tokens prefilled so far
        self._came: dict[Request, int] = {}  # what that was when it came
        self._prefilling: dict[Request, int] = {}  # tokens computed so far

    def rank(self, req: Request, view: View) -> float:
        waited = self._processed - self._came.get(req, self._processed)
        return -waited / max(req.prompt_len - view.cached_len(req), 1)

    def key_epoch(self, view: View) -> object:
        epoch = super().key_epoch(view)
        return epoch if self._falls_back else (epoch, self._processed)

    def on_schedule(self, req: Request, view: View) -> None:
        computed = view.computed(req)
        if req.phase == Phase.WAITING or computed < req.prompt_len + view.generated(req) - 1:
            self._prefilling[req] = computed

    def on_preempt(self, req: Request, view: View) -> None:
        self._prefilling.pop(req, None)

    def on_arrival(self, req: Request) -> None:
        super().on_arrival(req)
        self._came[req] = self._processed

    def on_steps(self, num_steps: int, view: View) -> None:
        for req, before in list(self._prefilling.items()):
            now = view.computed(req)
            self._processed += now - before
            if req.phase == Phase.PREFILLING:
                self._prefilling[req] = now
            else:
                del self._prefilling[req]

    def on_finish(self, req: Request) -> None:
        super().on_finish(req)
        self._came.pop(req, None)
        self._prefilling.pop(req, None)
