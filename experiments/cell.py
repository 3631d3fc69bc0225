"""Cell: one system x policy x predictor x workload x load x seed, from a resolved config to a Run.

Everything a cell needs that is costly and shared (saturation rate, learned predictions) is handed in by `prepare`.
"""

from __future__ import annotations

import time
from typing import Any

from lengthwise.sched import SLO, Clock, Scheduler, serve
from lengthwise.sched.ports import Refiner

from .asked import Prepared, asked
from .corrected import corrected
from .nodes import Config, load_dataset, load_policy, load_scheduler, load_stage, make, new_kv
from .provenance import cell_names, load_marks, name, provenance, session_marks
from .recorder import Recorder
from .run import Run, build
from .stage import Asking
from .watched import Watched
from .windows import Capped, CapReached

REFINED = "those who decode are predicted anew from the true lengths"


def run_cell(cfg: Config, prepared: Prepared) -> Run:
    """Run one cell on the stage that its executor node names. A simulated one is deterministic in cfg and what `prepared`
    holds, measured CPU times standing apart as volatile; on a real engine only what is decided is, not what is timed.

    Raises ValueError on a config that cannot be run, before anything is.
    """
    stage, refine = load_stage(cfg), make(cfg.get("refine"))
    stage.check(cfg)
    if isinstance(stage, Asking):
        if refine is not None:
            raise ValueError(
                f"refine={name(cfg, 'refine')}: predictions are made anew between steps, which are not seen from here"
            )
        return stage.run(cfg, asked(cfg, load_dataset(cfg), prepared))
    policy, dataset = load_policy(cfg), load_dataset(cfg)
    pool = stage.pool_tokens(cfg)
    kv = new_kv(cfg, pool)
    dataset = stage.named(dataset, kv)
    if dataset.block_hashes is not None:
        kv.use_hashes(dataset.hash_tokens)
    requested = asked(cfg, dataset, prepared)
    workload, predicted, counted = requested.workload, requested.predicted, requested.window
    scheduler = load_scheduler(cfg, policy, kv, stage.max_model_len(cfg), 0 if refine is None else refine.every)
    needs = scheduler.needs & {"prediction", "distribution"}
    if needs and predicted.columns is None:
        parts = ", ".join(f"{group} {name(cfg, group)}" for group in ("policy", "admission", "victim") if cfg.get(group))
        raise ValueError(f"{parts} needs a {'/'.join(sorted(needs))}; predictor is none")
    refined = None if refine is None else refine.check(dataset.name, dataset.unit, dataset.asked(), dataset.output_len)
    if refine is not None and predicted.columns is not None and predicted.columns.is_rank_only:
        raise ValueError(f"refine={name(cfg, 'refine')} says lengths, and predictor {name(cfg, 'predictor')} only an order")
    refiner = None if refine is None else refine.refiner(workload.rows, workload.output_len, cfg["seed"])
    recorder = Recorder(window=(counted.begin, counted.end))
    source = requested.source(gate=bool(needs))
    clock, executor, forget = stage.begin(cfg, kv, workload)
    start = time.process_time()
    learning = corrected(source, scheduler, predicted.info)
    heard = None if learning is None else learning.heard
    watched = Watched(recorder, requested.num_requests, stage.look, forget, heard)
    stopped = _serve(learning or source, scheduler, executor, clock, watched, refiner, requested.cap)
    cpu = time.process_time() - start
    born, predicted = requested.came(source, stopped)
    info = {key: value for key, value in predicted.info.items() if key != "ms_per_request"}
    run = build(
        recorder,
        born,
        predictions=predicted.columns if learning is None else None,  # else as each request carried it
        eligible=predicted.ready if needs else None,
        fold=predicted.fold,
        fallback=None if predicted.columns is None else predicted.columns.fallback,
        slo=SLO(**cfg["slo"]),
        window=counted,
        run_end=stopped,
        cost=stage.cost(cfg),
        engine={**_thrashed(scheduler), **_swapped(scheduler, stage.kv_bytes(cfg))},
        token_budget=cfg["limits"]["token_budget"],
        cell={**cell_names(cfg, requested.load, requested.rate), **stage.names(cfg)},
        provenance={**provenance(cfg, dataset, workload, pool), **stage.provenance(cfg), "predictor": info},
        volatile={"predictor_ms_per_request": predicted.info.get("ms_per_request")},
    )
    run.summary["volatile"].update(stage.measured(executor, cpu, int(run.steps["num_steps"].sum())))
    run.workload = workload
    marks = [REFINED] if refine is not None and refine.reads_truth else []
    marks += [] if refined is None else [refined]
    marks += [*stage.marks(cfg, run), *load_marks(cfg), *session_marks(run, workload, requested.rate)]
    run.summary["provenance"]["marks"] = [*predicted.info.get("marks", []), *marks]
    return run


def _serve(
    source: Any,
    scheduler: Scheduler,
    executor: Any,
    clock: Clock,
    observer: Watched,
    refiner: Refiner | None,
    cap: float | None,
) -> float | None:
    """Run until empty: None; or until the first step boundary at or after `cap` (s), whoever is left unfinished: its time."""
    try:
        serve(source if cap is None else Capped(source, cap), scheduler, executor, clock, observer, refiner)
    except CapReached as stop:
        observer.recorder.cut_off(scheduler, stop.now)
        return stop.now
    return None


def _thrashed(scheduler: Scheduler) -> dict[str, float | int]:
    """How often preemptions undid each other, over the whole run; see metrics.py."""
    return {"num_thrashed": scheduler.num_thrashed, "futile_preemptions": scheduler.num_futile}


def _swapped(scheduler: Scheduler, kv_bytes: float) -> dict[str, float | int]:
    """What swapping came to over the whole run; empty where there is no tier to swap to. kv_bytes: of a token."""
    swapping = scheduler.swapping
    if not swapping.tiers.sizes:
        return {}
    moved = (swapping.blocks_out + swapping.blocks_in) * scheduler.kv.block_tokens * kv_bytes
    return {"num_swaps": swapping.num_outs, "swapped_bytes": moved, "num_swap_full": swapping.num_full}
