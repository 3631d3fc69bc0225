"""Learned predictions for simulation: out-of-fold, so that no request is predicted by a model that has seen its group."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.constant import Constant
from lengthwise.predictors.fallback import KINDS, Fallback
from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.online import Online
from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.profiling import profile_latency
from lengthwise.predictors.splits import joint_groups, out_of_fold

from .dataset import Dataset
from .nodes import Config, load_dataset, make, rows_key

NUM_FOLDS = 5
Made = tuple[Predictions, NDArray[np.int64], dict[str, Any]]


def predictions_key(cfg: Config) -> dict[str, Any]:
    """What out-of-fold predictions depend on: the predictor, the rows, the folds."""
    return {"predictor": _plain(cfg["predictor"]), **rows_key(cfg), "num_folds": NUM_FOLDS}


def make_predictions(cfg: Config) -> Made:
    """(predictions of every dataset row, the fold each row was left out with, info) by NUM_FOLDS grouped folds.

    A predictor that says the same of every row is fitted once, on all rows, fold -1: it tells nothing of any row, while medians
    that differ by fold would rank requests by fold. A fitted one (an artefact) predicts as it is, fold -1; it must count
    lengths as the workload does, and must not have learned from the workload's prompts. The latency model is the predictor's
    own, or profiled here. A row whose prediction raises or is no length gets the training median: `predictions.fallback` says
    which rows, info["fallback"] how many by kind. Raises ValueError, also when that is every row.
    """
    dataset = load_dataset(cfg)
    dataset.refuse_unanswered()
    fitted: list[LengthPredictor] = []
    guards: list[Fallback] = []

    def new() -> LengthPredictor:
        node = cfg["predictor"]
        predictor = make(node) if isinstance(node, Mapping) else copy.deepcopy(node)  # the caller's object is left as it was
        if not isinstance(predictor, LengthPredictor):
            raise ValueError(f"predictor gave a {type(predictor).__name__}, neither a LengthPredictor nor an oracle")
        fitted.append(predictor)
        return predictor

    median = new().training_median or float(np.median(dataset.output_len))

    def guard(predictor: LengthPredictor) -> Fallback:
        guards.append(Fallback(predictor, median))
        return guards[-1]

    asked, fold = dataset.asked(), np.full(len(dataset), -1, dtype=np.int64)
    if fitted[0].fitted:
        refuse_foreign(fitted[0], dataset)
        predictions = guard(fitted[0]).predict_columns(asked)
    elif not fitted[0].per_row:
        fitted[0].fit(asked, dataset.output_len, dataset.cut)
        predictions = guard(fitted[0]).predict_columns(asked)
    else:
        predictions, fold = out_of_fold(
            new, asked, dataset.output_len, dataset.censored, joint_groups(dataset.group, dataset.prompts, len(dataset)),
            num_folds=NUM_FOLDS, guard=guard,
        )  # fmt: skip
    predictor = fitted[-1]
    counts = {kind: n for kind in KINDS if (n := sum(one.counts[kind] for one in guards))}
    _refuse_none(predictor, predictions, counts, guards)
    latency, per_request, source = _latency(predictor, dataset, median)
    marks = list(predictor.provenance.get("marks", []))
    if counts:
        marks.append(f"{sum(counts.values()) / len(dataset):.1%} of the rows have no usable prediction: the training median")
    info: dict[str, Any] = {
        "name": predictor.name,
        "unit": predictor.unit or dataset.unit,
        "num_folds": NUM_FOLDS if fold.max() >= 0 else 0,
        "latency": latency.as_dict(),
        "latency_source": source,
        "ms_per_request": per_request * 1e3,
        "fallback": counts,
        "fallback_len": median,
        "marks": marks,
    }
    if isinstance(predictor, Online):  # what a run learns by itself (corrected.py)
        info["correction"] = predictor.new_correction(median).settings()
    return predictions, fold, info


def ready(cfg: Config) -> LengthPredictor:
    """The predictor of `cfg` as a server takes it: fitted, or a constant, whose length can be stated. Raises ValueError for one
    that has learned nothing."""
    predictor = make(cfg["predictor"])
    if not isinstance(predictor, LengthPredictor) or not (predictor.fitted or isinstance(predictor, Constant)):
        name = (cfg.get("choices") or {}).get("predictor") or type(predictor).__name__
        raise ValueError(
            f"predictor={name} has learned nothing yet: `lengthwise train predictor={name}`, then predictor=artefact "
            "predictor.path=PATH"
        )
    return predictor


def refuse_foreign(predictor: LengthPredictor, dataset: Dataset) -> str | None:
    """Refuse a fitted predictor that counts lengths otherwise than the workload, or has learned from its prompts. Returns the
    mark of one that may count otherwise."""
    mark = None
    if predictor.training_median is not None or predictor.unit is not None:  # else a stated length: nothing was learned
        mark = predictor.check_unit(dataset.unit)
    seen = predictor.has_seen(dataset.prompts) if dataset.prompts is not None else np.zeros(len(dataset), dtype=bool)
    if seen.any():
        raise ValueError(
            f"the artefact has learned from {seen.sum()} of the {len(dataset)} prompts of {dataset.name}, so its predictions "
            f"would not be out of sample; give the predictor itself (predictor={predictor.name}), trained out of fold, or "
            "only what it has not seen (reshape=unseen reshape.artefact=PATH)"
        )
    return mark


def _refuse_none(
    predictor: LengthPredictor, predictions: Predictions, counts: Mapping[str, int], guards: Sequence[Fallback]
) -> None:
    """Refuse a predictor that failed on every row: what is left would be a constant under its name."""
    if predictions.fallback is None or not predictions.fallback.all():
        return
    kinds = ", ".join(f"{kind} {n}" for kind, n in counts.items())
    error = next((one.first_error for one in guards if one.first_error), None)
    raise ValueError(
        f"predictor {predictor.name} gave no usable prediction for any of {len(predictions)} rows ({kinds})"
        + (f"; the first error: {error}" if error else "")
    )


def _latency(predictor: LengthPredictor, dataset: Dataset, median: float) -> tuple[LatencyModel, float, str]:
    """(the model that is charged, seconds of one prediction alone, where they come from)."""
    if predictor.latency is not None:  # not timed again: a declared latency gives the same results anywhere
        return predictor.latency, float(predictor.latency.ready_times([0.0])[0]), "declared"
    profile = profile_latency(Fallback(predictor, median), dataset.asked())
    return profile.model, profile.single, "profiled on the machine that prepared the study"


def _plain(node: Any) -> Any:
    return dict(node) if isinstance(node, Mapping) else node
