"""Ensemble: several predictors, weighted by how well each predicts rows it has not seen (stacking; Wolpert 1992).

Each member is fitted in grouped folds; its predictions of the rows left out are one column of soft-log lengths, the columns'
weights are a least-squares fit that is never negative (Breiman, Machine Learning 1996), and the errors of the weighted sum are
the calibrated residuals (spread.py). Members are then fitted on all rows. Fitting costs num_folds + 1 fits of each.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lengthwise.sched import EDGES

from .calibration import lift_censored, soft_log, soft_offset
from .features import refuse_label_columns
from .latency import LatencyModel
from .nested import taught
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .spread import Spread

Member = LengthPredictor | Mapping[str, Any]


class Ensemble(LengthPredictor):
    """A weighted sum of the members' soft-log lengths, with calibrated residuals.

    members: unfitted predictors, or their nodes (`_target_` and settings); they are never changed, fits are copies. A member
    that gives ranks alone counts by its rank's value.
    """

    name = "ensemble"

    def __init__(self, members: Sequence[Member], num_folds: int = 5, latency: LatencyModel | None = None) -> None:
        if not members or num_folds < 2:
            raise ValueError(f"{len(members)} members, at least 1 is needed; num_folds={num_folds}, at least 2")
        self.members = [_made(member) for member in members]
        self.num_folds = num_folds
        self.latency = latency
        self._fitted: list[LengthPredictor] = []
        self._weights: Floats = np.zeros(0)
        self._intercept = 0.0
        self._spread: Spread | None = None

    @property
    def needs_text(self) -> bool:  # type: ignore[override]
        return any(member.needs_text for member in self.members)

    @property
    def fitted(self) -> bool:
        return self._spread is not None

    def settings(self) -> dict[str, Any]:
        nodes = [
            {"_target_": f"{type(member).__module__}.{type(member).__qualname__}", **member.settings()}
            for member in self.members
        ]
        return {"members": nodes, "num_folds": self.num_folds}

    def learn(self, rows: TrainingRows) -> None:
        fold, offset, cut = rows.folds(self.num_folds), soft_offset(rows.lengths), rows.censored
        observed = soft_log(rows.lengths, offset)
        columns = np.empty((len(fold), len(self.members)))
        for k in range(int(fold.max()) + 1):
            left_out = np.flatnonzero(fold == k)
            for j, member in enumerate(self.members):
                some = taught(member, rows, np.flatnonzero(fold != k))
                columns[left_out, j] = _soft_lengths(some.predict_columns(rows.prompts.take(left_out)), offset)
        refuse_label_columns(columns, [f"{member.name} (a member)" for member in self.members], observed)
        y = lift_censored(np.median(columns, axis=1), observed, cut)
        self._weights, self._intercept = _stacked(columns, y)
        location = self._located(columns)
        self._fitted = [taught(member, rows, np.arange(len(fold))) for member in self.members]
        self._spread = Spread.learned(np.column_stack([columns, location]), location, y, observed, cut, fold, offset)

    def _located(self, columns: Floats) -> Floats:
        out = np.full(len(columns), self._intercept)
        for weight, column in zip(self._weights, columns.T, strict=True):  # not a product: rows must not depend on their batch
            out += weight * column
        return out

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._spread is not None
        offset = self._spread.offset
        columns = np.column_stack([_soft_lengths(member.predict_columns(prompts), offset) for member in self._fitted])
        location = self._located(columns)
        return Predictions.from_survivals(self._spread.survival(np.column_stack([columns, location]), location))

    def state(self) -> State:
        self._need_fitted()
        assert self._spread is not None
        parts = [member.state() for member in self._fitted]
        values = {
            "intercept": self._intercept,
            "members": [{"values": part.values, "features": list(part.features)} for part in parts],
        }
        arrays = {"weights": self._weights, **self._spread.arrays()}
        texts = {"scale": self._spread.text}
        for j, part in enumerate(parts):
            arrays |= {f"member{j}_{name}": array for name, array in part.arrays.items()}
            texts |= {f"member{j}_{name}": text for name, text in part.texts.items()}
        return State(values, arrays, texts, [f"member{j}_{member.name}" for j, member in enumerate(self._fitted)])

    def restore(self, state: State) -> None:
        self._weights, self._intercept = state.arrays["weights"], float(state.values["intercept"])
        self._spread = Spread.restored(state.arrays, state.texts["scale"])
        self._fitted = []
        for j, (member, stored) in enumerate(zip(self.members, state.values["members"], strict=True)):
            start = f"member{j}_"
            arrays, texts = (
                {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
                for parts in (state.arrays, state.texts)
            )
            some = copy.deepcopy(member)
            some.restore(State(stored["values"], arrays, texts, tuple(stored["features"])))  # type: ignore[arg-type]
            self._fitted.append(some)


def _made(member: Member) -> LengthPredictor:
    """The predictor itself, or the one that a node stands for. Raises ValueError for anything else, or one already fitted."""
    if isinstance(member, Mapping):
        settings = dict(member)
        module, _, name = str(settings.pop("_target_", "")).rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name) if module else None
        except (ImportError, AttributeError) as error:
            raise ValueError(f"a member's _target_ cannot be imported: {error}") from error
        if not (
            isinstance(found, type) and issubclass(found, LengthPredictor)
        ):  # before anything is made: nodes are in artefacts
            raise ValueError(f"a member's _target_ is {member.get('_target_')!r}, which is not a LengthPredictor")
        member = found(**settings)
    if not isinstance(member, LengthPredictor):
        raise ValueError(f"a member is a {type(member).__name__}, not a LengthPredictor")
    if member.fitted and member.training_median is not None:
        raise ValueError(f"member {member.name} is fitted already: members learn from the ensemble's rows, in folds")
    return member


def _soft_lengths(predictions: Predictions, offset: float) -> Floats:
    """The expected soft-log length (N,): of points and distributions; of ranks, the rank."""
    if predictions.survival is None:
        return soft_log(predictions.point, offset) if predictions.point is not None else predictions.score
    steps = np.diff(soft_log(np.concatenate(([0.0], EDGES)), offset))
    survival = np.concatenate((np.ones((len(predictions), 1)), np.asarray(predictions.survival, dtype=np.float64)), axis=1)
    areas = steps * (survival[:, 1:] + survival[:, :-1]) / 2.0
    return np.asarray(np.log(offset) + np.sum(areas, axis=1), dtype=np.float64)


def _stacked(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Weights (K,) >= 0 of columns (N, K), and the intercept, of the least squares fit to target (N,)."""
    from scipy.optimize import nnls
    from threadpoolctl import threadpool_limits

    middle = columns.mean(axis=0)
    with threadpool_limits(limits=1):
        weights, _ = nnls(columns - middle, target - target.mean())
    return weights, float(target.mean() - np.sum(weights * middle))
