"""Asked: what a cell asks, whoever serves it: requests drawn, predictions about them, and which of them count.

Everything that is costly and shared (saturation rate, learned predictions) is handed in by `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.predictions import Predictions

from .dataset import Dataset, Workload
from .draw import draw, stream
from .nodes import Config, is_learned, is_prepared, make, predictor_target
from .provenance import name
from .sessions import SessionSource
from .source import WorkloadSource
from .windows import Window, window


class Prepared(Protocol):
    """What `prepare` has made before the cells start."""

    def saturation_rate(self, cfg: Config) -> float: ...
    def predictions(self, cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]] | None: ...


class Asked(NamedTuple):
    """What a cell asks, before anybody serves it. num_requests: those that are measured; more may follow them. load: None
    where a rate is given. rate: requests/s, None where nobody knows it before. cap: s, where the run stops, if anywhere."""

    dataset: Dataset
    workload: Workload
    predicted: Predicted
    num_requests: int
    load: float | None
    rate: float | None
    window: Window
    cap: float | None

    def source(self, gate: bool) -> WorkloadSource | SessionSource:
        """The requests as events. gate: they wait for their predictions."""
        workload, predicted = self.workload, self.predicted
        if workload.is_open:
            return WorkloadSource(workload, predicted.columns, predicted.ready, gate=gate, measured=self.num_requests)
        return SessionSource(workload, predicted.columns, predicted.latency)

    def came(self, source: WorkloadSource | SessionSource, stopped: float | None) -> tuple[Workload, Predicted]:
        """Who came of them, and what was predicted for those. stopped: when the cap ended the run, s."""
        # those who came during a step that the cap ended were there too
        num_born = source.num_born if stopped is None else int(np.searchsorted(self.workload.arrival, stopped))
        if isinstance(source, SessionSource):
            return self.workload.first(num_born), replace(self.predicted, ready=source.ready)
        return self.workload.first(num_born), self.predicted.first(num_born)


def asked(cfg: Config, dataset: Dataset, prepared: Prepared) -> Asked:
    """The cell's requests, drawn from `dataset`, what is predicted for them, and which of them count."""
    rate = cfg["rate"]
    load = cfg["load"] if rate is None else None  # a stated rate goes before the load
    if load is not None:
        rate = load * saturation_rate(cfg, prepared)
    n, over = cfg["num_requests"], dict(cfg.get("window") or {})
    go_on, cap = over.pop("go_on", 0.0), over.pop("cap", None)
    extra = int(go_on * n) if load is not None and load < 1 else 0
    workload = draw(
        dataset, make(cfg["arrivals"]), n, rate, cfg["seed"], resample=cfg.get("resample", False), extra=extra,
        population=make(cfg.get("population")),
    )  # fmt: skip
    if rate is None:  # the arrivals keep their own times; None where nobody can know it before
        rate = workload.notes["arrivals"]["rate"]
    counted = _window(workload, n, load, rate, over)
    if cap is not None:
        counted = _capped(counted, cap, workload)
    return Asked(dataset, workload, predict(cfg, workload, prepared), n, load, rate, counted, cap)


def saturation_rate(cfg: Config, prepared: Prepared) -> float:
    """Requests/s that `load` is a share of: as stated, else as measured."""
    stated: float | None = cfg.get("saturation")
    return prepared.saturation_rate(cfg) if stated is None else stated


def _capped(counted: Window, cap: float, workload: Workload) -> Window:
    """The window of a run that stops at `cap` seconds. Raises ValueError where arrivals wait for answers."""
    if not workload.is_open:
        raise ValueError(f"window.cap={cap}: arrivals that wait for answers cannot be stopped at a time")
    return counted if counted.whole else replace(counted, end=min(counted.end, cap))


def _window(workload: Workload, n: int, load: float | None, rate: float | None, over: Mapping[str, Any]) -> Window:
    """What counts. Where requests wait for answers it is cut by when sessions start; a closed loop counts as a whole."""
    if workload.users is not None:
        return Window(whole=True)
    if workload.after is not None:
        starts = workload.arrival[workload.after < 0]
        return window(starts, load=load, rate=None if rate is None else rate * len(starts) / n, **over)
    counted = window(workload.arrival[:n], load=load, rate=rate, **over)
    if len(workload) > n:  # arrivals go on after the last one that counts
        counted = replace(counted, end=min(counted.end, float(workload.arrival[n])))
    return counted


# --- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Predictions for the N requests of a workload: columns, when each is there (s), the fold that made it, and how."""

    columns: Predictions | None = None
    ready: NDArray[np.float64] | None = None
    fold: NDArray[np.int64] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    latency: LatencyModel | None = None

    def first(self, n: int) -> Predicted:
        """Those of the first n requests."""
        return Predicted(
            None if self.columns is None else self.columns.take(np.arange(n)),
            None if self.ready is None else self.ready[:n],
            None if self.fold is None else self.fold[:n],
            self.info,
            self.latency,
        )


def predict(cfg: Config, workload: Workload, prepared: Prepared) -> Predicted:
    """What the cell's predictor says about `workload`. An oracle is handed the truth, and takes no time."""
    if predictor_target(cfg) is None:
        return Predicted()
    if not is_learned(cfg):
        columns = make(cfg["predictor"]).from_truth(workload.output_len, stream(cfg["seed"], "predictor"))
        return Predicted(columns, info={"oracle": True})
    if not is_prepared(cfg):
        return Predicted(info={"made": "in the server"})
    made = prepared.predictions(cfg)
    if made is None:
        raise ValueError(f"predictor {name(cfg, 'predictor')} has no prepared predictions")
    by_row, fold, info = made
    latency = LatencyModel.from_dict(info["latency"]) if info.get("latency") else None
    ready = latency.ready_times(workload.arrival) if latency is not None and workload.is_open else None
    return Predicted(by_row.take(workload.rows), ready, fold[workload.rows], info, latency)
