"""Prompt length: the output's distribution given the prompt's length alone, for workloads without text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .boosting import Booster
from .calibration import Residuals, lift_censored, out_of_fold_columns, soft_log, soft_offset
from .features import refuse_label_columns
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts


class PromptLength(LengthPredictor):
    """Boosted trees from log prompt length to soft-log output length, plus calibrated out-of-fold residuals.

    Not a sort by input length: the relation is learned, and may fall. Censored rows are lower bounds (calibration.py).
    """

    name = "prompt_length"

    def __init__(
        self, num_rounds: int = 60, num_leaves: int = 8, num_folds: int = 5, latency: LatencyModel | None = None
    ) -> None:
        if num_folds < 2:
            raise ValueError(f"num_folds={num_folds}: at least 2")
        self.num_rounds, self.num_leaves, self.num_folds = num_rounds, num_leaves, num_folds
        self.latency = latency
        self._head: Booster | None = None
        self._residuals: Residuals | None = None

    @property
    def fitted(self) -> bool:
        return self._residuals is not None

    def learn(self, rows: TrainingRows) -> None:
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        x, observed = np.log1p(rows.prompts.prompt_len)[:, None], soft_log(rows.lengths, offset)
        refuse_label_columns(x, ("log_tokens",), observed)
        y = lift_censored(self._out_of_fold(x, observed, fold), observed, cut)
        location = self._out_of_fold(x, y, fold)
        self._head = self._new().fit(x, y)
        self._residuals = Residuals.fit(location, observed, cut, offset)

    def _out_of_fold(self, x: Floats, y: Floats, fold: NDArray[np.int64]) -> Floats:
        return out_of_fold_columns(fold, lambda train, test: self._new().fit(x[train], y[train]).predict(x[test]))

    def _new(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, 0.1)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._head is not None and self._residuals is not None
        location: Floats = self._head.predict(np.log1p(prompts.prompt_len)[:, None])
        return Predictions.from_survivals(self._residuals.survival(location))

    def state(self) -> State:
        self._need_fitted()
        assert self._head is not None and self._residuals is not None
        return State({}, self._residuals.arrays(), {"location": self._head.text}, ("log_tokens",))

    def restore(self, state: State) -> None:
        self._head = Booster.from_text(state.texts["location"])
        self._residuals = Residuals.from_arrays(state.arrays)
