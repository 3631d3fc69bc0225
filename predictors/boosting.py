"""One LightGBM head, trained the same way everywhere: deterministic, one thread, saved as LightGBM's own text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Booster:
    """Gradient-boosted trees for one target. num_rounds trees of at most num_leaves leaves. objective and what it needs beside
    its name: LightGBM's own words."""

    def __init__(
        self, num_rounds: int, num_leaves: int, learning_rate: float, objective: str = "regression", **needs: Any
    ) -> None:
        if num_rounds < 1 or num_leaves < 2 or not 0.0 < learning_rate <= 1.0:
            raise ValueError(f"num_rounds={num_rounds}, num_leaves={num_leaves}, learning_rate={learning_rate}: not usable")
        self._settings: dict[str, Any] = {
            "objective": objective, "num_leaves": num_leaves, "learning_rate": learning_rate, "min_data_in_leaf": 20,
            "num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 0, "verbose": -1, **needs,
        }  # fmt: skip
        self._num_rounds = num_rounds
        self._model: Any = None

    def fit(self, columns: Floats, target: Floats, weight: Floats | None = None) -> Booster:
        """Train on (N, F) columns, (N,) targets and weights; a few rows give few trees, never an error."""
        import lightgbm

        data = lightgbm.Dataset(columns, target, weight=weight, params={"verbose": -1, "num_threads": 1})
        self._model = lightgbm.train(self._settings, data, self._num_rounds)
        return self

    def predict(self, columns: Floats) -> Floats:
        """(N, F) -> (N,), or (N, classes) of a multiclass objective; N may be 0."""
        if len(columns) == 0:
            width = self._model.num_model_per_iteration()
            return np.zeros((0, width)) if width > 1 else np.zeros(0)
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

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    def fit_in_folds(self, columns: Any, target: Floats, fold: NDArray[np.int64], patience: int) -> Floats:
        """Train as `fit` does, on as many rounds as predict left-out folds best; returns predictions (N,) of each row by trees
        that have not seen its fold (N,). columns: dense, or scipy's CSR.

        One number of rounds serves all folds, at most num_rounds: the loss over all rows left out has then not fallen for
        `patience` rounds, or never fell again.
        """
        import lightgbm

        folds = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(int(fold.max()) + 1)]
        data = lightgbm.Dataset(columns, target, params={"verbose": -1, "num_threads": 1})
        found: Any = lightgbm.cv(
            self._settings, data, self._num_rounds, folds=folds, return_cvbooster=True,
            callbacks=[lightgbm.early_stopping(patience, verbose=False)],
        )["cvbooster"]  # fmt: skip
        self._num_rounds = max(int(found.best_iteration), 1)
        out = np.empty(len(target))
        for model, (_, left_out) in zip(found.boosters, folds, strict=True):
            out[left_out] = model.predict(columns[left_out], num_iteration=self._num_rounds, num_threads=1)
        self.fit(columns, target)
        return out

    def predict_sparse(self, columns: Any) -> Floats:
        """As `predict`, of scipy's CSR (N, F)."""
        if columns.shape[0] == 0:  # LightGBM takes no empty batch
            return np.zeros(0)
        return np.asarray(self._model.predict(columns, num_threads=1), dtype=np.float64)


def seeing(share: float) -> dict[str, Any]:
    """What a Booster needs for trees that see `share` of the rows and of the columns each. Raises ValueError outside (0, 1]."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share={share} of rows and columns: above 0, at most 1")
    return {} if share == 1.0 else {"feature_fraction": share, "bagging_fraction": share, "bagging_freq": 1}
