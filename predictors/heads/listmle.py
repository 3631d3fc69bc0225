"""ListMLE: an order of a batch, likely under a model that draws its rows shortest first. Ranks alone, no lengths.

The loss of LTR (Fu et al., NeurIPS 2024; ListMLE: Xia et al., ICML 2008): one list is one batch, lengths are grouped by 10
tokens and ties stand in the batch's random order. Departures: the mean over rows in place of their sum, which Adam does not
tell apart; a censored row is never drawn, but stands among those that could have been, as in Cox's partial likelihood (1975).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..predictions import Predictions
from ..predictor import State
from .head import Floats, Head


class ListMLE(Head):
    """group: tokens within which two lengths are equal. most: lengths above are equal. A lower output is a shorter answer."""

    def __init__(self, group: int = 10, most: int = 8192) -> None:
        if group < 1 or most < group:
            raise ValueError(f"group={group}, most={most}: 1 <= group <= most")
        self.group, self.most = group, most

    @property
    def num_outputs(self) -> int:
        return 1

    def labels(self, lengths: Tensor) -> Tensor:
        """The group (B,) of each length, 0 .. most // group: never out of range, a higher one is longer."""
        return torch.div(lengths.clamp(max=self.most), self.group, rounding_mode="floor").long()

    def loss(self, outputs: Tensor, lengths: Tensor, censored: Tensor) -> Tensor:
        late = censored.long()  # among equals a censored row comes last: it was still there when the others were drawn
        order = torch.argsort(self.labels(lengths) * 2 + late, stable=True)
        strength = -outputs[order, 0]
        rest = torch.logcumsumexp(strength.flip(0), dim=0).flip(0)  # over the row and all after it
        drawn = ~censored[order]
        return ((rest - strength) * drawn).sum() / drawn.sum().clamp(min=1)

    def predictions(self, outputs: Floats) -> Predictions:
        return Predictions(outputs[:, 0].copy())

    def state(self) -> State:
        return State({"direction": "a higher score is a longer answer"})
