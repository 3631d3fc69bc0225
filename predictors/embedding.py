"""Embedding: boosted trees on hand features, the conversation so far, and one column that a ridge predicts from a sentence
vector.

The frozen encoder is all-MiniLM-L6-v2 (22 million weights; Sentence-BERT, EMNLP 2019), which costs 10 to 40 ms a prompt on one
core. Magnus (arXiv 2406.04785) feeds sentence vectors to a forest, compressed; here 384 numbers become one out-of-fold column
(stacking), since trees over all of them are slower and order no better.
"""

from __future__ import annotations

import numpy as np

from .boosting import Booster
from .calibration import lift_censored, out_of_fold_columns, soft_log, soft_offset
from .context import COLUMNS, dense_columns
from .features import refuse_label_columns, refuse_other_features
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .ridge import ridge_out_of_fold, solve_ridge
from .sentence_encoder import encoder
from .spread import Spread


class Embedding(LengthPredictor):
    """LightGBM on hand and context features and the ridge column of a sentence vector; residuals as in spread.py.

    folder: an encoder's files, None for the package of the `embed` extra. strength: ridge penalty on vectors of length 1.
    The vectors of a large batch are kept in the user's cache (vector_cache.py).
    """

    name = "embedding"
    needs_text = True

    def __init__(
        self,
        folder: str | None = None,
        strength: float = 1.0,
        num_rounds: int = 120,
        num_leaves: int = 31,
        learning_rate: float = 0.05,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if not 0.0 < strength < float("inf") or num_folds < 2:
            raise ValueError(f"strength={strength} must be finite and positive, num_folds={num_folds} at least 2")
        self.folder, self.strength, self.num_folds = folder, strength, num_folds
        self.num_rounds, self.num_leaves, self.learning_rate = num_rounds, num_leaves, learning_rate
        self.latency = latency
        self._head()  # refuses bad values here, not after minutes
        self._encoder_digest = ""
        self._weights: Floats = np.zeros(0)
        self._intercept = 0.0
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
        self._weights, self._intercept = solve_ridge(vectors, y, self.strength)
        location = out_of_fold_columns(fold, lambda train, test: self._head().fit(x[train], y[train]).predict(x[test]))
        self._location = self._head().fit(x, y)
        self._spread = Spread.learned(x, location, y, observed, cut, fold, offset)
        self._encoder_digest = encoder(self.folder).digest

    def _head(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate)

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
        return Predictions.from_survivals(self._spread.survival(x, self._location.predict(x)))

    def state(self) -> State:
        self._need_fitted()
        assert self._location is not None and self._spread is not None
        arrays = {"weights": self._weights, **self._spread.arrays()}
        texts = {"location": self._location.text, "scale": self._spread.text}
        return State({"intercept": self._intercept, "encoder": self._encoder_digest}, arrays, texts, COLUMNS)

    def restore(self, state: State) -> None:
        refuse_other_features(state.features, COLUMNS)
        self._weights, self._intercept = state.arrays["weights"], float(state.values["intercept"])
        self._encoder_digest = str(state.values["encoder"])
        self._location = Booster.from_text(state.texts["location"])
        self._spread = Spread.restored(state.arrays, state.texts["scale"])
