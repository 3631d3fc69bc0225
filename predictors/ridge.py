"""Ridge: a linear map from TF-IDF to log output length. The text baseline that heavier predictors are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Residuals, lift_censored, out_of_fold_columns, soft_log, soft_offset
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .tfidf import Tfidf


def solve_ridge(rows: Any, target: Floats, strength: float) -> tuple[Floats, float]:
    """Weights (F,) and intercept of the ridge regression of target (N,) on sparse rows (N, F), by conjugate gradients.

    On one BLAS thread: a dot product over several differs in its last bits, trees grown on the result differ in more, and the
    same seed would give other predictions on a machine with another number of cores.
    """
    from sklearn.linear_model import Ridge as Solver
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):
        solver = Solver(alpha=strength, solver="sparse_cg", tol=1e-5).fit(rows, target)
    return np.asarray(solver.coef_, dtype=np.float64), float(solver.intercept_)


class Ridge(LengthPredictor):
    """TF-IDF of words and word pairs, ridge regression on log length, calibrated out-of-fold residuals.

    Censored rows are lower bounds (calibration.py). strength: the ridge penalty on rows of unit length.
    """

    name = "ridge"
    needs_text = True

    def __init__(
        self, num_terms: int = 20_000, strength: float = 3.0, num_folds: int = 5, latency: LatencyModel | None = None
    ) -> None:
        if not 0.0 < strength < float("inf") or num_folds < 2:
            raise ValueError(f"strength={strength} must be finite and positive, num_folds={num_folds} at least 2")
        self.num_terms, self.strength, self.num_folds = num_terms, strength, num_folds
        self.latency = latency
        self._tfidf = Tfidf(num_terms)
        self._weights: Floats = np.zeros(0)
        self._intercept = 0.0
        self._residuals: Residuals | None = None

    @property
    def fitted(self) -> bool:
        return self._residuals is not None

    def learn(self, rows: TrainingRows) -> None:
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        terms, observed = self._tfidf.fit(rows.prompts.texts or ()), soft_log(rows.lengths, offset)
        y = lift_censored(ridge_out_of_fold(terms, observed, fold, self.strength), observed, cut)
        location = ridge_out_of_fold(terms, y, fold, self.strength)
        self._weights, self._intercept = solve_ridge(terms, y, self.strength)
        self._residuals = Residuals.fit(location, observed, cut, offset)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._residuals is not None
        location = self._tfidf.transform(prompts.texts or ()) @ self._weights + self._intercept
        return Predictions.from_survivals(self._residuals.survival(location))

    def state(self) -> State:
        self._need_fitted()
        assert self._residuals is not None
        arrays = {"weights": self._weights, "idf": self._tfidf.idf, **self._residuals.arrays()}
        return State({"intercept": self._intercept}, arrays, {"vocabulary": self._tfidf.vocabulary_text})

    def restore(self, state: State) -> None:
        self._tfidf = Tfidf.from_text(state.texts["vocabulary"], state.arrays["idf"])
        self._weights, self._intercept = state.arrays["weights"], float(state.values["intercept"])
        self._residuals = Residuals.from_arrays(state.arrays)


def ridge_out_of_fold(rows: Any, target: Floats, fold: NDArray[np.int64], strength: float) -> Floats:
    """Ridge predictions (N,) of each row of (N, F) from the rows of the other folds."""

    def fit_predict(train: NDArray[np.int64], test: NDArray[np.int64]) -> Floats:
        weights, intercept = solve_ridge(rows[train], target[train], strength)
        return np.asarray(rows[test] @ weights + intercept, dtype=np.float64)

    return out_of_fold_columns(fold, fit_predict)
