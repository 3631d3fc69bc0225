"""Regression: the logarithm of the length, as one number. A point; `Calibrated` makes it a distribution.

SSJF regresses the token count itself, with L1 or squared loss; the logarithm keeps a few long answers from being all of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..calibration import soft_log, soft_offset
from ..predictions import Predictions
from ..predictor import State
from .head import Bools, Floats, Head


class Regression(Head):
    """power: of the absolute error: 1 is L1, 2 is squared. A censored row errs only where it is predicted below its bound."""

    def __init__(self, power: float = 1.0) -> None:
        if not 1.0 <= power < float("inf"):
            raise ValueError(f"power={power}: at least 1 and finite")
        self.power = power
        self._offset, self._middle, self._width = 1.0, 0.0, 1.0

    @property
    def num_outputs(self) -> int:
        return 1

    def learn_labels(self, lengths: Floats, censored: Bools) -> None:
        self._offset = soft_offset(lengths)
        soft = soft_log(lengths, self._offset)
        self._middle, self._width = float(np.mean(soft)), max(float(np.std(soft)), 1e-3)  # outputs start near 0

    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        error = outputs[:, 0] - (torch.log(lengths + self._offset) - self._middle) / self._width
        return torch.where(censored, error.clamp(max=0.0), error).abs().pow(self.power).mean()

    def predictions(self, outputs: Floats) -> Predictions:
        soft = np.minimum(outputs[:, 0] * self._width + self._middle, 30.0)  # beyond any length, short of infinity
        return Predictions.from_points(np.maximum(np.exp(soft) - self._offset, 1.0))

    def state(self) -> State:
        return State({"offset": self._offset, "middle": self._middle, "width": self._width})

    def restore(self, state: State) -> None:
        self._offset, self._middle, self._width = (float(state.values[key]) for key in ("offset", "middle", "width"))
