"""History: what a client's earlier requests were answered with, and what this conversation has been; no text is read.

The quantiles of past answers are what admission by history samples from (Past-Future scheduler, ASPLOS 2025). Here each client
has its own, drawn towards all clients' by credibility (Buhlmann 1967): n answers of its own weigh n / (n + shrinkage). The
earlier answers of the conversation shift them likewise. Departs from a live history in that it is learned once, from training
rows, and does not move while serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Residuals, kaplan_meier, lift_censored, soft_log, soft_offset
from .features import refuse_label_columns
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts

_CREDIBILITY = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)  # earlier answers that weigh as much as none


class History(LengthPredictor):
    """Quantiles of the training answers by client, shifted by the earlier answers of the conversation, in soft-log tokens.

    shrinkage: answers of its own at which a client's quantiles weigh as much as everyone's; one with fewer than 2, or not
    in training, has everyone's. Censored rows are lower bounds (Kaplan-Meier).
    """

    name = "history"

    def __init__(self, shrinkage: float = 20.0, latency: LatencyModel | None = None) -> None:
        if not 0.0 < shrinkage < float("inf"):
            raise ValueError(f"shrinkage={shrinkage} must be finite and positive")
        self.shrinkage = shrinkage
        self.latency = latency
        self._all: Residuals | None = None  # of answers, the shift of their conversations taken off
        self._of: dict[str, tuple[int, Residuals]] = {}  # client -> number of its answers, and their distribution
        self._credibility, self._middle = 1.0, 0.0

    @property
    def fitted(self) -> bool:
        return self._all is not None

    def learn(self, rows: TrainingRows) -> None:
        offset, cut = soft_offset(rows.lengths), rows.censored
        observed = soft_log(rows.lengths, offset)
        client = rows.prompts.client
        self._middle = float(np.median(observed))
        before, number = _earlier(rows.prompts, offset)
        means = _means(client, observed)
        refuse_label_columns(np.column_stack([before, means]), ("earlier answers", "client"), observed)
        y = lift_censored(np.full(len(observed), self._middle), observed, cut)

        def error(credibility: float) -> float:
            return float(np.mean((y - self._middle - self._shift(before, number, credibility)) ** 2))

        self._credibility = min(_CREDIBILITY, key=error)
        left = observed - self._shift(before, number, self._credibility)
        self._all = Residuals.fit(np.zeros(len(left)), left, cut, offset)
        self._of = {}
        for name, at in _rows_of(client).items():
            values, survival = kaplan_meier(left[at], cut[at])
            if len(values) > 1:
                first = values[0] - (values[1] - values[0])
                knots, levels = np.concatenate(([first], values)), np.concatenate(([1.0], survival))
                self._of[name] = (len(at), Residuals(knots, levels, offset))

    def _shift(self, before: Floats, number: Floats, credibility: float) -> Floats:
        """What the conversation adds to soft-log lengths (N,): its mean above the middle, as far as `number` answers say it."""
        return np.where(number > 0, number / (number + credibility) * (before - self._middle), 0.0)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._all is not None
        shift = self._shift(*_earlier(prompts, self._all.offset), self._credibility)
        out = self._all.survival(shift)
        for name, at in _rows_of(prompts.client).items():
            if name in self._of:
                n, own = self._of[name]
                weight = n / (n + self.shrinkage)
                out[at] = weight * own.survival(shift[at]) + (1.0 - weight) * out[at]
        return Predictions.from_survivals(out)

    def state(self) -> State:
        self._need_fitted()
        assert self._all is not None
        own = [residuals for _, residuals in self._of.values()]
        values = {"clients": list(self._of), "credibility": self._credibility, "middle": self._middle}
        arrays: dict[str, NDArray[Any]] = {
            "num_answers": np.array([n for n, _ in self._of.values()], dtype=np.int64),
            "num_knots": np.array([r.knots.size for r in own], dtype=np.int64),
            "client_knots": np.concatenate([np.zeros(0), *(r.knots for r in own)]),
            "client_levels": np.concatenate([np.zeros(0), *(r.levels for r in own)]),
        }
        return State(values, {**arrays, **self._all.arrays()})

    def restore(self, state: State) -> None:
        self._credibility, self._middle = float(state.values["credibility"]), float(state.values["middle"])
        self._all = Residuals.from_arrays(state.arrays)
        ends = np.cumsum(state.arrays["num_knots"])[:-1]
        knots, levels = np.split(state.arrays["client_knots"], ends), np.split(state.arrays["client_levels"], ends)
        self._of = {
            name: (int(n), Residuals(x, s, self._all.offset))
            for name, n, x, s in zip(state.values["clients"], state.arrays["num_answers"], knots, levels, strict=False)
        }


def _earlier(prompts: Prompts, offset: float) -> tuple[Floats, Floats]:
    """Mean soft-log length of a row's earlier answers (N,), NaN where there is none, and their number (N,)."""
    rows: list[Sequence[int]] = [row or () for row in prompts.answers_before or [()] * len(prompts)]
    number = np.array([len(row) for row in rows], dtype=np.float64)
    return np.array([np.mean(soft_log(row, offset)) if len(row) else np.nan for row in rows]), number


def _rows_of(client: Sequence[str | None] | None) -> dict[str, NDArray[np.int64]]:
    """The rows of each named client, clients by first appearance."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(client or ()):
        if name is not None:
            found.setdefault(name, []).append(i)
    return {name: np.array(at, dtype=np.int64) for name, at in found.items()}


def _means(client: Sequence[str | None] | None, observed: Floats) -> Floats:
    """The mean of a client's answers (N,), NaN where there is one alone: equal to the label where the client is its name."""
    out = np.full(len(observed), np.nan)
    for at in _rows_of(client).values():
        if len(at) > 1:
            out[at] = observed[at].mean()
    return out
