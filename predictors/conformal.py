"""Conformal: any predictor, with its distributions calibrated on training rows that it has not learned from.

Split-conformal (Vovk, Gammerman and Shafer, 2005; distributional: Chernozhukov et al., PNAS 2021): part of the training groups
is held out, and the depths of their true lengths (depths.py) make the distribution of every next one. So a predicted quantile
of level q is above the true length of a new row with a probability within 1 / (n + 1) of q, n rows held out, whatever the
inner predictor does, as long as rows are exchangeable; on average over rows, not for each kind of prompt; and but for what the
grid of lengths rounds. num_bands > 1 gives the same within each band of what the inner one predicts (Mondrian), from a
num_bands-th of the rows.

Censored rows are lower bounds, and then the guarantee is another one: exact only in the limit of many rows, and only if how
deep a row was cut off says nothing of how deep it would have gone; beyond the deepest uncensored rows the tail is declared, not
measured. Rows of one group are not independent: with large groups it holds for rows drawn at random, more loosely.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched.prediction import mean_lengths

from .depths import Depths, depths, depths_at
from .latency import LatencyModel
from .nested import Inner, built, described, packed, taught, unpacked
from .predictions import Predictions
from .predictor import MIN_ROWS, Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts


class Conformal(LengthPredictor):
    """`inner` fitted on 1 - share of the training groups, and a distribution of depths per band from the others.

    Points and ranks become distributions too: points by their errors, ranks by the lengths in their band, in their order. Fewer
    bands than num_bands where there are not MIN_ROWS uncensored rows for each.
    """

    name = "conformal"

    def __init__(self, inner: Inner, num_bands: int = 1, share: float = 0.25, latency: LatencyModel | None = None) -> None:
        if num_bands < 1 or not 0.0 < share <= 0.5:
            raise ValueError(f"num_bands={num_bands} must be at least 1, share={share} within (0, 0.5]")
        self.inner = built(inner)
        self.num_bands, self.share = num_bands, share
        self.latency = latency or self.inner.latency
        self.needs_text, self.per_row = self.inner.needs_text, self.inner.per_row  # type: ignore[misc]
        self._inner: LengthPredictor | None = None  # the fitted one
        self._scale = 1.0
        self._edges: Floats = np.zeros(0)  # of the bands, in the inner one's score
        self._bands: list[Depths] = []
        self._ranks: tuple[float, float] | None = None  # middle and spread of scores that are ranks

    @property
    def fitted(self) -> bool:
        return self._inner is not None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "inner": described(self.inner)}

    def learn(self, rows: TrainingRows) -> None:
        fold = rows.folds(round(1.0 / self.share))  # as near to the share as whole folds come
        held = np.flatnonzero(fold == 0)
        self._inner = taught(self.inner, rows, np.flatnonzero(fold != 0))
        self._scale = float(np.median(rows.lengths))
        said, cut = self._inner.predict_columns(rows.prompts.take(held)), rows.censored[held]
        is_rank = said.point is None and said.survival is None
        self._ranks = (float(np.median(said.score)), float(np.std(said.score)) or 1.0) if is_rank else None
        deep, lengths = depths(said, self._scale), rows.lengths[held]

        def fitted(at: NDArray[np.bool_]) -> Depths:
            values = depths_at(deep[at], lengths[at])
            found = Depths.fit(values, cut[at], of_survival=said.survival is not None)
            return found.mended(deep[at], lengths[at], cut[at])

        num_bands = max(1, min(self.num_bands, int(np.count_nonzero(~cut)) // MIN_ROWS))
        self._edges = np.unique(np.quantile(said.score, np.arange(1, num_bands) / num_bands))
        band, whole = self._band(said), np.ones(len(said), dtype=bool)
        self._bands = []
        for b in range(len(self._edges) + 1):
            at = band == b
            self._bands.append(fitted(at if np.count_nonzero(at & ~cut) >= MIN_ROWS // 2 else whole))

    def _band(self, said: Predictions) -> NDArray[np.int64]:
        return np.searchsorted(self._edges, said.score, side="right").astype(np.int64)

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._inner is not None
        said = self._inner.predict_columns(prompts)
        deep, band = depths(said, self._scale), self._band(said)
        survival = np.empty((len(said), deep.shape[1]))
        for b, known in enumerate(self._bands):
            at = band == b
            survival[at] = known.survival(deep[at])
        survival = np.minimum.accumulate(survival, axis=1)
        if self._ranks is None:
            return Predictions.from_survivals(survival)
        return Predictions(self._in_order(said.score, band), None, survival)

    def _in_order(self, rank: Floats, band: NDArray[np.int64]) -> Floats:
        """Scores (N,) in tokens that keep the order of ranks: the mean of the band, and within it less than a token more."""
        assert self._ranks is not None
        middle, spread = self._ranks
        one = depths(Predictions(np.zeros(1)), self._scale)
        means = np.array([mean_lengths(known.survival(one))[0] for known in self._bands])
        return np.maximum.accumulate(means)[band] + 0.5 + np.arctan((rank - middle) / spread) / np.pi

    def state(self) -> State:
        self._need_fitted()
        assert self._inner is not None
        out = packed(self._inner)
        out.values |= {"scale": self._scale, "slopes": [b.slope for b in self._bands], "ranks": self._ranks}
        out.arrays["edges"] = self._edges
        for i, known in enumerate(self._bands):
            out.arrays |= {f"knots_{i}": known.knots, f"levels_{i}": known.levels, f"mend_{i}": np.stack(known.mend)}
        return out

    def restore(self, state: State) -> None:
        self._inner = unpacked(self.inner, state)
        self._scale, ranks = float(state.values["scale"]), state.values["ranks"]
        self._ranks = None if ranks is None else (float(ranks[0]), float(ranks[1]))
        self._edges = state.arrays["edges"]
        parts = [
            [state.arrays[f"{name}_{i}"] for name in ("knots", "levels", "mend")] for i in range(len(state.values["slopes"]))
        ]
        self._bands = [
            Depths(knots, levels, float(slope), (mend[0], mend[1]))
            for (knots, levels, mend), slope in zip(parts, state.values["slopes"], strict=True)
        ]
