"""Learned predictions for simulation: out-of-fold, so that no request is predicted by a model that has seen its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.predictions import Predictions
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.profiling import profile_latency
from lengthwise.predictors.splits import out_of_fold

from .cell import Config, load_dataset, make
from .dataset import Dataset

NUM_FOLDS = 5
Made = tuple[Predictions, NDArray[np.int64], dict[str, Any]]


def predictions_key(cfg: Config) -> dict[str, Any]:
    """What out-of-fold predictions depend on: the predictor, the rows, the folds."""
    return {"predictor": _plain(cfg["predictor"]), "workload": _plain(cfg["workload"]), "num_folds": NUM_FOLDS}


def make_predictions(cfg: Config) -> Made:
    """(predictions of every dataset row, the fold each row was left out with, info) by NUM_FOLDS grouped folds.

    A predictor that says the same of every row is fitted once, on all rows, fold -1: it tells nothing of any row, while medians
    that differ by fold would rank requests by fold. A fitted one (an artefact) predicts as it is, fold -1; it must count lengths
    as the workload does, and must not have learned from the workload's prompts. The latency model is the predictor's own, or profiled here. Raises ValueError.
    """
    dataset = load_dataset(cfg)
    fitted: list[LengthPredictor] = []

    def new() -> LengthPredictor:
        predictor = make(cfg["predictor"])
        if not isinstance(predictor, LengthPredictor):
            raise ValueError(f"predictor gave a {type(predictor).__name__}, neither a LengthPredictor nor an oracle")
        fitted.append(predictor)
        return predictor

    if new().fitted:
        predictions, fold = _as_it_is(fitted[0], dataset)
    elif not fitted[0].per_row:
        cut = np.zeros(len(dataset), dtype=bool) if dataset.censored is None else dataset.censored
        fitted[0].fit(dataset.prompts, dataset.prompt_len, dataset.output_len, cut)
        predictions = fitted[0].predict_columns(dataset.prompts, dataset.prompt_len)
        fold = np.full(len(dataset), -1, dtype=np.int64)
    else:
        predictions, fold = out_of_fold(
            new, dataset.prompts, dataset.prompt_len, dataset.output_len, dataset.censored, dataset.group, num_folds=NUM_FOLDS
        )
    predictor = fitted[-1]
    profile = profile_latency(predictor, dataset.prompts, dataset.prompt_len)
    latency = predictor.latency or profile.model
    info: dict[str, Any] = {
        "name": predictor.name,
        "unit": predictor.unit or dataset.unit,
        "num_folds": NUM_FOLDS if fold.max() >= 0 else 0,
        "latency": latency.as_dict(),
        "latency_source": "declared" if predictor.latency else "profiled on the machine that prepared the study",
        "ms_per_request": profile.single * 1e3,
        "marks": list(predictor.provenance.get("marks", [])),
    }
    return predictions, fold, info


def _as_it_is(predictor: LengthPredictor, dataset: Dataset) -> tuple[Predictions, NDArray[np.int64]]:
    predictor.check_unit(dataset.unit)
    seen = predictor.has_seen(dataset.prompts) if dataset.prompts is not None else np.zeros(len(dataset), dtype=bool)
    if seen.any():
        raise ValueError(
            f"the artefact has learned from {seen.sum()} of the {len(dataset)} prompts of {dataset.name}, so its predictions "
            f"would not be out of sample; give the predictor itself (predictor={predictor.name}), which is trained out of fold"
        )
    columns = predictor.predict_columns(dataset.prompts, dataset.prompt_len.astype(np.float64))
    return columns, np.full(len(dataset), -1, dtype=np.int64)


def _plain(node: Any) -> Any:
    return dict(node) if isinstance(node, Mapping) else node
