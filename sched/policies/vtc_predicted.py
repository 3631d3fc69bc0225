"""VTC that charges the predicted output at admission, and corrects it as tokens come (VTC, OSDI 2024)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from ..request import Request, predicted
from .sharing import Client
from .vtc import VTC


class VTCPredicted(VTC):
    """As VTC, but output tokens are charged ahead, so that a client is not let in again and again before its long answers tell.
    A token is charged as it comes once the prediction is outlived; what a shorter answer leaves is given back at its end.

    window: predict a client's mean over its last answers, of which each new one counts 1 / window, as released (there 5), 0
    before the first; None: the predictor's mean, and then predictions are needed. Rounded up to whole tokens.
    """

    def __init__(
        self,
        input_price: float = 1.0,
        output_price: float = 2.0,
        weights: Mapping[Hashable, float] | None = None,
        window: int | None = 5,
    ) -> None:
        super().__init__(input_price, output_price, weights)
        if window is not None and window < 1:
            raise ValueError(f"window={window} answers, the least is 1")
        self.window = window
        if window is None:
            self.needs = self.needs | {"prediction"}
        self._means: dict[Hashable, float] = {}  # client -> tokens

    def ahead(self, req: Request) -> int:
        if self.window is not None:
            return math.ceil(self._means.get(req.client, 0.0))
        return math.ceil(predicted(req).mean())

    def ended(self, client: Client, num_tokens: int) -> None:
        if self.window is not None and num_tokens:
            mean = self._means.get(client.name, 0.0) or num_tokens
            self._means[client.name] = (mean * (self.window - 1) + num_tokens) / self.window
