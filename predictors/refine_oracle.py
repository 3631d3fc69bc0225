"""RefineOracle: those who decode are told anew, every so many steps, what is truly still to come, with a stated error.

It is what a learned probe such as TRAIL's is measured against. A request's k-th error is the k-th draw of a generator of its
own, so that two runs that agree up to a step agree in what is told there, whatever the lengths are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.sched import LengthDistribution, Request
from lengthwise.sched.request import predicted

from .oracle import TO_SIGMA, true_lengths
from .prompts import Prompts


class RefineOracle:
    """every: decode steps from one telling to the next. mae: mean absolute error in tokens of what is to come, Gaussian, cut
    off at 1 token, which makes the realised one smaller (TRAIL, ICLR 2025; ORACLE_MAE in its released code). carried:
    what is to come is wrong by the factor that the request's first prediction was wrong by, whatever its error was."""

    reads_truth: ClassVar[bool] = True
    serves: ClassVar[bool] = False  # nobody knows there how long answers will be
    layer: ClassVar[int | None] = None  # of the model, whose hidden states it wants: none

    def __init__(self, every: int = 8, mae: float = 0.0, carried: bool = False) -> None:
        if every < 1:
            raise ValueError(f"every={every} decode steps: at least 1")
        if not 0.0 <= mae < math.inf:
            raise ValueError(f"mae={mae}: a finite number of tokens >= 0 is needed")
        self.every, self.mae, self.carried = every, mae, carried

    def check(self, name: str, unit: str, prompts: Prompts, output_len: ArrayLike) -> None:
        """Whether it can be used on this workload: the truth is there of any."""

    def refiner(self, rows: ArrayLike, output_len: ArrayLike, seed: int) -> Remaining:
        """The Refiner of one run, of requests 0 .. N - 1 with these dataset rows (N,) and true lengths (N,) in tokens."""
        return Remaining(true_lengths(output_len), self.mae * TO_SIGMA, seed, self.carried)


class Remaining:
    """The truth about what is to come, with Gaussian errors of size `sigma` tokens; carried: and with the factor of the first
    prediction, which a request has when it is asked about for the first time. See Refiner in sched/ports.py."""

    def __init__(self, truth: np.ndarray, sigma: float, seed: int, carried: bool = False) -> None:
        self._truth, self._sigma, self._seed, self._carried = truth, sigma, seed, carried
        self._errors: dict[int, np.random.Generator] = {}
        self._factors: dict[int, float] = {}  # rid -> first prediction / truth

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution]:
        out = []
        for request, done in zip(requests, generated, strict=True):
            left = max(self._truth[request.rid] - done, 1.0)
            if self._carried:
                left = max(left * self._factor(request), 1.0)
            if self._sigma:
                left = max(left + self._sigma * self._error(request.rid), 1.0)
            out.append(LengthDistribution.point(done + left))
        return out

    def _factor(self, request: Request) -> float:
        if request.rid not in self._factors:
            self._factors[request.rid] = predicted(request).mean() / self._truth[request.rid]
        return self._factors[request.rid]

    def _error(self, rid: int) -> float:
        if rid not in self._errors:
            self._errors[rid] = np.random.default_rng([self._seed, rid])
        return float(self._errors[rid].standard_normal())
