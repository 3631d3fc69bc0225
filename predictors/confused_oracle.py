"""ConfusedOracle: errs as a trained predictor did on rows that it had not learned from: by band of the true length.

What regresses to the mean errs upwards on short answers and downwards on long ones; no single noise does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from .oracle import true_lengths
from .predictions import Predictions
from .scores import ERROR_LEVELS

# Quantiles at ERROR_LEVELS of log(predicted / true), by the first length of the band: of what `gbdt` says of ShareGPT's first
# turns (split 0, lengths in GPT-4 tokens) when it has learned from the other four fifths.
_GBDT_ON_SHAREGPT = {
    1: (
        1.22, 1.49, 1.78, 1.91, 2.07, 2.18, 2.18, 2.27, 2.46, 2.58, 2.65,
        2.72, 3.11, 3.19, 3.29, 3.44, 3.52, 3.99, 4.50, 5.07, 5.65,
    ),
    16: (
        -0.48, -0.04, 0.36, 0.49, 0.66, 0.75, 0.94, 1.06, 1.18, 1.22, 1.29,
        1.44, 1.51, 1.61, 1.69, 1.79, 1.94, 2.07, 2.23, 2.40, 2.78,
    ),
    64: (
        -0.81, -0.52, -0.32, -0.19, -0.09, 0.01, 0.08, 0.14, 0.20, 0.25, 0.31,
        0.38, 0.45, 0.52, 0.58, 0.65, 0.73, 0.83, 0.96, 1.07, 1.30,
    ),
    256: (
        -1.23, -0.90, -0.75, -0.62, -0.56, -0.48, -0.42, -0.37, -0.31, -0.27, -0.24,
        -0.20, -0.16, -0.12, -0.08, -0.03, 0.04, 0.08, 0.13, 0.25, 0.43,
    ),
    512: (
        -1.79, -1.30, -1.10, -1.02, -0.91, -0.84, -0.80, -0.78, -0.72, -0.69, -0.64,
        -0.61, -0.58, -0.54, -0.53, -0.49, -0.45, -0.37, -0.32, -0.21, -0.00,
    ),
}  # fmt: skip
SHAREGPT: Mapping[str, Any] = {
    "levels": ERROR_LEVELS,
    "bands": [{"from": low, "log_ratio": known} for low, known in _GBDT_ON_SHAREGPT.items()],
}


class ConfusedOracle:
    """The truth times a factor drawn from the quantiles of log(predicted / true) in the band of the true length.

    path: a report.json of `lengthwise train`, whose `errors` are those of its test rows, or a file of such `errors` alone;
    None: of `gbdt` on ShareGPT (first turns, lengths in GPT-4 tokens). Row i's factor is made of the i-th draw of the
    generator. A band without errors takes those of the nearest one that has some.
    """

    name: ClassVar[str] = "confused_oracle"
    latency = None

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = path
        self._levels, self._starts, self._errors = _checked(SHAREGPT if path is None else _read(Path(path)), path)

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator) -> Predictions:
        """(N,) true lengths in tokens -> N point predictions."""
        truth = true_lengths(output_len)
        draw = rng.random(len(truth))
        band = np.maximum(np.searchsorted(self._starts, truth, side="right") - 1, 0)
        factor = np.ones(len(truth))
        for b, known in enumerate(self._errors):
            at = band == b
            factor[at] = np.exp(np.interp(draw[at], self._levels, known))
        return Predictions.from_points(truth * factor)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        page = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: give the report.json that `lengthwise train` printed") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    errors = page.get("errors", page) if isinstance(page, Mapping) else page
    if errors is None:
        raise ValueError(f"{path} is of a predictor that only ranks: it has no errors in length")
    return errors if isinstance(errors, Mapping) else {}


def _checked(errors: Mapping[str, Any], path: Path | str | None) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(levels (Q,), first length of each band (B,), quantiles of log(predicted / true) of each band (Q,))."""
    try:
        levels = np.array(errors["levels"], dtype=np.float64)
        bands = sorted(errors["bands"], key=lambda band: float(band["from"]))
        starts = np.array([band["from"] for band in bands], dtype=np.float64)
        known = [None if band["log_ratio"] is None else np.array(band["log_ratio"], dtype=np.float64) for band in bands]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} holds no `errors` with levels and bands (from, log_ratio)") from None
    there = [i for i, one in enumerate(known) if one is not None]
    if not (there and levels.size and np.all(np.diff(levels) > 0) and levels[0] >= 0.0 and levels[-1] <= 1.0):
        raise ValueError(f"{path}: errors need levels that rise within [0, 1] and a band that has some")
    out = []
    for i in range(len(known)):
        one = known[min(there, key=lambda j: (abs(j - i), j))]
        if one is None or one.shape != levels.shape or not np.all(np.isfinite(one)) or np.any(np.diff(one) < 0):
            raise ValueError(f"{path}: band {i} needs {len(levels)} finite quantiles in order")
        out.append(one)
    return levels, starts, out
