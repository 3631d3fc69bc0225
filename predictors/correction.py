"""Correction: what the last requests say about predictions, told while some of their answers are still being written.

Short answers end first: those that have ended are shorter than those that were asked for, most of all when a load rises or when
lengths have just grown. So what is looked at is the last requests in the order they were asked, not in the order they ended,
and one that still runs counts as a lower bound, by how far it has come (Kaplan and Meier, 1958).

That is right as long as how far it has come tells no more of its length than its prediction did: with first come, first served,
and with any order by predicted length. In an order that knows better, who runs is chosen by what nobody told.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .depths import Depths, depths, depths_at
from .predictions import Predictions

Floats = NDArray[np.float64]

MIN_ENDED = 10  # answers; before that nothing is corrected


@dataclass(slots=True)
class _Asked:
    deep: Floats | None  # of EDGES in what was predicted for it; None once it has ended
    depth: float  # of its length as far as it is known
    censored: bool


class Correction:
    """Corrects distributions by the depths (depths.py) of the last `window` requests. scale: tokens, a typical length.

    prior: of so many answers, all as predicted, the weight that predictions as they are keep. Depths are gone through again
    when `every` of them have changed, which takes O(window log window); memory is that of `window` distributions. The same
    calls in the same order give the same corrections; they must come from one thread.
    """

    def __init__(self, scale: float, window: int = 512, prior: float = 20.0, every: int = 16) -> None:
        if window < MIN_ENDED or every < 1 or not 0.0 <= prior < float("inf"):
            raise ValueError(f"window={window}: at least {MIN_ENDED}; every={every}: at least 1; prior={prior}: not negative")
        self.scale, self.window, self.prior, self.every = scale, window, prior, every
        self._asked: OrderedDict[int, _Asked] = OrderedDict()
        self._changed = 0
        self._seen: Depths | None = None
        self._num_ended = 0

    def settings(self) -> dict[str, float]:
        """The arguments of one that has seen nothing."""
        return {"scale": self.scale, "window": self.window, "prior": self.prior, "every": self.every}

    def ask(self, rid: int, survival: Floats) -> None:
        """Request `rid` is asked now; `survival` (len(EDGES),) is what was predicted for it, uncorrected. The oldest of more
        than `window` is forgotten, whether it has ended or not."""
        deep = depths(Predictions(np.zeros(1), None, survival[None, :]), self.scale)
        self._asked.pop(rid, None)
        self._asked[rid] = _Asked(deep[0], float(depths_at(deep, [0.0])[0]), True)
        if len(self._asked) > self.window:
            self._asked.popitem(last=False)

    def observe(self, rid: int, length: int, censored: bool) -> None:
        """The answer of `rid` has `length` tokens; censored: so far, or when it was ended from outside. Of one that is not
        among the last asked, or has ended, nothing is learned."""
        one = self._asked.get(rid)
        if one is None or one.deep is None:
            return
        one.depth, one.censored = float(depths_at(one.deep[None, :], [length])[0]), censored
        if not censored:
            one.deep = None
        self._changed += 1

    def corrected(self, survival: Floats) -> Floats:
        """Distributions (N, len(EDGES)) as the last requests say; as they are before MIN_ENDED answers."""
        if self._changed >= self.every:
            self._look()
        if self._seen is None or not len(survival):
            return survival
        alive = self._seen.survival(depths(Predictions(np.zeros(len(survival)), None, survival), self.scale))
        mixed = (self.prior * survival + self._num_ended * alive) / (self.prior + self._num_ended)
        return np.minimum.accumulate(mixed, axis=1)

    def _look(self) -> None:
        self._changed = 0
        cut = np.array([one.censored for one in self._asked.values()], dtype=bool)
        self._num_ended = int(np.count_nonzero(~cut))
        if self._num_ended >= MIN_ENDED:
            self._seen = Depths.fit([one.depth for one in self._asked.values()], cut, of_survival=True)
