"""Bucket: which of a few length classes, by cross entropy; all probabilities are kept as a distribution.

The classification heads of SSJF (Qiu et al., 2024) and S3 (Jin et al., NeurIPS 2023), which take the likeliest class alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..buckets import DIRECTION, Buckets
from ..predictions import Predictions
from ..predictor import State
from .head import Bools, Floats, Head


class Bucket(Head):
    """levels: buckets end at these quantiles of the training lengths; or bounds: at these tokens.

    balance: rows weigh the inverse frequency of their class to this power, 1 as SSJF; predictions divide it out again. A
    censored row's loss is that of its bucket or any above.
    """

    def __init__(
        self, levels: Sequence[float] | None = None, bounds: Sequence[float] | None = None, balance: float = 0.0
    ) -> None:
        if (levels is None) == (bounds is None) or not 0.0 <= balance <= 1.0:
            raise ValueError(f"levels={levels}, bounds={bounds}: state one of both; balance={balance}: within [0, 1]")
        self.levels = None if levels is None else list(levels)
        self.bounds = None if bounds is None else list(bounds)
        self.balance = balance
        self._buckets: Buckets | None = None
        self._weights: Floats = np.zeros(0)

    @property
    def buckets(self) -> Buckets:
        """Raises ValueError before the training lengths were seen."""
        if self._buckets is None:
            raise ValueError("the buckets are not there before the training lengths were seen")
        return self._buckets

    @property
    def num_outputs(self) -> int:
        return len(self.buckets)

    def learn_labels(self, lengths: Floats, censored: Bools) -> None:
        self._buckets = Buckets.fit(lengths, censored, levels=self.levels, bounds=self.bounds)
        num_rows = np.bincount(self._buckets.classes(lengths), minlength=len(self._buckets)) + 1.0
        self._weights = (num_rows.sum() / (len(num_rows) * num_rows)) ** self.balance

    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        bounds, weights = (torch.as_tensor(x, dtype=torch.float32, device=outputs.device) for x in self._parts())
        at = torch.bucketize(lengths, bounds)
        logs = torch.log_softmax(outputs, dim=1)
        own = logs.gather(1, at[:, None])[:, 0]
        below = torch.arange(outputs.shape[1], device=outputs.device)[None, :] < at[:, None]
        or_above = torch.logsumexp(logs.masked_fill(below, -torch.inf), dim=1)
        weight = weights[at]
        return -(weight * torch.where(censored, or_above, own)).sum() / weight.sum()

    def _parts(self) -> tuple[Floats, Floats]:
        return self.buckets.bounds, self._weights

    def predictions(self, outputs: Floats) -> Predictions:
        shares = np.exp(outputs - outputs.max(axis=1, keepdims=True)) / self._weights
        return Predictions.from_survivals(self.buckets.survival(shares))

    def state(self) -> State:
        return State({"direction": DIRECTION}, {**self.buckets.arrays(), "class_weights": self._weights})

    def restore(self, state: State) -> None:
        self._buckets, self._weights = Buckets.from_arrays(state.arrays), state.arrays["class_weights"]
