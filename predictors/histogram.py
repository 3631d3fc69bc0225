"""Histogram: which bucket an answer's length falls in, said as probabilities, which are a distribution.

Length prediction as classification is S3's (Jin et al., NeurIPS 2023) and SSJF's (Qiu et al., AIOps at ASPLOS 2024).
Departures: boosted trees with a softmax over hand features and a TF-IDF column in place of a fine-tuned encoder, buckets of
equal mass unless bounds are stated, all probabilities kept where they take the likeliest, and no long answer is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .boosting import Booster
from .buckets import DIRECTION, Buckets
from .calibration import soft_log, soft_offset
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .stacked_columns import StackedColumns


class Histogram(LengthPredictor):
    """num_buckets of equal mass, or `bounds`: upper ends in tokens of all buckets but the last.

    A censored row counts as a share of a row in its own bucket and in each above, as lengths beyond its bound are spread
    (Efron's redistribution to the right, 1967). One thread, deterministic.
    """

    name = "histogram"
    needs_text = True

    def __init__(
        self,
        num_buckets: int = 12,
        bounds: Sequence[float] | None = None,
        num_rounds: int = 60,
        num_leaves: int = 8,
        learning_rate: float = 0.05,
        num_terms: int = 20_000,
        strength: float = 3.0,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if num_buckets < 2 or num_folds < 2:
            raise ValueError(f"num_buckets={num_buckets}, num_folds={num_folds}: at least 2 of each")
        Booster(num_rounds, num_leaves, learning_rate)  # refuses bad values here, not after minutes
        self.num_buckets, self.bounds = num_buckets, None if bounds is None else list(bounds)
        self.num_rounds, self.num_leaves, self.learning_rate = num_rounds, num_leaves, learning_rate
        self.num_terms, self.strength, self.num_folds = num_terms, strength, num_folds
        self.latency = latency
        self._columns = StackedColumns(num_terms, strength)
        self._heads: Booster | None = None
        self._buckets: Buckets | None = None

    @property
    def fitted(self) -> bool:
        return self._buckets is not None

    def learn(self, rows: TrainingRows) -> None:
        levels = None if self.bounds is not None else [i / self.num_buckets for i in range(1, self.num_buckets)]
        buckets = Buckets.fit(rows.lengths, rows.censored, levels=levels, bounds=self.bounds)
        observed = soft_log(rows.lengths, soft_offset(rows.lengths))
        x, _ = self._columns.fit(rows, observed, rows.folds(self.num_folds))
        row, target, weight = _redistributed(buckets, rows)
        heads = Booster(self.num_rounds, self.num_leaves, self.learning_rate, "multiclass", num_class=len(buckets))
        self._heads, self._buckets = heads.fit(x[row], target, weight), buckets

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._heads is not None and self._buckets is not None
        return Predictions.from_survivals(self._buckets.survival(self._heads.predict(self._columns.transform(prompts))))

    def state(self) -> State:
        self._need_fitted()
        assert self._heads is not None and self._buckets is not None
        return self._columns.state(self._buckets.arrays(), {"heads": self._heads.text}, {"direction": DIRECTION})

    def restore(self, state: State) -> None:
        self._columns.restore(state)
        self._heads, self._buckets = Booster.from_text(state.texts["heads"]), Buckets.from_arrays(state.arrays)


def _redistributed(buckets: Buckets, rows: TrainingRows) -> tuple[np.ndarray, Floats, Floats]:
    """(row, class, weight) of each example (M,): one for an exact row, one for each bucket that a censored row may end in."""
    exact = np.flatnonzero(~rows.censored)
    at, target, weight = [exact], [buckets.classes(rows.lengths[exact])], [np.ones(len(exact))]
    for i in np.flatnonzero(rows.censored):
        shares = buckets.shares_above(float(rows.lengths[i]))
        there = np.flatnonzero(shares > 0.0)
        at.append(np.full(len(there), i))
        target.append(there)
        weight.append(shares[there])
    return np.concatenate(at), np.concatenate(target).astype(np.float64), np.concatenate(weight)
