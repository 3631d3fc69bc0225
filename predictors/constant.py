"""Constant: every request is as long as the median training answer. The floor that any learned predictor must beat."""

from __future__ import annotations

import numpy as np

from .latency import LatencyModel
from .predictions import Predictions
from .predictor import LengthPredictor, State, TrainingRows
from .prompts import Prompts


class Constant(LengthPredictor):
    """A point mass at the median training length, or at `length` tokens, which then needs no training.

    A censored row counts with its observed length: a lower bound above the median leaves the median exact.
    """

    name = "constant"
    per_row = False

    def __init__(self, length: float | None = None, latency: LatencyModel | None = None) -> None:
        if length is not None and not 1.0 <= length < float("inf"):
            raise ValueError(f"length={length}: a finite number of tokens >= 1 is needed")
        self.length = length
        self.latency = latency
        self._length = length

    @property
    def fitted(self) -> bool:
        return self._length is not None

    def learn(self, rows: TrainingRows) -> None:
        self._length = self.length if self.length is not None else float(np.median(rows.lengths))

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._length is not None
        return Predictions.from_points(np.full(len(prompts), self._length))

    def state(self) -> State:
        self._need_fitted()
        return State({"length": self._length})

    def restore(self, state: State) -> None:
        self._length = float(state.values["length"])
