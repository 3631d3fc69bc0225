"""LightGBM heads, trained the same way everywhere: deterministic, one thread, saved as LightGBM's own text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Booster:
    """Gradient-boosted trees for one target. num_rounds trees (for each class) of at most num_leaves leaves.

    share: of the rows and the columns, what a tree sees. settings: further parameters of LightGBM, such as `num_class` of
    objective="multiclass".
    """

    def __init__(
        self,
        num_rounds: int,
        num_leaves: int,
        learning_rate: float,
        objective: str = "regression",
        share: float = 1.0,
        **settings: float,
    ) -> None:
        if num_rounds < 1 or num_leaves < 2 or not 0.0 < learning_rate <= 1.0:
            raise ValueError(f"num_rounds={num_rounds}, num_leaves={num_leaves}, learning_rate={learning_rate}: not usable")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share} of rows and columns: above 0, at most 1")
        if share < 1.0:
            settings = {"feature_fraction": share, "bagging_fraction": share, "bagging_freq": 1, **settings}
        self._settings: dict[str, Any] = {
            "objective": objective, "num_leaves": num_leaves, "learning_rate": learning_rate, "min_data_in_leaf": 20,
            "num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 0, "verbose": -1, **settings,
        }  # fmt: skip
        self._num_rounds = num_rounds
        self._model: Any = None

    def fit(self, columns: Any, target: Floats) -> Booster:
        """Train on (N, F) columns, dense or scipy's CSR, and (N,) targets; a few rows give few trees, never an error."""
        import lightgbm

        data = lightgbm.Dataset(columns, target, params={"verbose": -1, "num_threads": 1})
        self._model = lightgbm.train(self._settings, data, self._num_rounds)
        return self

    def fit_in_folds(self, columns: Any, target: Floats, fold: NDArray[np.int64], patience: int) -> Floats:
        """Train as `fit` does, on as many rounds as predict left-out folds best; returns predictions (N,) of each row by trees
        that have not seen its fold (N,).

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

    def predict(self, columns: Any) -> Floats:
        """(N, F) -> (N,), or (N, classes); N may be 0."""
        if columns.shape[0] == 0:
            return np.zeros(0)
        return np.asarray(self._model.predict(columns, num_threads=1), dtype=np.float64)

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    @property
    def text(self) -> str:
        return str(self._model.model_to_string())

    @classmethod
    def from_text(cls, text: str) -> Booster:
        import lightgbm

        out = cls(1, 2, 1.0)
        out._model = lightgbm.Booster(model_str=text)
        return out
