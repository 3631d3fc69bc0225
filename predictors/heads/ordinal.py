"""Ordinal: for each of a few lengths, whether the answer is longer; a miss by one bucket costs less than one by five.

One binary output a threshold (Frank and Hall, ECML 2001). Departure from SSJF's ordinal head, which regresses the class number
and rounds it: this one says probabilities, and a censored row is silent on every threshold beyond its bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..buckets import DIRECTION, Buckets
from ..predictions import Predictions
from ..predictor import State
from .head import Bools, Floats, Head


class Ordinal(Head):
    """levels: thresholds at these quantiles of the training lengths; or bounds: at these tokens."""

    def __init__(self, levels: Sequence[float] | None = None, bounds: Sequence[float] | None = None) -> None:
        if (levels is None) == (bounds is None):
            raise ValueError(f"levels={levels}, bounds={bounds}: state one of both")
        self.levels = None if levels is None else list(levels)
        self.bounds = None if bounds is None else list(bounds)
        self._buckets: Buckets | None = None

    @property
    def buckets(self) -> Buckets:
        """Raises ValueError before the training lengths were seen."""
        if self._buckets is None:
            raise ValueError("the thresholds are not there before the training lengths were seen")
        return self._buckets

    @property
    def num_outputs(self) -> int:
        return len(self.buckets) - 1

    def learn_labels(self, lengths: Floats, censored: Bools) -> None:
        self._buckets = Buckets.fit(lengths, censored, levels=self.levels, bounds=self.bounds)

    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        bounds = torch.as_tensor(self.buckets.bounds, dtype=torch.float32, device=outputs.device)
        longer = lengths[:, None] > bounds[None, :]
        known = longer | ~censored[:, None]
        each = binary_cross_entropy_with_logits(outputs, longer.to(outputs.dtype), reduction="none")
        return (each * known).sum() / known.sum().clamp(min=1)

    def predictions(self, outputs: Floats) -> Predictions:
        from scipy.special import expit

        ends = np.concatenate((np.ones((len(outputs), 1)), expit(outputs), np.zeros((len(outputs), 1))), axis=1)
        # Where thresholds cross a share is negative, and `survival` keeps to the lower one.
        return Predictions.from_survivals(self.buckets.survival(ends[:, :-1] - ends[:, 1:]))

    def state(self) -> State:
        return State({"direction": DIRECTION}, self.buckets.arrays())

    def restore(self, state: State) -> None:
        self._buckets = Buckets.from_arrays(state.arrays)
