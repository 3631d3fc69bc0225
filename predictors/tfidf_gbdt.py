"""TF-IDF GBDT: boosted trees straight on thousands of term columns. The plain recipe, and the strongest of the usual baselines.

TF-IDF of words and word pairs (4,000 terms), hand features and the conversation so far go into LightGBM, whose number of rounds
is the one that predicts left-out folds of the training rows best (early stopping, 600 at most). Departs from the recipe as it
is commonly run in the target, which is soft-log tokens with censored rows lifted (calibration.py), not a plain log, and in
keeping all training rows for the last fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .boosting import Booster
from .calibration import lift_censored, soft_log, soft_offset
from .context import COLUMNS, dense_columns
from .features import refuse_label_columns, refuse_other_features
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .ridge import ridge_out_of_fold
from .spread import Spread
from .tfidf import Tfidf

_LIFT = 3.0  # ridge penalty of the first look, which only says how far a censored row goes on


class TfidfGBDT(LengthPredictor):
    """LightGBM on TF-IDF terms, hand features and context: soft-log length, then calibrated residuals (spread.py).

    num_rounds: at most so many trees; patience: rounds without gain on left-out folds that end the search. One thread.
    """

    name = "tfidf_gbdt"
    needs_text = True

    def __init__(
        self,
        num_terms: int = 4000,
        num_rounds: int = 600,
        num_leaves: int = 31,
        learning_rate: float = 0.05,
        patience: int = 50,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if num_folds < 2 or patience < 1:
            raise ValueError(f"num_folds={num_folds} must be at least 2, patience={patience} at least 1")
        self.num_rounds, self.num_leaves, self.learning_rate = num_rounds, num_leaves, learning_rate
        self.num_terms, self.patience, self.num_folds = num_terms, patience, num_folds
        self.latency = latency
        self._new()  # refuses bad values here, not after minutes
        self._tfidf = Tfidf(num_terms)
        self._location: Booster | None = None
        self._spread: Spread | None = None

    @property
    def fitted(self) -> bool:
        return self._spread is not None

    def learn(self, rows: TrainingRows) -> None:
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        columns, terms = dense_columns(rows.prompts), self._tfidf.fit(rows.prompts.texts or ())
        observed = soft_log(rows.lengths, offset)
        refuse_label_columns(columns, COLUMNS, observed)
        y = lift_censored(ridge_out_of_fold(terms, observed, fold, _LIFT), observed, cut)
        self._location = self._new()
        location = self._location.fit_in_folds(_beside(columns, terms), y, fold, self.patience)
        self._spread = Spread.learned(np.column_stack([columns, location]), location, y, observed, cut, fold, offset)

    def _new(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._location is not None and self._spread is not None
        columns = dense_columns(prompts)
        location = self._location.predict_sparse(_beside(columns, self._tfidf.transform(prompts.texts or ())))
        return Predictions.from_survivals(self._spread.survival(np.column_stack([columns, location]), location))

    def state(self) -> State:
        self._need_fitted()
        assert self._location is not None and self._spread is not None
        arrays = {"idf": self._tfidf.idf, **self._spread.arrays()}
        texts = {"vocabulary": self._tfidf.vocabulary_text, "location": self._location.text, "scale": self._spread.text}
        return State({}, arrays, texts, COLUMNS)

    def restore(self, state: State) -> None:
        refuse_other_features(state.features, COLUMNS)
        self._tfidf = Tfidf.from_text(state.texts["vocabulary"], state.arrays["idf"])
        self._location = Booster.from_text(state.texts["location"])
        self._spread = Spread.restored(state.arrays, state.texts["scale"])


def _beside(columns: Floats, terms: Any) -> Any:
    """Dense columns (N, F) and sparse terms (N, T) as one CSR matrix; what is missing (NaN) stays so."""
    from scipy.sparse import csr_matrix, hstack

    return hstack([csr_matrix(columns), terms], format="csr")
