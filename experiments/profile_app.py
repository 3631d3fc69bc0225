"""`lengthwise profile`: the Hydra application around timing an engine's steps and fitting a cost model to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lengthwise.engine.simulated.hardware import Hardware
from lengthwise.engine.simulated.kernels import Batch
from lengthwise.engine.simulated.steps import Draw

from .hints import run_app
from .native_stage import NativeStage, facts
from .nodes import Config, load_stage, read_hardware
from .paths import root
from .profile import Timed, time_steps
from .profile_fit import Fitted, fit, hardware_text, table

CONFIG = "profile"
SPARE = 64  # tokens of the longest sequence that are left for the steps timed


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One profile; prints how well it fits. Leaves by SystemExit with the reason when there is none."""
    model = HydraConfig.get().runtime.choices.get("model")
    overrides = [text for text in HydraConfig.get().overrides.task if not text.startswith("out=")]
    try:
        whole = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        assert isinstance(whole, dict)
        cfg = {str(key): value for key, value in whole.items()}
        out = root(cfg["out"] or default_path(str(model)))
        command = " ".join(["lengthwise profile", *overrides])
        begin = time.perf_counter()
        timed, fitted = write_profile(native_stage(cfg), out, command=command, bar=sys.stderr.isatty(), **_settings(cfg))
    except (ValueError, ImportError, OmegaConfBaseException, OSError) as error:
        raise SystemExit(f"lengthwise profile: {error}") from error
    took = time.perf_counter() - begin
    print(f"{len(timed.batches)} states in {took:.0f} s; a step of one state spreads by {timed.spread:.1%} (p90 - p10)")
    print(f"relative error on {fitted.num_test} held-out states, mean / p95; bias {fitted.bias:+.1%}")
    print("\n".join(table(fitted)))
    print(
        f"host: {fitted.host.step * 1e6:.0f} us a step and {fitted.host.row * 1e6:.1f} us a row, {_share(timed):.1%} of a step"
    )
    print(f"written: {out}\nuse it: hardware=profiled hardware.path={cfg['out'] or default_path(str(model))}")


def default_path(model: str) -> str:
    """Where the profile of a model node lies when nothing else is said."""
    return f"profiles/{model}.yaml"


def native_stage(cfg: Config) -> NativeStage:
    """The stage of `cfg`. Raises ValueError when it is not a real engine."""
    stage = load_stage(cfg)
    if not isinstance(stage, NativeStage):
        raise ValueError("executor is no real engine: nothing there can be timed (executor=native)")
    return stage


def profile(model: Any = "smollm2", out: Path | str | None = None, *, executor: Any = "native", **settings: Any) -> Hardware:
    """Time the steps of `model` (as in `lengthwise.simulate`), write the hardware node to `out` and return it.

    settings: rows, context_per_row, context, prefill_tokens, chunks, states, passes, repeats, seed, block_size, form, as in
    conf/profile.yaml. Raises ValueError on a range that does not fit the model.
    """
    from .simulate import compose

    if out is None and not isinstance(model, str):
        raise ValueError("out=PATH says where the profile of a model that has no node goes")
    path = Path(default_path(model) if out is None else out)
    stage = native_stage(compose(executor=executor, model=model, rate=1.0))
    write_profile(stage, path, command="lengthwise.experiments.profile_app.profile(...)", **settings)
    return read_hardware(str(path))


def write_profile(
    stage: NativeStage,
    out: Path,
    *,
    rows: int = 64,
    context_per_row: int = 2048,
    context: int | None = None,
    prefill_tokens: int = 1024,
    chunks: int = 3,
    states: int = 150,
    passes: int = 2,
    repeats: int = 3,
    seed: int = 0,
    block_size: int = 16,
    form: str = "auto",
    command: str = "",
    bar: bool = False,
) -> tuple[Timed, Fitted]:
    """Profile the engine of `stage` and write the node to `out`, made with its folder. bar: show progress on a terminal."""
    for name, value, least in (
        ("range.rows", rows, 2), ("range.context_per_row", context_per_row, 64), ("range.prefill_tokens", prefill_tokens, 32),
        ("range.chunks", chunks, 1), ("passes", passes, 1), ("repeats", repeats, 1),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name}={value}, the least is {least}")
    engine = stage.loaded()
    longest = engine.model.max_positions - SPARE
    # a row of the widest spread attends one and a half of the mean, so that the mean has to stay below
    per_row = min(context_per_row, longest * 2 // 3)
    total = rows * per_row // 2 if context is None else context
    draw = Draw(states, seed, rows, total, per_row, min(prefill_tokens, longest), chunks)
    draw = replace(draw, context=min(total, engine.pool_tokens() // 2))
    timed = time_steps(engine, draw, passes=passes, repeats=repeats, block_size=block_size, track=_track if bar else None)
    fitted = fit(timed, draw, form)
    known = {
        **facts(engine), "pool_tokens": engine.pool_tokens(), "kv_bytes_per_token": engine.kv_bytes_per_token,
        "weight_bytes": engine.model.weight_bytes,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(hardware_text(out.stem, known, timed, fitted, draw, command), encoding="utf-8")
    return timed, fitted


def _settings(cfg: Config) -> dict[str, Any]:
    own = ("states", "passes", "repeats", "seed", "block_size", "form")
    return {**cfg["range"], **{key: cfg[key] for key in own}}


def _share(timed: Timed) -> float:
    return float((timed.host / timed.total).mean())


def _track(batches: Sequence[Batch]) -> Iterable[Batch]:
    from rich.console import Console
    from rich.progress import track

    return track(batches, description="timing states", console=Console(stderr=True))


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    run_app(app, CONFIG)
