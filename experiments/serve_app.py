"""`lengthwise serve`: the Hydra application that puts model, policy, predictor and limits behind an HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lengthwise.predictors.constant import Constant
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.sched import Event, EventKind, Request, Scheduler, recompute
from lengthwise.sched import serve as rehearse
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Paged
from lengthwise.sched.rehearsal import JumpingClock, Log, PlainExecutor, Script

from .composer import plain
from .hints import run_app
from .learned import ready
from .native_stage import NativeStage, facts
from .nodes import Config, load_policy, load_stage, make, new_kv, predictor_target

if TYPE_CHECKING:
    from lengthwise.engine.server.service import Service
    from lengthwise.engine.server.settings import Settings

CONFIG = "serve"
SCHEDULING = ("policy", "batching", "kv", "preemption", "limits")
BESIDE = {"admission": "none", "victim": "last", "system": "default"}  # and what is not worth a word at the start
STATED = 256.0  # tokens: an answer's length where nothing was learned; the same for all, so that no order follows from it


class Told(NamedTuple):
    """What predicts lengths: None where nobody does. fallback_len: tokens, where a prediction is none. words: for people."""

    predictor: LengthPredictor | None
    fallback_len: float | None
    words: str
    marks: list[str]


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """Serve until told to stop. Leaves by SystemExit with the reason when that cannot be."""
    try:
        serve(plain(config, HydraConfig.get().runtime.choices))
    except ImportError as error:
        raise SystemExit(f"lengthwise serve: {error} (pip install 'lengthwise[serve]')") from error
    except (ValueError, OmegaConfBaseException, OSError) as error:
        raise SystemExit(f"lengthwise serve: {error}") from error


def serve(cfg: Config) -> None:
    """Load, bind, print where, and answer until SIGTERM or SIGINT. Raises ValueError and OSError before anything is served."""
    from lengthwise.engine.server.run import bind, run, url_of

    settings: Settings = make(cfg["server"])
    with bind(settings) as sock:  # a port that is taken is told before a model is loaded
        service, about = compose_service(cfg, settings)
        line = start_line(url_of(sock), service.model.name, about, settings)
        asyncio.run(run(service, settings, sock, about, lambda: print(line, flush=True)))


def compose_service(cfg: Config, settings: Settings) -> tuple[Service, dict[str, Any]]:
    """The Service of `cfg`, and what is said of it. Raises ValueError for what cannot be served."""
    from lengthwise.engine.server.service import Service
    from lengthwise.engine.server.traces import Traces

    stage = served_stage(cfg)
    with ExitStack() as undo:  # a missing package is told before a model is loaded, and no thread outlives what fails after
        traces = None if settings.otlp_endpoint is None else Traces(settings.otlp_endpoint)
        if traces is not None:
            undo.callback(traces.close)
        policy, limits = load_policy(cfg), cfg["limits"]
        engine = stage.loaded()
        refine = make(cfg.get("refine"))
        if refine is not None and not refine.serves:
            raise ValueError(
                f"refine={cfg['choices'].get('refine')} knows what a workload's answers were; a server's are to come"
            )
        told = told_by(cfg, f"{engine.model.name} tokens")
        check_lengths(cfg, told)
        service = Service(
            engine, new_kv(cfg, stage.pool_tokens(cfg)), policy, make(cfg["batching"]), make(cfg["preemption"]),
            max_num_seqs=limits["max_num_seqs"], token_budget=limits["token_budget"], max_model_len=stage.max_model_len(cfg),
            admission=make(cfg.get("admission")), victim=make(cfg.get("victim")), predictor=told.predictor,
            prediction_deadline=settings.prediction_deadline, fallback_len=told.fallback_len, refine=refine,
            max_waiting=settings.max_waiting, starved_after=settings.starved_after, seed=stage.seed,
            replay=settings.replay, check=cfg["check"], traces=traces,
        )  # fmt: skip
        undo.pop_all()
    names = {group: cfg["choices"].get(group) for group in (*SCHEDULING, *BESIDE)}
    about = {"predictor": told.words, "marks": told.marks, "kv_pool_tokens": stage.pool_tokens(cfg), "engine": facts(engine)}
    return service, {**names, **about}


def served_stage(cfg: Config) -> NativeStage:
    """Raises ValueError where there is no real engine, or something is set that means nothing to a server."""
    stage = load_stage(cfg)
    if not isinstance(stage, NativeStage):
        raise ValueError("executor is no real engine: nothing there can be served (executor=native)")
    for key, given, only in (
        ("executor.sampling", stage.sampling, None), ("executor.times", stage.times, "measured"),
        ("limits.clip", cfg["limits"].get("clip", False), False),
    ):  # fmt: skip
        if given != only:
            raise ValueError(f"{key}={given!r} is for runs of a workload; a server takes what its clients ask")
    return stage


def told_by(cfg: Config, unit: str) -> Told:
    """What predicts lengths in `unit`. Raises ValueError for a predictor that has learned nothing, that knows the truth, or
    that counts in another unit, unless it may (predictor.transfer)."""
    target, name = predictor_target(cfg), cfg["choices"].get("predictor")
    if target is None:
        return Told(None, None, "none", [])
    if hasattr(target, "from_truth"):
        raise ValueError(f"predictor={name} knows how long answers will be, which nobody does here; clients say predicted_len")
    predictor = ready(cfg)
    if isinstance(predictor, Constant) and predictor.unit is None:  # of no artefact: a length that somebody states
        predictor = Constant(predictor.length or STATED, predictor.latency)
        return Told(predictor, predictor.length, f"{name} ({predictor.length:g} tokens)", [])
    mark = predictor.check_unit(unit)
    words = f"{name} ({predictor.name})" if name != predictor.name else predictor.name
    return Told(predictor, predictor.training_median or STATED, words, [] if mark is None else [mark])


def check_lengths(cfg: Config, told: Told) -> None:
    """Raises ValueError where the policy, the admission or the victim rule asks for lengths and the predictor says only an
    order, as a rehearsal shows, in which one request has to wait and memory runs out: in service that would end the step
    loop."""
    if told.predictor is None:
        return
    asked = [Request(i, 0.0, 4, 8, prompt="word " * (i + 1)) for i in range(3)]
    said = told.predictor.predict(asked)
    if not all(row.is_rank_only for row in said):
        return
    for request, row in zip(asked, said, strict=True):
        request.prediction = row
    clock = JumpingClock()
    script = Script([Event(0.0, EventKind.ARRIVAL, request) for request in asked])
    parts = {"policy": load_policy(cfg), **{group: make(cfg.get(group)) for group in ("admission", "victim")}}
    scheduler = Scheduler(
        *(parts["policy"], Chunked(), Paged(16, 1, 0.0), recompute()), max_num_seqs=2, token_budget=16, max_model_len=64,
        admission=parts["admission"], victim=parts["victim"],
    )  # fmt: skip
    try:
        rehearse(script, scheduler, PlainExecutor(clock, lambda *_: 1.0, [8] * 3), clock, Log())
    except ValueError as error:
        names = cfg["choices"]
        asks = " or ".join(
            f"{group}={names.get(group)}"
            for group, part in parts.items()
            if part is not None and not part.needs.isdisjoint(("prediction", "distribution"))
        )
        raise ValueError(
            f"{asks} asks for lengths, and predictor={names.get('predictor')} says only an order: {error}"
        ) from error


def start_line(url: str, model: str, about: Mapping[str, Any], settings: Settings) -> str:
    """One line that says what is served, where, and to whom."""
    from lengthwise.engine.server.security import open_routes

    open_paths = open_routes(settings)
    who = "no API key" if open_paths == ("*",) else f"open without the key: {' '.join(open_paths)}"
    marks = "".join(f"; {mark}" for mark in about["marks"])
    beside = "".join(f" {key}={about[key]}" for key, unsaid in BESIDE.items() if about.get(key) not in (None, unsaid))
    return f"serving {model} at {url} policy={about['policy']}{beside} predictor={about['predictor']}; {who}{marks}"


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    run_app(app, CONFIG)
