"""Embedding: boosted trees on hand features, the conversation so far, and one column that a ridge predicts from a sentence
vector; where asked for, a second one from TF-IDF terms.

The frozen encoder is all-MiniLM-L6-v2 (22 million weights; Sentence-BERT, EMNLP 2019), which costs 10 to 40 ms a prompt on one
core. Magnus (arXiv 2406.04785) feeds sentence vectors to a forest, compressed; here 384 numbers become one out-of-fold column
(stacking), since trees over all of them are slower and order no better. Words and vectors tell different things: with both
columns trees order better than with either, and than the mean of the two predictors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .boosting import Booster, seeing
from .calibration import lift_censored, out_of_fold_columns, soft_log, soft_offset
from .context import COLUMNS, dense_columns
from .features import refuse_label_columns, refuse_other_features
from .folds import Ints
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .ridge import ridge_out_of_fold, solve_ridge
from .sentence_encoder import encoder
from .spread import Spread
from .tfidf import Tfidf

_TERM_STRENGTH = 3.0  # ridge penalty on terms, as in gbdt.py


class Embedding(LengthPredictor):
    """LightGBM on hand and context features and the ridge column of a sentence vector; residuals as in spread.py.

    folder: an encoder's files, None for the package of the `embed` extra. strength: ridge penalty on vectors of length 1.
    num_terms: of a second ridge column, from TF-IDF terms by their place (tfidf.py), 0 for none. share: of the rows and the
    columns, what a tree sees. The vectors of a large batch are kept in the user's cache (vector_cache.py).
    """

    name = "embedding"
    needs_text = True

    def __init__(
        self,
        folder: str | None = None,
        strength: float = 1.0,
        num_terms: int = 0,
        num_rounds: int = 160,
        num_leaves: int = 15,
        learning_rate: float = 0.05,
        share: float = 0.5,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if not 0.0 < strength < float("inf") or num_folds < 2:
            raise ValueError(f"strength={strength} must be finite and positive, num_folds={num_folds} at least 2")
        if num_terms < 0:
            raise ValueError(f"num_terms={num_terms}: at least 0")
        self.folder, self.strength, self.num_terms, self.num_folds = folder, strength, num_terms, num_folds
        self.num_rounds, self.num_leaves, self.learning_rate, self.share = num_rounds, num_leaves, learning_rate, share
        self.latency = latency
        self._head()  # refuses bad values here, not after minutes
        self._encoder_digest = ""
        self._weights: Floats = np.zeros(0)
        self._intercept = 0.0
        self._terms = _Terms(num_terms) if num_terms else None
        self._location: Booster | None = None
        self._spread: Spread | None = None

    @property
    def fitted(self) -> bool:
        return self._spread is not None

    def learn(self, rows: TrainingRows) -> None:
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        columns, observed = dense_columns(rows.prompts), soft_log(rows.lengths, offset)
        refuse_label_columns(columns, COLUMNS, observed)
        vectors = self._vectors(rows.prompts)
        y = lift_censored(ridge_out_of_fold(vectors, observed, fold, self.strength), observed, cut)
        x = np.column_stack([columns, ridge_out_of_fold(vectors, y, fold, self.strength)])
        if self._terms is not None:
            x = np.column_stack([x, self._terms.fit(rows.prompts.texts or (), y, fold)])
        self._weights, self._intercept = solve_ridge(vectors, y, self.strength)
        location = out_of_fold_columns(fold, lambda train, test: self._head().fit(x[train], y[train]).predict(x[test]))
        self._location = self._head().fit(x, y)
        self._spread = Spread.learned(x, location, y, observed, cut, fold, offset)
        self._encoder_digest = encoder(self.folder).digest

    def _head(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate, **seeing(self.share))

    def _vectors(self, prompts: Prompts) -> Floats:
        """Sentence vectors (N, width). Raises ValueError without the encoder, or with another than it was fitted with."""
        made = encoder(self.folder)
        if self.fitted and made.digest != self._encoder_digest:
            raise ValueError(f"the encoder is not the one that predictor {self.name} was fitted with: its SHA-256 differs")
        return made.vectors(prompts.texts or ()).astype(np.float64)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._location is not None and self._spread is not None
        linear = np.sum(self._vectors(prompts) * self._weights, axis=1)  # not a product: rows must not depend on their batch
        x = np.column_stack([dense_columns(prompts), linear + self._intercept])
        if self._terms is not None:
            x = np.column_stack([x, self._terms.predict(prompts.texts or ())])
        return Predictions.from_survivals(self._spread.survival(x, self._location.predict(x)))

    def state(self) -> State:
        self._need_fitted()
        assert self._location is not None and self._spread is not None
        arrays = {"weights": self._weights, **self._spread.arrays()}
        texts = {"location": self._location.text, "scale": self._spread.text}
        values: dict[str, Any] = {"intercept": self._intercept, "encoder": self._encoder_digest}
        if self._terms is not None:
            arrays |= {"idf": self._terms.tfidf.idf, "term_weights": self._terms.weights}
            texts["vocabulary"], values["term_intercept"] = self._terms.tfidf.vocabulary_text, self._terms.intercept
        return State(values, arrays, texts, COLUMNS)

    def restore(self, state: State) -> None:
        refuse_other_features(state.features, COLUMNS)
        self._weights, self._intercept = state.arrays["weights"], float(state.values["intercept"])
        self._encoder_digest = str(state.values["encoder"])
        self._location = Booster.from_text(state.texts["location"])
        self._spread = Spread.restored(state.arrays, state.texts["scale"])
        if self._terms is not None:
            self._terms.tfidf = Tfidf.from_text(state.texts["vocabulary"], state.arrays["idf"], places=True)
            self._terms.weights, self._terms.intercept = state.arrays["term_weights"], float(state.values["term_intercept"])


class _Terms:
    """The ridge column of TF-IDF terms by their place."""

    def __init__(self, num_terms: int) -> None:
        self.tfidf = Tfidf(num_terms, places=True)
        self.weights: Floats = np.zeros(0)
        self.intercept = 0.0

    def fit(self, texts: Sequence[str], y: Floats, fold: Ints) -> Floats:
        """Learn from texts (N,) and soft-log lengths (N,); the column (N,) out of fold."""
        rows = self.tfidf.fit(texts)
        self.weights, self.intercept = solve_ridge(rows, y, _TERM_STRENGTH)
        return ridge_out_of_fold(rows, y, fold, _TERM_STRENGTH)

    def predict(self, texts: Sequence[str]) -> Floats:
        return np.asarray(self.tfidf.transform(texts) @ self.weights + self.intercept, dtype=np.float64)
