"""The cells of a sweep, known before the first one starts: so that they are checked, counted and prepared for.

Hydra composes each job where it runs; here the same configs are had beforehand from a Composer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from .cellhash import digest, identity
from .composer import Cfg, Composer
from .nodes import predictor_target, reads
from .validate import nearest, validate, validate_numbers

NUMBERS = ("seed", "load", "rate", "num_requests")
UNREAD = "unread"  # an entry of `exclude`


def sweep_cells(config: DictConfig, overrides: Sequence[str], loader: ConfigLoader) -> list[tuple[list[str], Cfg]]:
    """(job overrides, config) of every cell in the product of `overrides`, excluded ones left out, in order.

    Raises ValueError on a cell that cannot be run or that comes twice, Hydra's errors on what cannot be composed.
    """
    compose = Composer(config, loader)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    cells: list[tuple[list[str], Cfg]] = []
    first: dict[str, Sequence[str]] = {}
    valid: set[str] = set()
    for job in BasicSweeper.split_arguments(parsed, None)[0]:
        cfg = compose(job)
        if excluded(cfg):
            continue
        nodes = digest({key: value for key, value in cfg.items() if key not in NUMBERS})
        if nodes in valid:  # building the same nodes again tells nothing
            validate_numbers(cfg)
        else:
            validate(cfg)
            valid.add(nodes)
        key = digest(identity(cfg))
        if key in first:
            raise ValueError(f"the same cell comes twice: [{' '.join(first[key])}] and [{' '.join(job)}]")
        first[key] = job
        cells.append((job, cfg))
    if not cells:
        raise ValueError("the sweep has no cell: `exclude` leaves out every combination")
    return cells


def excluded(cfg: Mapping[str, Any]) -> bool:
    """Whether an entry of `exclude` matches: a mapping of group or key to a value or to a list of values, all of which hold; or
    the word "unread": a predictor that nothing in the cell reads, or none where something reads one."""
    entries = cfg.get("exclude") or []
    if not isinstance(entries, list) or not all(entry == UNREAD or (isinstance(entry, dict) and entry) for entry in entries):
        raise ValueError(
            f"exclude={entries!r} must be a list of mappings, [{{policy: fcfs, predictor: [gbdt, oracle]}}], or of {UNREAD}"
        )
    named = [entry for entry in entries if entry != UNREAD]
    if any(all(_matches(_value(cfg, key), want) for key, want in entry.items()) for entry in named):
        return True
    return UNREAD in entries and bool(reads(cfg)) == (predictor_target(cfg) is None)


def _matches(value: Any, want: Any) -> bool:
    return value in want if isinstance(want, list) else value == want


def _value(cfg: Mapping[str, Any], key: str) -> Any:
    if key in cfg["choices"]:
        name = cfg["choices"][key]
        return "none" if name is None else name
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            if key == "setting":
                return "none"
            raise ValueError(f"exclude names {key!r}, which is no group and no key.{nearest(key, [*cfg['choices'], *cfg])}")
        node = node[part]
    return node
