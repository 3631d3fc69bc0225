"""`lengthwise validate`: the Hydra application around comparing an engine with the simulation of its profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .cellhash import digest, identity
from .composer import plain
from .hints import print_error, run_app
from .jsonable import jsonable
from .nodes import Config, load_hardware
from .paths import root
from .profile_app import default_path
from .validate import validate
from .validate_engine import compare, lines, rows

CONFIG = "validate"
OWN = ("loads", "seeds")
REFUSALS = (ValueError, ImportError, FileNotFoundError, OmegaConfBaseException)


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One comparison; prints its table. Leaves by SystemExit with the reason when there is none."""
    choices = HydraConfig.get().runtime.choices
    try:
        if choices.get("hardware") == "profiled" and OmegaConf.is_missing(config.hardware, "path"):
            config.hardware.path = default_path(str(choices.get("model")))
        cfg = plain(config, choices)
        loads, seeds, cell = checked(cfg)
        answer = compare(cell, loads, seeds, print_error)
    except REFUSALS as error:
        raise SystemExit(f"lengthwise validate: {error}") from error
    print("\n".join(lines(answer)))
    label = f"{choices.get('model')}-{digest(identity(cfg))}"
    print(f"written: {write(root(cfg['out']) / cfg['name'] / label, answer)}")


def checked(cfg: Config) -> tuple[list[float], list[int], dict[str, Any]]:
    """(loads, seeds, the cell's config). Raises ValueError on what cannot be compared; a missing profile is refused here."""
    if given := [f"{key}={cfg[key]}" for key in ("load", "rate", "saturation") if cfg.get(key) is not None]:
        raise ValueError(f"{' '.join(given)}: give loads=[...], shares of the saturation rate")
    loads, seeds = cfg["loads"], cfg["seeds"]
    if not loads or not all(isinstance(x, int | float) and x > 0 for x in loads):
        raise ValueError(f"loads={loads!r} must be numbers > 0")
    if not seeds or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in seeds):
        raise ValueError(f"seeds={seeds!r} must be whole numbers >= 0")
    cell = {key: value for key, value in cfg.items() if key not in OWN}
    load_hardware(cell)
    validate({**cell, "rate": 1.0})
    return [float(x) for x in loads], list(seeds), cell


def write(folder: Path, answer: dict[str, Any]) -> Path:
    """validation.json and validation.csv into `folder`, made if absent; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(jsonable(answer), sort_keys=True, indent=2, allow_nan=False)
    (folder / "validation.json").write_text(text + "\n", encoding="utf-8")
    rows(answer).to_csv(folder / "validation.csv", index=False)
    return folder


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    run_app(app, CONFIG)
