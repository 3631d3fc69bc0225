"""NoisyOracle: the truth with an error of a stated size, to draw latency against prediction error.

Row i's noise is the i-th draw of the generator it is given, whatever the lengths are: changing one request's truth leaves
every other one's noise as it was.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from .oracle import TO_SIGMA, true_lengths
from .predictions import Predictions
from .scores import kendall_tau

_CALIBRATION_ROWS = 20_000  # enough rows to find the noise of a stated tau to .005


class NoisyOracle:
    """The truth with one of three errors; without any argument, tau = 0.5.

    mae: Gaussian noise in tokens, sigma = mae x sqrt(pi / 2), clipped at 1 token (TRAIL, ICLR 2025): `mae` is that of the
    noise, and clipping makes the realised error smaller, much smaller where `mae` is above most lengths. tau: Gaussian noise
    on log length, sized by bisection so that Kendall's tau-b with the truth is `tau`, then shrunk to the mean log length as a
    calibrated predictor would: the order is untouched, and the size depends on all rows. exponential: Y ~ Exp(mean = truth)
    (Mitzenmacher, arXiv 1902.00732), not clipped.
    """

    name: ClassVar[str] = "noisy_oracle"
    latency = None

    def __init__(self, mae: float | None = None, tau: float | None = None, exponential: bool | None = None) -> None:
        stated = [n for n, v in (("mae", mae), ("tau", tau), ("exponential", exponential or None)) if v is not None]
        if len(stated) > 1:
            raise ValueError(f"noisy_oracle: state one error, not {' and '.join(stated)}")
        if mae is not None and not 0.0 <= mae < math.inf:
            raise ValueError(f"mae={mae}: a finite number of tokens >= 0 is needed")
        if tau is not None and not 0.0 < tau <= 1.0:
            raise ValueError(f"tau={tau}: it must be within (0, 1]")
        self.mae, self.exponential = mae, bool(exponential)
        self.tau = tau if stated else 0.5

    def from_truth(self, output_len: ArrayLike, rng: np.random.Generator) -> Predictions:
        """(N,) true lengths in tokens -> N point predictions."""
        truth = true_lengths(output_len)
        if self.exponential:
            return Predictions.from_points(truth * rng.standard_exponential(len(truth)))
        noise = rng.standard_normal(len(truth))
        if self.mae is not None:
            return Predictions.from_points(np.maximum(truth + self.mae * TO_SIGMA * noise, 1.0))
        assert self.tau is not None
        if self.tau == 1.0 or np.ptp(truth) == 0.0 if truth.size else True:
            return Predictions.from_points(truth)
        known = np.log(truth)
        size = _noise_for_tau(known[:_CALIBRATION_ROWS], noise[:_CALIBRATION_ROWS], self.tau)
        spread = float(np.var(known))
        centre, shrink = float(known.mean()), spread / (spread + size**2)
        return Predictions.from_points(np.exp(centre + shrink * (known + size * noise - centre)))


def _noise_for_tau(known: np.ndarray, noise: np.ndarray, tau: float) -> float:
    """The noise size at which tau-b(known, known + size x noise) is `tau`, by bisection; tau falls as the size grows."""
    low, high = 0.0, 1.0
    while high < 1e3 and (kendall_tau(known + high * noise, known) or 0.0) > tau:
        low, high = high, 2.0 * high
    for _ in range(40):
        mid = 0.5 * (low + high)
        if (kendall_tau(known + mid * noise, known) or 0.0) > tau:
            low = mid
        else:
            high = mid
    return 0.5 * (low + high)
