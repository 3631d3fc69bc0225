"""`lengthwise probe`: the Hydra application around recording hidden states on a real engine and training a probe on them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lengthwise.predictors.artefact import data_hash
from lengthwise.predictors.near_duplicates import prompt_keys

from .composer import plain
from .hints import print_error, run_app
from .nodes import Config, load_dataset
from .paths import describe_error, root
from .probe_train import record, table, train, write_traces
from .profile_app import native_stage
from .simulate import compose

CONFIG = "probe"
TRACES = "traces.parquet"
PARTS = ("workload", "executor", "kv", "batching", "preemption", "limits")


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """Record, train, say how good it is. Leaves by SystemExit with the reason when there is no probe."""
    out = root("probes")
    try:
        cfg = plain(config, HydraConfig.get().runtime.choices)
        out = root(cfg["out"] or f"probes/{cfg['choices'].get('model')}-{cfg['choices']['workload']}")
        begin = time.monotonic()
        lines = probe(cfg, out, lambda text: print_error(f"{time.monotonic() - begin:7.0f} s  {text}"))
    except (ValueError, ImportError, FileNotFoundError, OmegaConfBaseException) as error:
        raise SystemExit(f"lengthwise probe: {error}") from error
    except OSError as error:
        raise SystemExit(f"lengthwise probe: {describe_error(error, out)}") from error
    print("\n".join(lines))


def probe(cfg: Config, out: Path, say: Any) -> list[str]:
    """Write the probe of `cfg` into the folder `out`; returns what is to be said of it."""
    native_stage(cfg)
    asked = compose(
        **{part: cfg[part] for part in PARTS}, rate=1e6, num_requests=cfg["num_requests"] or len(load_dataset(cfg)),
        seed=cfg["seed"], window={"warm_up": 0.0},
    )  # fmt: skip
    readings, run = record(asked, cfg["every"], cfg["layer"])
    say(f"{len(readings)} readings of {len(set(readings.row.tolist()))} answers, {readings.hidden.shape[1]} numbers each")
    provenance = run.summary["provenance"]
    dataset = load_dataset(asked)
    about = {"engine": provenance["engine"], "lengths": provenance["lengths"], "workload": dataset.name, "unit": dataset.unit}
    texts = dataset.asked(np.unique(readings.row)).texts
    seen = None if texts is None else np.unique(prompt_keys(texts))
    trained = train(
        readings, layer=cfg["layer"], every=cfg["every"], num_bins=cfg["bins"]["num"], most=cfg["bins"]["most"],
        width=cfg["width"], seed=cfg["seed"], about=about, seen=seen, say=say,
    )  # fmt: skip
    trained.probe.save(out)
    write_traces(readings, trained.expected, out / TRACES, data_hash(dataset.asked(), dataset.output_len))
    return [
        "of whole lengths, at readings whose prompt (or one much like it) no probe had seen:", *table(trained.scores),
        f"written: {out}", f"use it: executor=native refine=probe refine.path={out}, or in simulation refine=replay "
        f"refine.path={out / TRACES}",
    ]  # fmt: skip


def main() -> None:
    """Run the command on sys.argv."""
    run_app(app, CONFIG)
