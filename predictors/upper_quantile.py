"""Upper quantile: a length that few answers exceed, and the quantiles below it as a distribution.

JITServe (NSDI 2026) plans with the 0.95 quantile of a quantile regression forest over a text vector. Departures: boosted trees
with the pinball loss, one model a level, in place of the forest; hand features and a TF-IDF column in place of its vector; each
level is then shifted by what it missed out of fold, as conformalised quantile regression does (Romano et al., NeurIPS 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.sched.prediction import survival_from_quantiles

from .boosting import Booster
from .calibration import MIN_AT_RISK, kaplan_meier, out_of_fold_columns, soft_log, soft_offset
from .folds import Ints
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .stacked_columns import StackedColumns


class UpperQuantile(LengthPredictor):
    """level: the quantile that orders requests (`score`), in tokens. levels: the other heads of the distribution.

    Crossing quantiles are sorted. Censored rows are lifted before the heads learn (calibration.py); what a level misses is the
    Kaplan-Meier quantile of the observed errors. One thread, deterministic.
    """

    name = "upper_quantile"
    needs_text = True

    def __init__(
        self,
        level: float = 0.95,
        levels: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.9),
        num_rounds: int = 80,
        num_leaves: int = 15,
        learning_rate: float = 0.05,
        num_terms: int = 20_000,
        strength: float = 3.0,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        heads = sorted({level, *levels})
        if not (heads[0] > 0.0 and heads[-1] < 1.0 and len(heads) > 1) or num_folds < 2:
            raise ValueError(f"levels {heads} must be two or more within (0, 1), num_folds={num_folds} at least 2")
        Booster(num_rounds, num_leaves, learning_rate)  # refuses bad values here, not after minutes
        self.level, self.levels = level, list(levels)
        self.num_rounds, self.num_leaves, self.learning_rate = num_rounds, num_leaves, learning_rate
        self.num_terms, self.strength, self.num_folds = num_terms, strength, num_folds
        self.latency = latency
        self._all: list[float] = heads
        self._columns = StackedColumns(num_terms, strength)
        self._heads: list[Booster] = []
        self._shifts: Floats = np.zeros(len(heads))
        self._offset = 1.0

    @property
    def fitted(self) -> bool:
        return bool(self._heads)

    def learn(self, rows: TrainingRows) -> None:
        fold, self._offset = rows.folds(self.num_folds), soft_offset(rows.lengths)
        observed = soft_log(rows.lengths, self._offset)
        x, y = self._columns.fit(rows, observed, fold)
        self._shifts = np.array([missed(observed - self._outside(x, y, fold, q), rows, q) for q in self._all])
        self._heads = [self._head(q).fit(x, y) for q in self._all]

    def _outside(self, x: Floats, y: Floats, fold: Ints, q: float) -> Floats:
        """The quantile q (N,) of each row by a head that has not seen its fold."""
        return out_of_fold_columns(fold, lambda train, test: self._head(q).fit(x[train], y[train]).predict(x[test]))

    def _head(self, q: float) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate, "quantile", alpha=q)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        x = self._columns.transform(prompts)
        soft = np.sort(np.column_stack([head.predict(x) for head in self._heads]) + self._shifts, axis=1)
        tokens = np.maximum(np.exp(soft) - self._offset, 1.0)
        survival = survival_from_quantiles(np.array(self._all), tokens)
        return Predictions(tokens[:, self._all.index(self.level)], None, survival)

    def state(self) -> State:
        self._need_fitted()
        texts = {f"level_{i}": head.text for i, head in enumerate(self._heads)}
        return self._columns.state({"shifts": self._shifts}, texts, {"offset": self._offset, "heads": self._all})

    def restore(self, state: State) -> None:
        self._columns.restore(state)
        self._all, self._shifts = list(state.values["heads"]), state.arrays["shifts"]
        self._heads = [Booster.from_text(state.texts[f"level_{i}"]) for i in range(len(self._all))]
        self._offset = float(state.values["offset"])


def missed(errors: Floats, rows: TrainingRows, q: float) -> float:
    """What must be added to a predicted quantile so that a share q of the errors (N,) lies at or below it; censored ones are
    lower bounds. Where they hide the quantile, the greatest error that can be told."""
    values, survival = kaplan_meier(errors, rows.censored, MIN_AT_RISK)
    below = np.flatnonzero(survival <= 1.0 - q)
    return float(values[below[0]] if below.size else values[-1])
