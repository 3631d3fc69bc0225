"""One LightGBM head, trained the same way everywhere: deterministic, one thread, saved as LightGBM's own text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Booster:
    """Gradient-boosted trees for one target. num_rounds trees of at most num_leaves leaves."""

    def __init__(self, num_rounds: int, num_leaves: int, learning_rate: float, objective: str = "regression") -> None:
        if num_rounds < 1 or num_leaves < 2 or not 0.0 < learning_rate <= 1.0:
            raise ValueError(f"num_rounds={num_rounds}, num_leaves={num_leaves}, learning_rate={learning_rate}: not usable")
        self._settings: dict[str, Any] = {
            "objective": objective, "num_leaves": num_leaves, "learning_rate": learning_rate, "min_data_in_leaf": 20,
            "num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 0, "verbose": -1,
        }  # fmt: skip
        self._num_rounds = num_rounds
        self._model: Any = None

    def fit(self, columns: Floats, target: Floats) -> Booster:
        """Train on (N, F) columns and (N,) targets; a few rows give few trees, never an error."""
        import lightgbm

        data = lightgbm.Dataset(columns, target, params={"verbose": -1, "num_threads": 1})
        self._model = lightgbm.train(self._settings, data, self._num_rounds)
        return self

    def predict(self, columns: Floats) -> Floats:
        """(N, F) -> (N,), N may be 0."""
        if len(columns) == 0:
            return np.zeros(0)
        return np.asarray(self._model.predict(columns, num_threads=1), dtype=np.float64)

    @property
    def text(self) -> str:
        return str(self._model.model_to_string())

    @classmethod
    def from_text(cls, text: str) -> Booster:
        import lightgbm

        out = cls(1, 2, 1.0)
        out._model = lightgbm.Booster(model_str=text)
        return out
