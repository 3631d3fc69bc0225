"""`lengthwise run`: the Hydra application around a cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .job import run_job
from .manifest import Row
from .paths import root
from .sweep import plain
from .validate import nearest, validate

CONFIG = "run"


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One cell. In a sweep it never raises: its row in the manifest says how it ended."""
    job = HydraConfig.get()
    overrides = [str(override) for override in job.overrides.task]
    in_sweep = not OmegaConf.is_missing(job.job, "num")
    try:
        cfg = plain(config, job.runtime.choices)
        if not in_sweep:
            validate(cfg)
    except (ValueError, OmegaConfBaseException) as error:
        raise SystemExit(f"lengthwise run: {error}") from error
    row = run_job(cfg, overrides, in_sweep=in_sweep)
    if in_sweep:
        return
    if row["status"] != "ok":
        kept = f" (traceback: {row['traceback']})" if row.get("traceback") else ""
        raise SystemExit(f"lengthwise run: {row['error']}{kept}")
    _tell(cfg, row)


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    try:
        app()
    except SystemExit as end:
        if end.code == 1:  # Hydra has said why
            for line in hints(sys.argv[1:]):
                print(line, file=sys.stderr)
        raise


def hints(argv: Sequence[str]) -> list[str]:
    """A line for each override in `argv` whose key or choice is unknown and near to a known one."""
    from hydra import compose, initialize_config_module
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    args, _ = get_args_parser().parse_known_args(list(argv))
    GlobalHydra.instance().clear()
    lines = []
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        more = [f"hydra.searchpath=['file://{os.path.abspath(args.config_dir)}']"] if args.config_dir else []
        known = _keys(OmegaConf.to_container(compose(CONFIG, overrides=more)))
        loader = GlobalHydra.instance().config_loader()
        known += loader.list_groups("")
        for text in args.overrides:
            try:
                override = OverridesParser.create().parse_override(text)
            except HydraException:
                continue
            key, options = override.key_or_group, loader.get_group_options(override.key_or_group)
            if key not in known and not options and not key.startswith("hydra"):
                lines.append(f"{key}: no such key.{nearest(key, known)}")
            elif options:
                values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
                unknown = [str(value) for value in values if value not in (*options, None)]
                lines += [f"{key}={value}: no such choice.{nearest(value, options)}" for value in unknown]
    return lines


def _keys(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, Mapping):
        return []
    return [name for key, value in node.items() for name in (f"{prefix}{key}", *_keys(value, f"{prefix}{key}."))]


def _tell(cfg: Mapping[str, Any], row: Row) -> None:
    import json

    folder = root(cfg["out"]) / cfg["name"] / row["folder"]
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    for key in ("ttft", "tpot", "e2e", "normalised_latency"):
        values = [f"{stat} {_number(metrics.get(f'{key}_{stat}'))}" for stat in ("mean", "p50", "p99")]
        print(f"{key:<19}{'  '.join(values)}")
    for key in ("goodput_rps", "attainment", "max_wait", "num_finished", "num_rejected", "num_unfinished"):
        print(f"{key:<19}{_number(metrics.get(key))}")
    print(f"{'found' if row['cached'] else 'written'}: {folder}")


def _number(value: Any) -> str:
    return "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
