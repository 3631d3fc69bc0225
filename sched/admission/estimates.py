"""Estimates: how long an answer will be, for whoever plans memory ahead."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ..request import predicted

if TYPE_CHECKING:
    from ..request import Request


_MASK = (1 << 64) - 1


class Estimate(Protocol):
    """needs: as a policy's. renews: whether who outlives an estimate gets another."""

    needs: frozenset[str]
    renews: bool

    def total(self, req: Request, generated: int) -> float: ...
    def on_finish(self, req: Request, generated: int) -> None: ...


class Predicted:
    """What the predictor said: the mean, or a quantile. Raises ValueError unless the quantile is None or within (0, 1)."""

    renews = False

    def __init__(self, quantile: float | None = None) -> None:
        if quantile is not None and not 0.0 < quantile < 1.0:
            raise ValueError(f"quantile {quantile} is not within (0, 1)")
        self.needs = frozenset({"prediction" if quantile is None else "distribution"})
        self._quantile = quantile

    def total(self, req: Request, generated: int) -> float:
        said = predicted(req)
        return said.mean() if self._quantile is None else said.quantile(self._quantile)

    def on_finish(self, req: Request, generated: int) -> None: ...


class Asked:
    """As long as it may be: max_new_tokens. Nobody outlives that, so a peak of such lengths is never passed where
    prompts are computed whole."""

    needs: frozenset[str] = frozenset()
    renews = False

    def total(self, req: Request, generated: int) -> float:
        return req.max_new_tokens

    def on_finish(self, req: Request, generated: int) -> None: ...


class History:
    """What has been seen: a draw from the lengths of the last `window` answers that are longer than this one is by now
    (Past-Future, ASPLOS 2025, section 4); max_new_tokens while there is none.

    Each request draws once where it stands in that distribution, by `seed` and its rid alone, so that asking again is no second
    throw; what stands there moves with the history. Raises ValueError unless window is at least 1.
    """

    needs: frozenset[str] = frozenset()
    renews = True

    def __init__(self, window: int = 1000, seed: int = 0) -> None:
        if window < 1:
            raise ValueError(f"window={window} answers, the least is 1")
        self._last: deque[int] = deque()
        self._in_order: list[int] = []
        self._window, self._seed = window, seed

    def total(self, req: Request, generated: int) -> float:
        first = bisect_right(self._in_order, generated)
        longer = len(self._in_order) - first
        if not longer:
            return req.max_new_tokens
        return self._in_order[first + int(_share(self._seed, req.rid) * longer)]

    def on_finish(self, req: Request, generated: int) -> None:
        self._last.append(generated)
        insort(self._in_order, generated)
        if len(self._last) > self._window:
            del self._in_order[bisect_right(self._in_order, self._last.popleft()) - 1]


def _share(seed: int, rid: int) -> float:
    """A number within [0, 1) that hangs on the two alone, as if drawn (SplitMix64's finaliser; Steele et al., OOPSLA 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + rid + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return ((x ^ x >> 31) >> 11) / (1 << 53)
