"""Calibrated: a head of one output, with what it says about lengths learned on rows that it was not trained on.

A straight line leads from the output to the soft-log length, and the errors around it make the distribution (calibration.py).
So ranks become lengths and points become distributions.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..calibration import Residuals, lift_censored, out_of_fold_columns, soft_log, soft_offset
from ..folds import Ints
from ..predictions import Predictions
from ..predictor import State
from .head import Bools, Floats, Head


class Calibrated(Head):
    """head: one of a single output, higher for longer. Censored rows are lower bounds in both line and errors."""

    sets_rows_aside = True

    def __init__(self, head: Head) -> None:
        self.head = head
        self._line = (0.0, 0.0)
        self._residuals: Residuals | None = None

    @property
    def num_outputs(self) -> int:
        return self.head.num_outputs

    def learn_labels(self, lengths: Floats, censored: Bools) -> None:
        self.head.learn_labels(lengths, censored)
        if self.head.num_outputs != 1:
            raise ValueError(f"{type(self.head).__name__} has {self.head.num_outputs} outputs, one can be calibrated")

    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        return self.head.loss(outputs, lengths, censored)

    def calibrate(self, outputs: Floats, lengths: Floats, censored: Bools) -> None:
        x, offset = outputs[:, 0], soft_offset(lengths)
        observed, fold = soft_log(lengths, offset), np.arange(len(x)) % 5

        def outside(y: Floats) -> Floats:
            def fit_predict(train: Ints, test: Ints) -> Floats:
                slope, level = line_through(x[train], y[train])
                return slope * x[test] + level

            return out_of_fold_columns(fold, fit_predict)

        y = lift_censored(outside(observed), observed, censored)
        self._line = line_through(x, y)
        self._residuals = Residuals.fit(outside(y), observed, censored, offset)

    def predictions(self, outputs: Floats) -> Predictions:
        if self._residuals is None:
            raise ValueError("the head is not calibrated")
        return Predictions.from_survivals(self._residuals.survival(self._line[0] * outputs[:, 0] + self._line[1]))

    def state(self) -> State:
        if self._residuals is None:
            raise ValueError("the head is not calibrated")
        inner = self.head.state()
        return State({**inner.values, "line": list(self._line)}, {**inner.arrays, **self._residuals.arrays()})

    def restore(self, state: State) -> None:
        self.head.restore(state)
        slope, level = state.values["line"]
        self._line, self._residuals = (float(slope), float(level)), Residuals.from_arrays(state.arrays)


def line_through(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and level of the least-squares line of y (N,) on x (N,); flat where x is constant."""
    away = x - np.mean(x)
    spread = float(np.sum(away * away))
    slope = float(np.sum(away * (y - np.mean(y)))) / spread if spread > 1e-12 * len(x) else 0.0
    return slope, float(np.mean(y)) - slope * float(np.mean(x))
