"""Profiling: what a prediction costs on this machine, as the LatencyModel that simulations charge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .latency import LatencyModel
from .predictions import Predictions
from .prompts import Prompts


class Predicts(Protocol):
    """A fitted predictor, or what guards one."""

    def predict_columns(self, prompts: Prompts) -> Predictions: ...


@dataclass(frozen=True)
class Profile:
    """Median seconds of one single prediction and of one batch with their tails (of few batches: the slowest), and the model
    drawn through the medians. Wall times: never the same twice, so they belong in a volatile section."""

    single: float
    single_p90: float
    single_p99: float
    batch: float
    batch_p99: float
    batch_size: int
    num_timed: int
    model: LatencyModel


def profile_latency(
    predictor: Predicts,
    prompts: Prompts,
    *,
    num_timed: int = 200,
    batch_size: int = 64,
    num_batches: int = 9,
    window: float = 0.0,
    timer: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time `predictor` on num_timed single rows and num_batches batches, spread over the N prompts.

    The model is the line through the two medians: per_batch + per_request x size. Raises ValueError without rows.
    """
    n = len(prompts)
    if n == 0:
        raise ValueError("no rows to time predictions on")
    size = min(batch_size, n)

    def once(rows: NDArray[np.int64]) -> float:
        some = prompts.take(rows)
        begin = timer()
        predictor.predict_columns(some)
        return timer() - begin

    spread = np.linspace(0, n - 1, num_timed).astype(np.int64)
    once(spread[:1])  # first use imports and warms up
    singles = np.array([once(spread[i : i + 1]) for i in range(num_timed)])
    starts = np.linspace(0, n - size, num_batches).astype(np.int64)
    batches = np.array([once(np.arange(start, start + size)) for start in starts])
    batch, single = float(np.median(batches)), float(np.median(singles))
    per_request = max((batch - single) / (size - 1), 0.0) if size > 1 else 0.0
    model = LatencyModel(max(single - per_request, 0.0), per_request, window, batch_size)
    p90, p99, batch_p99 = (float(np.quantile(x, q)) for x, q in ((singles, 0.9), (singles, 0.99), (batches, 0.99)))
    return Profile(single, p90, p99, batch, batch_p99, size, num_timed, model)
