"""GBDT: boosted trees on hand features and one column that a TF-IDF ridge predicts, with calibrated residual quantiles.

Trees over 20,000 sparse columns take minutes and gain nothing here: the linear part goes to the ridge, whose out-of-fold
prediction is one dense column (stacking; Wolpert, Neural Networks 1992), and the trees see a few dozen columns.
"""

from __future__ import annotations

import numpy as np

from .boosting import Booster
from .calibration import Residuals, lift_censored, out_of_fold_columns, soft_log, soft_offset
from .features import FEATURES, hand_features, refuse_label_columns
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .ridge import ridge_out_of_fold, solve_ridge
from .tfidf import Tfidf

_FLOOR = 0.05  # least scale of a residual, in soft-log tokens


class GBDT(LengthPredictor):
    """LightGBM on hand features + a TF-IDF ridge column: one head for the soft-log length, one for its residual's size.

    The distribution of a row is its location plus the calibrated residuals times its scale. Censored rows are lower bounds
    (calibration.py). One thread, deterministic.
    """

    name = "gbdt"
    needs_text = True

    def __init__(
        self,
        num_rounds: int = 120,
        num_leaves: int = 31,
        learning_rate: float = 0.05,
        num_terms: int = 20_000,
        strength: float = 3.0,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if not 0.0 < strength < float("inf") or num_folds < 2:
            raise ValueError(f"strength={strength} must be finite and positive, num_folds={num_folds} at least 2")
        Booster(num_rounds, num_leaves, learning_rate)  # refuses bad values here, not after minutes
        self.num_rounds, self.num_leaves, self.learning_rate = num_rounds, num_leaves, learning_rate
        self.num_terms, self.strength, self.num_folds = num_terms, strength, num_folds
        self.latency = latency
        self._tfidf = Tfidf(num_terms)
        self._weights: Floats = np.zeros(0)
        self._intercept = 0.0
        self._location: Booster | None = None
        self._scale: Booster | None = None
        self._residuals: Residuals | None = None

    @property
    def fitted(self) -> bool:
        return self._residuals is not None

    def learn(self, rows: TrainingRows) -> None:
        texts = rows.prompts.texts or ()
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        hand, terms = hand_features(texts, rows.prompts.prompt_len), self._tfidf.fit(texts)
        observed = soft_log(rows.lengths, offset)
        refuse_label_columns(hand, FEATURES, observed)
        y = lift_censored(ridge_out_of_fold(terms, observed, fold, self.strength), observed, cut)
        x = np.column_stack([hand, ridge_out_of_fold(terms, y, fold, self.strength)])
        self._weights, self._intercept = solve_ridge(terms, y, self.strength)

        location = out_of_fold_columns(fold, lambda train, test: self._head().fit(x[train], y[train]).predict(x[test]))
        size = np.abs(y - location)
        scale = out_of_fold_columns(fold, lambda train, test: self._size().fit(x[train], size[train]).predict(x[test]))
        self._location = self._head().fit(x, y)
        self._scale = self._size().fit(x, size)
        self._residuals = Residuals.fit(location, observed, cut, offset, np.maximum(scale, _FLOOR))

    def _head(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate)

    def _size(self) -> Booster:
        return Booster(max(self.num_rounds // 2, 1), 8, self.learning_rate)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._location is not None and self._scale is not None and self._residuals is not None
        texts = prompts.texts or ()
        linear = self._tfidf.transform(texts) @ self._weights + self._intercept
        x = np.column_stack([hand_features(texts, prompts.prompt_len), linear])
        scale = np.maximum(self._scale.predict(x), _FLOOR)
        return Predictions.from_survivals(self._residuals.survival(self._location.predict(x), scale))

    def state(self) -> State:
        self._need_fitted()
        assert self._location is not None and self._scale is not None and self._residuals is not None
        arrays = {"weights": self._weights, "idf": self._tfidf.idf, **self._residuals.arrays()}
        texts = {"vocabulary": self._tfidf.vocabulary_text, "location": self._location.text, "scale": self._scale.text}
        return State({"intercept": self._intercept}, arrays, texts, FEATURES)

    def restore(self, state: State) -> None:
        if tuple(state.features) != FEATURES:
            odd = sorted(set(state.features) ^ set(FEATURES)) or ["their order"]
            raise ValueError(f"the artefact's features are not this version's: {', '.join(odd)}")
        self._tfidf = Tfidf.from_text(state.texts["vocabulary"], state.arrays["idf"])
        self._weights, self._intercept = state.arrays["weights"], float(state.values["intercept"])
        self._location, self._scale = Booster.from_text(state.texts["location"]), Booster.from_text(state.texts["scale"])
        self._residuals = Residuals.from_arrays(state.arrays)
