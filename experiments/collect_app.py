"""`lengthwise collect`: the Hydra application around having prompts answered, and keeping how long the answers were."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .answerers import NativeAnswerer, ServerAnswerer
from .collect import Answerer, collect, journal_of
from .collected import Collected
from .composer import plain
from .dataset import Dataset
from .hints import print_error, run_app
from .native_stage import NativeStage
from .nodes import Config, load_dataset, load_stage, make
from .paths import describe_error, root

CONFIG = "collect"


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One collection; prints what there is. Leaves by SystemExit with the reason when it is not complete."""
    hydra_config = HydraConfig.get()
    overrides = [text for text in hydra_config.overrides.task if not text.startswith("out=")]
    out = root("collected")
    try:
        cfg = plain(config, hydra_config.runtime.choices)
        dataset = load_dataset({"workload": cfg["workload"]})
        answerer, who = answerer_of(cfg)
        ask = make(cfg["ask"])
        out = root(cfg["out"] or f"collected/{who}-{cfg['choices']['workload']}{ask.suffix}")
        begin = time.monotonic()
        lines = ask(
            answerer, dataset, out, cfg, " ".join(["lengthwise collect", *overrides]),
            lambda text: print_error(f"{time.monotonic() - begin:7.0f} s  {text}"),
        )  # fmt: skip
    except ImportError as error:
        extra = "native" if cfg["target"] is None else "serve"
        raise SystemExit(f"lengthwise collect: {error} (pip install 'lengthwise[{extra}]')") from error
    except (ValueError, FileNotFoundError, OmegaConfBaseException) as error:
        raise SystemExit(f"lengthwise collect: {error}") from error
    except OSError as error:
        raise SystemExit(f"lengthwise collect: {describe_error(error, out)}") from error
    except KeyboardInterrupt:
        place = next((path for path in (journal_of(out), out) if path.exists()), None)
        print_error(f"stopped{'' if place is None else f'; what came is in {place}, and the same command goes on from there'}")
        raise SystemExit(130) from None
    print("\n".join(lines))


class Answers:
    """What `ask=answer` does: the prompts themselves are asked (collect.py)."""

    suffix = ".parquet"

    def __call__(
        self, answerer: Answerer, dataset: Dataset, out: Path, cfg: Config, command: str, say: Callable[[str], None]
    ) -> list[str]:
        begin = time.monotonic()
        found = collect(
            answerer, dataset, out, samples=cfg["samples"], seed=cfg["seed"], max_new_tokens=cfg["max_new_tokens"],
            limit=cfg["limit"], texts=cfg["texts"], command=command, say=say,
        )  # fmt: skip
        return told(found, out, time.monotonic() - begin)


def answerer_of(cfg: Config) -> tuple[Answerer, str]:
    """Who answers, and a name for it that a file can bear: the server at `target`, else the engine of `executor`."""
    if cfg["target"] is not None:
        server = ServerAnswerer(make(cfg["endpoint"]), cfg["sampling"])
        return server, re.sub(r"[^A-Za-z0-9._-]", "_", server.model).lstrip(".")
    stage = load_stage(cfg)
    if not isinstance(stage, NativeStage):
        raise ValueError("executor is no real engine: nobody there answers (executor=native, or target=URL)")
    if stage.sampling is not None:
        raise ValueError("executor.sampling is for runs of a workload: here sampling= says how answers are drawn")
    return NativeAnswerer(cfg, stage, cfg["sampling"], cfg["seed"]), str(cfg["choices"].get("model"))


def told(found: Collected, out: Path, took: float) -> list[str]:
    """What there is, in words."""
    cut = 1 - found.stopped.mean()
    lines = [
        f"{len(found):,} prompts with {found.num_samples} answers each in {took:.0f} s; {found.lengths.mean():.1f} tokens on "
        f"average, {cut:.1%} cut off at {found.meta['max_new_tokens']}"
    ]
    lines += [f"left out: {reason} {n:,}" for reason, n in found.meta["dropped"].items()]
    return [*lines, f"written: {out}", f"use it: workload=collected workload.path={out}"]


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    run_app(app, CONFIG)
