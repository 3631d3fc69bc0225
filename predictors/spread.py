"""Spread: what turns one predicted location a row into a distribution, where rows differ in how sure a prediction is.

Boosted trees predict the size of the location's error from dense columns; the errors divided by it, made on rows not trained
on, are the calibrated residuals (calibration.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .boosting import Booster
from .calibration import Residuals, out_of_fold_columns
from .folds import Ints

Floats = NDArray[np.float64]

_FLOOR = 0.05  # least scale of a residual, in soft-log tokens


class Spread:
    """Fitted by `learned`; `survival` gives P(L > e) for e of EDGES."""

    def __init__(self, scale: Booster, residuals: Residuals) -> None:
        self._scale, self._residuals = scale, residuals

    @classmethod
    def learned(
        cls,
        x: Floats,
        location: Floats,
        target: Floats,
        observed: Floats,
        censored: NDArray[np.bool_],
        fold: Ints,
        offset: float,
        num_rounds: int = 60,
        learning_rate: float = 0.05,
    ) -> Spread:
        """From columns x (N, F), out-of-fold locations (N,), targets (N,) (censored ones lifted) and observed soft-log lengths
        (N,), by the fold (N,) of each row; offset: of the soft-log."""
        size = np.abs(target - location)

        def new() -> Booster:
            return Booster(num_rounds, 8, learning_rate)

        scale = out_of_fold_columns(fold, lambda train, test: new().fit(x[train], size[train]).predict(x[test]))
        residuals = Residuals.fit(location, observed, censored, offset, np.maximum(scale, _FLOOR))
        return cls(new().fit(x, size), residuals)

    def survival(self, x: Floats, location: Floats) -> Floats:
        """Columns (N, F) and locations (N,) -> (N, len(EDGES))."""
        return self._residuals.survival(location, np.maximum(self._scale.predict(x), _FLOOR))

    @property
    def offset(self) -> float:
        return self._residuals.offset

    def arrays(self) -> dict[str, NDArray[Any]]:
        return self._residuals.arrays()

    @property
    def text(self) -> str:
        return self._scale.text

    @classmethod
    def restored(cls, arrays: Mapping[str, NDArray[Any]], text: str) -> Spread:
        return cls(Booster.from_text(text), Residuals.from_arrays(arrays))
