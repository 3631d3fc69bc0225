"""Pairwise: of two prompts, which answer is the longer one, by a margin. Ranks alone, no lengths.

The loss of PARS (arXiv 2510.03243), which leaves out pairs of nearly equal length. Departure: all pairs of a batch are looked
at, not pairs drawn beforehand, so that each prompt is encoded once. A censored row is the longer one of a pair, or not in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..predictions import Predictions
from ..predictor import State
from .head import Floats, Head


class Pairwise(Head):
    """margin: by how much the longer one's output must be above the other's. min_difference: the least share of the longer
    one's length by which two differ that are compared."""

    def __init__(self, margin: float = 1.0, min_difference: float = 0.2) -> None:
        if not 0.0 < margin < float("inf") or not 0.0 <= min_difference < 1.0:
            raise ValueError(f"margin={margin}: positive and finite; min_difference={min_difference}: within [0, 1)")
        self.margin, self.min_difference = margin, min_difference

    @property
    def num_outputs(self) -> int:
        return 1

    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        longer, shorter = lengths[:, None], lengths[None, :]
        compared = (longer > shorter) & (longer - shorter >= self.min_difference * longer) & ~censored[None, :]
        ahead = outputs[:, :1] - outputs[:, 0][None, :]
        lacking = torch.relu(self.margin - ahead)
        return (lacking * compared).sum() / compared.sum().clamp(min=1)

    def predictions(self, outputs: Floats) -> Predictions:
        return Predictions(outputs[:, 0].copy())

    def state(self) -> State:
        return State({"direction": "a higher score is a longer answer"})
