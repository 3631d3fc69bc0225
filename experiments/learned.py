"""Learned predictions for simulation: out-of-fold, so that no request is predicted by a model that has seen its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.predictions import Predictions

from .cell import NUM_FOLDS, Config, load_dataset, make


def predictions_key(cfg: Config) -> dict[str, Any]:
    """What out-of-fold predictions depend on: the predictor, the rows, the folds."""
    return {"predictor": _plain(cfg["predictor"]), "workload": _plain(cfg["workload"]), "num_folds": NUM_FOLDS}


def make_predictions(cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]]:
    """(predictions of every dataset row, the fold each row was left out with, info) by NUM_FOLDS grouped folds."""
    raise NotImplementedError


def _plain(node: Any) -> Any:
    return dict(node) if isinstance(node, Mapping) else node
