"""`lengthwise run`: the Hydra application around a cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .composer import plain
from .hints import run_app
from .job import run_job
from .manifest import Row
from .paths import root
from .validate import validate

CONFIG = "run"


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One cell. In a sweep it never raises: its row in the manifest says how it ended."""
    if (row := cell(config, "lengthwise run")) is not None:
        tell(row, root(config.out) / config.name / row["folder"])


def cell(config: DictConfig, command: str) -> Row | None:
    """Run the cell of `config`, composed by Hydra. Returns its row; None in a sweep, whose manifest has it. Leaves by
    SystemExit with the reason when there is no result."""
    job = HydraConfig.get()
    overrides = [str(override) for override in job.overrides.task]
    in_sweep = not OmegaConf.is_missing(job.job, "num")
    try:
        cfg = plain(config, job.runtime.choices)
        if not in_sweep:
            validate(cfg)
            if cfg["study"]["size"] != "standard":
                raise ValueError(f"study.size={cfg['study']['size']} is of a sweep or study; give num_requests for one cell")
    except (ValueError, OmegaConfBaseException) as error:
        raise SystemExit(f"{command}: {error}") from error
    row = run_job(cfg, overrides, in_sweep=in_sweep)
    if in_sweep:
        return None
    if row["status"] != "ok":
        kept = f" (traceback: {row['traceback']})" if row.get("traceback") else ""
        raise SystemExit(f"{command}: {row['error']}{kept}")
    return row


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    run_app(app, CONFIG)


def tell(row: Row, folder: Path) -> None:
    """Print what came of a cell, in short."""
    import json

    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    for key in ("ttft", "tpot", "e2e", "normalised_latency"):
        values = [f"{stat} {_number(metrics.get(f'{key}_{stat}'))}" for stat in ("mean", "p50", "p99")]
        print(f"{key:<19}{'  '.join(values)}")
    for key in ("goodput_rps", "attainment", "max_wait", "num_finished", "num_rejected", "num_unfinished"):
        print(f"{key:<19}{_number(metrics.get(key))}")
    print(f"{'found' if row['cached'] else 'written'}: {folder}")


def _number(value: Any) -> str:
    return "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
