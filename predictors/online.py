"""Online: a predictor whose distributions are corrected while it serves, by the answers that come of what it predicted.

What has been learned offline stays as it is; between it and the scheduler stands a Correction. A server tells `observe` of each
answer that ends and, now and then, how far those have come that run; a simulation does the same (experiments/corrected.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lengthwise.sched import LengthDistribution, Request

from .correction import Correction
from .latency import LatencyModel
from .nested import Inner, built, described, packed, taught, unpacked
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts


class Online(LengthPredictor):
    """`inner` and a Correction of the last `window` requests (see there for prior and every). inner: says distributions; around
    one that says points or ranks put `conformal` first. A fitted one, such as an artefact, is taken as it is.

    `predict` remembers the requests it is given, `predict_columns` does not. An artefact holds what was learned offline: one
    that is loaded corrects nothing until it has seen answers again.
    """

    name = "online"
    learns = True

    def __init__(
        self, inner: Inner, window: int = 512, prior: float = 20.0, every: int = 16, latency: LatencyModel | None = None
    ) -> None:
        self.inner = built(inner)
        self.window, self.prior, self.every = window, prior, every
        self.latency = latency or self.inner.latency
        self.needs_text, self.per_row = self.inner.needs_text, self.inner.per_row  # type: ignore[misc]
        self._inner: LengthPredictor | None = None  # the fitted one
        self.correction = self.new_correction(1.0)  # refuses bad settings here
        if self.inner.fitted and self.inner.training_median is not None:
            self.unit, self.training_median, self.seen = self.inner.unit, self.inner.training_median, self.inner.seen
            self.transfer, self.provenance = self.inner.transfer, self.inner.provenance
            self._take(self.inner)

    def new_correction(self, scale: float) -> Correction:
        """One that has seen nothing. scale: tokens, a typical length."""
        return Correction(scale, self.window, self.prior, self.every)

    @property
    def fitted(self) -> bool:
        return self._inner is not None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "inner": described(self.inner)}

    def learn(self, rows: TrainingRows) -> None:
        self._take(taught(self.inner, rows, np.arange(len(rows.lengths))))

    def _take(self, inner: LengthPredictor) -> None:
        assert inner.training_median is not None
        self._inner, self.correction = inner, self.new_correction(inner.training_median)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        return Predictions.from_survivals(self.correction.corrected(self._said(prompts)))

    def predict(self, requests: Sequence[Request]) -> list[LengthDistribution]:
        said = self._said(self._prompts_of(requests))
        for request, row in zip(requests, said, strict=True):
            self.correction.ask(request.rid, row)
        return Predictions.from_survivals(self.correction.corrected(said)).rows()

    def observe(self, request: Request, length: int, censored: bool) -> None:
        self.correction.observe(request.rid, length, censored)

    def _said(self, prompts: Prompts) -> Floats:
        """What the inner predictor says, (N, len(EDGES)). Raises ValueError where it says no distribution."""
        self._need_fitted(prompts)
        assert self._inner is not None
        survival = self._inner.predict_columns(prompts).survival
        if survival is None:
            raise ValueError(f"online corrects distributions, and {self._inner.name} says none: put conformal around it")
        return np.asarray(survival, dtype=np.float64)

    def state(self) -> State:
        self._need_fitted()
        assert self._inner is not None
        return packed(self._inner)

    def restore(self, state: State) -> None:
        self._take(unpacked(self.inner, state))
