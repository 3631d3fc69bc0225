"""Stacked columns: hand and context features and one column that a TF-IDF ridge predicts, for heads that take no sparse text.

Stacking (Wolpert, Neural Networks 1992): in training the ridge's column is out of fold, so that the
heads meet it as wrong as it will be on new prompts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .calibration import lift_censored
from .context import COLUMNS, dense_columns
from .features import refuse_label_columns, refuse_other_features
from .folds import Ints
from .predictor import Floats, State, TrainingRows
from .prompts import Prompts
from .ridge import ridge_out_of_fold, solve_ridge
from .tfidf import Tfidf


class StackedColumns:
    """(N,) prompts -> (N, F) columns. num_terms, places and strength: of the TF-IDF and its ridge."""

    def __init__(self, num_terms: int, strength: float, places: bool = False) -> None:
        if not 0.0 < strength < float("inf"):
            raise ValueError(f"strength={strength} must be finite and positive")
        self._tfidf = Tfidf(num_terms, places)
        self._strength, self._places = strength, places
        self._weights: Floats = np.zeros(0)
        self._intercept = 0.0

    def fit(self, rows: TrainingRows, observed: Floats, fold: Ints) -> tuple[Floats, Floats]:
        """Learn from observed log-like lengths (N,); the columns (N, F) of the same rows, and the lengths with censored ones
        lifted to what they may have become. Raises ValueError when a column leaks the label."""
        texts = rows.prompts.texts or ()
        dense, terms = dense_columns(rows.prompts), self._tfidf.fit(texts)
        refuse_label_columns(dense, COLUMNS, observed)
        y = lift_censored(ridge_out_of_fold(terms, observed, fold, self._strength), observed, rows.censored)
        self._weights, self._intercept = solve_ridge(terms, y, self._strength)
        return np.column_stack([dense, ridge_out_of_fold(terms, y, fold, self._strength)]), y

    def transform(self, prompts: Prompts) -> Floats:
        """(N,) prompts with texts -> (N, F)."""
        linear = self._tfidf.transform(prompts.texts or ()) @ self._weights + self._intercept
        return np.column_stack([dense_columns(prompts), linear])

    def state(self, arrays: dict[str, Any], texts: dict[str, str], values: dict[str, Any]) -> State:
        """What is kept, joined with a predictor's own parts."""
        own = {"weights": self._weights, "idf": self._tfidf.idf}
        text = {"vocabulary": self._tfidf.vocabulary_text, **texts}
        return State({"intercept": self._intercept, **values}, {**own, **arrays}, text, COLUMNS)

    def restore(self, state: State) -> None:
        """The inverse of `state`. Raises ValueError when the features are another version's."""
        refuse_other_features(state.features, COLUMNS)
        self._tfidf = Tfidf.from_text(state.texts["vocabulary"], state.arrays["idf"], self._places)
        self._weights, self._intercept = state.arrays["weights"], float(state.values["intercept"])
