"""Log-t: the logarithm of a length is a location plus a scale times Student's t, both predicted from the prompt.

TIE (ICML 2026, arXiv 2604.00499) fits (mu, sigma) with nu = 3.5 to 20 answers of each prompt and regresses both with a DeBERTa
encoder. Departures: one answer a prompt is enough here. The location is regressed on the log length, the scale on the log size
of out-of-fold errors (E log |t| is known), both by boosted trees on hand features and a TF-IDF column; two numbers then
correct them by maximum likelihood. As TIE's, the distribution is that of min(L, most): a log-t has no mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import EDGES

from .boosting import Booster
from .calibration import out_of_fold_columns
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .stacked_columns import StackedColumns

_FLOOR = 0.02  # least |error| and scale, in log tokens: an error of 0 says nothing of its scale's logarithm


class LogT(LengthPredictor):
    """nu: degrees of freedom. most: tokens that no answer exceeds; None: the longest training answer, or the end of the grid
    where that one was cut.

    Censored rows are lifted before the heads learn (calibration.py) and enter the likelihood by their survival.
    """

    name = "log_t"
    needs_text = True

    def __init__(
        self,
        nu: float = 3.5,
        most: int | None = None,
        num_rounds: int = 120,
        num_leaves: int = 31,
        learning_rate: float = 0.05,
        num_terms: int = 20_000,
        strength: float = 3.0,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if not 0.0 < nu < float("inf") or (most is not None and most < 1) or num_folds < 2:
            raise ValueError(f"nu={nu} must be finite and positive, most={most} at least 1, num_folds={num_folds} at least 2")
        Booster(num_rounds, num_leaves, learning_rate)  # refuses bad values here, not after minutes
        self.nu, self.most = nu, most
        self.num_rounds, self.num_leaves, self.learning_rate = num_rounds, num_leaves, learning_rate
        self.num_terms, self.strength, self.num_folds = num_terms, strength, num_folds
        self.latency = latency
        self._columns = StackedColumns(num_terms, strength)
        self._location: Booster | None = None
        self._scale: Booster | None = None
        self._shift, self._stretch, self._cap = 0.0, 1.0, 0.0

    @property
    def fitted(self) -> bool:
        return self._scale is not None

    def learn(self, rows: TrainingRows) -> None:
        fold, observed = rows.folds(self.num_folds), np.log(rows.lengths)
        x, y = self._columns.fit(rows, observed, fold)
        location = out_of_fold_columns(fold, lambda train, test: self._head().fit(x[train], y[train]).predict(x[test]))
        size = np.log(np.maximum(np.abs(y - location), _FLOOR)) - mean_log_abs_t(self.nu)
        scale = out_of_fold_columns(fold, lambda train, test: self._size().fit(x[train], size[train]).predict(x[test]))
        self._location, self._scale = self._head().fit(x, y), self._size().fit(x, size)
        self._shift, self._stretch = corrected(observed - location, np.exp(scale), rows.censored, self.nu)
        longest = float(rows.lengths.max())
        known = not np.any(rows.censored & (rows.lengths >= longest))
        self._cap = float(self.most) if self.most is not None else longest if known else float(EDGES[-1])

    def _head(self) -> Booster:
        return Booster(self.num_rounds, self.num_leaves, self.learning_rate)

    def _size(self) -> Booster:
        return Booster(max(self.num_rounds // 2, 1), 8, self.learning_rate)

    def heads(self, prompts: Prompts) -> tuple[Floats, Floats]:
        """(location, scale) of log length, (N,) each, in log tokens."""
        self._need_fitted(prompts)
        assert self._location is not None and self._scale is not None
        x = self._columns.transform(prompts)
        scale = np.maximum(np.exp(self._scale.predict(x)) * self._stretch, _FLOOR)
        return self._location.predict(x) + self._shift, scale

    def predict_columns(self, prompts: Prompts) -> Predictions:
        return Predictions.from_survivals(log_t_survival(*self.heads(prompts), self.nu, self._cap))

    def state(self) -> State:
        self._need_fitted()
        assert self._location is not None and self._scale is not None
        texts = {"location": self._location.text, "scale": self._scale.text}
        return self._columns.state({}, texts, {"shift": self._shift, "stretch": self._stretch, "cap": self._cap})

    def restore(self, state: State) -> None:
        self._columns.restore(state)
        self._location, self._scale = Booster.from_text(state.texts["location"]), Booster.from_text(state.texts["scale"])
        self._shift, self._stretch, self._cap = (float(state.values[key]) for key in ("shift", "stretch", "cap"))


def log_t_survival(location: Floats, scale: Floats, nu: float, most: float = float("inf")) -> Floats:
    """P(min(L, most) > e) for e of EDGES, log L = location + scale x t(nu); (N,), (N,) -> (N, len(EDGES))."""
    from scipy.special import stdtr

    z = (np.log(EDGES)[None, :] - location[:, None]) / scale[:, None]
    return np.where(most > EDGES, stdtr(nu, -z), 0.0)


def mean_log_abs_t(nu: float) -> float:
    """E log |t| of Student's t: t^2 is the ratio of a chi-square to another over nu."""
    from scipy.special import digamma

    return float(0.5 * (np.log(nu) + digamma(0.5) - digamma(nu / 2.0)))


def corrected(errors: Floats, scale: Floats, censored: NDArray[np.bool_], nu: float) -> tuple[float, float]:
    """The shift and the stretch of scale (N,) under which errors (N,) are likeliest as scaled t, censored ones as lower bounds.

    The stretch is kept within a factor of 8 of 1: a few rows must not make it nothing.
    """
    from scipy.optimize import minimize
    from scipy.special import stdtr
    from scipy.stats import t as student

    def loss(at: Floats) -> float:
        width = scale * np.exp(at[1])
        z = (errors - at[0]) / width
        known = student.logpdf(z, nu) - np.log(width)
        return -float(np.sum(np.where(censored, np.log(np.maximum(stdtr(nu, -z), 1e-300)), known)))

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-4}).x
    return float(best[0]), float(np.exp(np.clip(best[1], -np.log(8.0), np.log(8.0))))
