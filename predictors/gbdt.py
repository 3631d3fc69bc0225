"""GBDT: boosted trees on hand features, the conversation so far, and one column that a TF-IDF ridge predicts.

Trees over 20,000 sparse columns take minutes and gain nothing here: the linear part goes to the ridge, whose out-of-fold
prediction is one dense column (stacking; Wolpert, Neural Networks 1992), and the trees see a few dozen columns.
"""

from __future__ import annotations

from .boosting import Booster, seeing
from .calibration import out_of_fold_columns, soft_log, soft_offset
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .spread import Spread
from .stacked_columns import StackedColumns


class GBDT(LengthPredictor):
    """LightGBM on hand and context features and a TF-IDF ridge column: one head for the soft-log length, one for its residual's
    size.

    The distribution of a row is its location plus the calibrated residuals times its scale. Censored rows are lower bounds
    (calibration.py). One thread, deterministic. Rows without conversations leave the context missing. places: terms at the
    start and the end of a prompt count apart (tfidf.py). share: of the rows and of the columns, what each tree sees; a tree of
    half of them follows less of the noise (stochastic gradient boosting; Friedman 2002).
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
        places: bool = False,
        share: float = 1.0,
        latency: LatencyModel | None = None,
    ) -> None:
        if not 0.0 < strength < float("inf") or num_folds < 2:
            raise ValueError(f"strength={strength} must be finite and positive, num_folds={num_folds} at least 2")
        self.num_rounds, self.num_leaves, self.learning_rate, self.share = num_rounds, num_leaves, learning_rate, share
        self.num_terms, self.strength, self.num_folds, self.places = num_terms, strength, num_folds, places
        self.latency = latency
        self._head()  # refuses bad values here, not after minutes
        self._columns = StackedColumns(num_terms, strength, places)
        self._location: Booster | None = None
        self._spread: Spread | None = None

    @property
    def fitted(self) -> bool:
        return self._spread is not None

    def learn(self, rows: TrainingRows) -> None:
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        observed = soft_log(rows.lengths, offset)
        x, y = self._columns.fit(rows, observed, fold)
        location = out_of_fold_columns(fold, lambda train, test: self._head().fit(x[train], y[train]).predict(x[test]))
        self._location = self._head().fit(x, y)
        num_rounds = max(self.num_rounds // 2, 1)
        self._spread = Spread.learned(x, location, y, observed, cut, fold, offset, num_rounds, self.learning_rate)

    def _head(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate, **seeing(self.share))

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._location is not None and self._spread is not None
        x = self._columns.transform(prompts)
        return Predictions.from_survivals(self._spread.survival(x, self._location.predict(x)))

    def state(self) -> State:
        self._need_fitted()
        assert self._location is not None and self._spread is not None
        texts = {"location": self._location.text, "scale": self._spread.text}
        return self._columns.state(self._spread.arrays(), texts, {})

    def restore(self, state: State) -> None:
        self._columns.restore(state)
        self._location = Booster.from_text(state.texts["location"])
        self._spread = Spread.restored(state.arrays, state.texts["scale"])
