"""Cell: one system x policy x predictor x workload x load x seed, from a resolved config to a Run.

Everything a cell needs that is costly and shared (saturation rate, learned predictions) is handed in by `prepare`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.latency import LatencyModel
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO, Clock, Scheduler, serve

from .dataset import Workload
from .draw import draw, stream
from .nodes import (
    Config,
    is_learned,
    load_dataset,
    load_policy,
    load_scheduler,
    load_stage,
    make,
    new_kv,
    predictor_target,
)  # fmt: skip
from .provenance import cell_names, name, provenance, session_marks
from .recorder import Recorder
from .run import Run, build
from .sessions import SessionSource
from .source import WorkloadSource
from .watched import Watched
from .windows import Capped, CapReached, Window, window


class Prepared(Protocol):
    """What `prepare` has made before the cells start."""

    def saturation_rate(self, cfg: Config) -> float: ...
    def predictions(self, cfg: Config) -> tuple[Predictions, NDArray[np.int64], dict[str, Any]] | None: ...


def run_cell(cfg: Config, prepared: Prepared) -> Run:
    """Run one cell on the stage that its executor node names. A simulated one is deterministic in cfg and what `prepared`
    holds, measured CPU times standing apart as volatile; on a real engine only what is decided is, not what is timed.

    Raises ValueError on a config that cannot be run, before anything is.
    """
    stage, policy = load_stage(cfg), load_policy(cfg)
    stage.check(cfg)
    dataset = load_dataset(cfg)
    pool = stage.pool_tokens(cfg)
    kv = new_kv(cfg, pool)
    dataset = stage.named(dataset, kv)
    if dataset.block_hashes is not None:
        kv.use_hashes(dataset.hash_tokens)
    rate = cfg["rate"]
    load = cfg["load"] if rate is None else None  # a stated rate goes before the load
    if load is not None:
        rate = load * prepared.saturation_rate(cfg)
    n, over = cfg["num_requests"], dict(cfg.get("window") or {})
    go_on, cap = over.pop("go_on", 0.0), over.pop("cap", None)
    extra = int(go_on * n) if load is not None and load < 1 else 0
    workload = draw(
        dataset, make(cfg["arrivals"]), n, rate, cfg["seed"], resample=cfg.get("resample", False), extra=extra,
        population=make(cfg.get("population")),
    )  # fmt: skip
    if rate is None:  # the arrivals keep their own times; None where nobody can know it before
        rate = workload.notes["arrivals"]["rate"]
    predicted = predict(cfg, workload, prepared)
    needs = policy.needs & {"prediction", "distribution"}
    if needs and predicted.columns is None:
        raise ValueError(f"policy {name(cfg, 'policy')} needs a {'/'.join(sorted(needs))}; predictor is none")
    counted = _window(workload, n, load, rate, over)
    if cap is not None:
        counted = _capped(counted, cap, workload)
    recorder = Recorder(window=(counted.begin, counted.end))
    scheduler = load_scheduler(cfg, policy, kv, stage.max_model_len(cfg))
    source: WorkloadSource | SessionSource
    if workload.is_open:
        source = WorkloadSource(workload, predicted.columns, predicted.ready, gate=bool(needs), measured=n)
    else:
        source = SessionSource(workload, predicted.columns, predicted.latency)
    clock, executor, forget = stage.begin(cfg, kv, workload)
    start = time.process_time()
    stopped = _serve(source, scheduler, executor, clock, Watched(recorder, n, stage.look, forget), cap)
    cpu = time.process_time() - start
    # those who came during a step that the cap ended were there too
    num_born = source.num_born if stopped is None else int(np.searchsorted(workload.arrival, stopped))
    predicted = replace(predicted, ready=source.ready) if isinstance(source, SessionSource) else predicted.first(num_born)
    info = {key: value for key, value in predicted.info.items() if key != "ms_per_request"}
    run = build(
        recorder,
        workload.first(num_born),
        predictions=predicted.columns,
        eligible=predicted.ready if needs else None,
        fold=predicted.fold,
        fallback=None if predicted.columns is None else predicted.columns.fallback,
        slo=SLO(**cfg["slo"]),
        window=counted,
        run_end=stopped,
        cost=stage.cost(cfg),
        engine=_swapped(scheduler, stage.kv_bytes(cfg)),
        token_budget=cfg["limits"]["token_budget"],
        cell={**cell_names(cfg, load, rate), **stage.names(cfg)},
        provenance={**provenance(cfg, dataset, workload, pool), **stage.provenance(cfg), "predictor": info},
        volatile={"predictor_ms_per_request": predicted.info.get("ms_per_request")},
    )
    run.summary["volatile"].update(stage.measured(executor, cpu, int(run.steps["num_steps"].sum())))
    run.workload = workload
    marks = [*stage.marks(cfg, run), *session_marks(run, workload, rate)]
    run.summary["provenance"]["marks"] = [*predicted.info.get("marks", []), *marks]
    return run


def _capped(counted: Window, cap: float, workload: Workload) -> Window:
    """The window of a run that stops at `cap` seconds. Raises ValueError where arrivals wait for answers."""
    if not workload.is_open:
        raise ValueError(f"window.cap={cap}: arrivals that wait for answers cannot be stopped at a time")
    return counted if counted.whole else replace(counted, end=min(counted.end, cap))


def _serve(
    source: Any, scheduler: Scheduler, executor: Any, clock: Clock, observer: Watched, cap: float | None
) -> float | None:
    """Run until empty: None; or until the first step boundary at or after `cap` (s), whoever is left unfinished: its time."""
    try:
        serve(source if cap is None else Capped(source, cap), scheduler, executor, clock, observer)
    except CapReached as stop:
        observer.recorder.cut_off(scheduler, stop.now)
        return stop.now
    return None


def _swapped(scheduler: Scheduler, kv_bytes: float) -> dict[str, float | int]:
    """What swapping came to over the whole run; empty where there is no tier to swap to. kv_bytes: of a token."""
    swapping = scheduler.swapping
    if not swapping.tiers.sizes:
        return {}
    moved = (swapping.blocks_out + swapping.blocks_in) * scheduler.kv.block_tokens * kv_bytes
    return {"num_swaps": swapping.num_outs, "swapped_bytes": moved, "num_swap_full": swapping.num_full}


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
    made = prepared.predictions(cfg)
    if made is None:
        raise ValueError(f"predictor {name(cfg, 'predictor')} has no prepared predictions")
    by_row, fold, info = made
    latency = LatencyModel.from_dict(info["latency"]) if info.get("latency") else None
    ready = latency.ready_times(workload.arrival) if latency is not None and workload.is_open else None
    return Predicted(by_row.take(workload.rows), ready, fold[workload.rows], info, latency)
