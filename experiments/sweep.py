"""The cells of a sweep, known before the first one starts: so that they are checked, counted and prepared for.

Hydra composes each job where it runs. Here the same configs are composed once beforehand; jobs that differ only in plain
values share one composition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from .cellhash import digest, identity
from .validate import nearest, validate

Cfg = dict[str, Any]


def plain(config: DictConfig, choices: Mapping[str, Any]) -> Cfg:
    """The resolved config as a plain dict without Hydra's own node; `choices` says which node each group has.

    Raises omegaconf errors on missing values and broken interpolations.
    """
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]) if "hydra" in config else config
    cfg = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(cfg, dict)
    for key in ("load", "rate"):  # one number, one hash: load=1 is load=1.0
        if isinstance(cfg.get(key), int) and not isinstance(cfg[key], bool):
            cfg[key] = float(cfg[key])
    cfg.setdefault("predictor", None)  # predictor=none is an empty node
    kept = {group: name for group, name in choices.items() if "hydra/" not in group and group not in ("study", "figure")}
    cfg["choices"] = {k: v for k, v in sorted(kept.items()) if v is not None or k == "predictor"}
    return {str(key): value for key, value in cfg.items()}


def sweep_cells(config: DictConfig, overrides: Sequence[str], loader: ConfigLoader) -> list[tuple[list[str], Cfg]]:
    """(job overrides, config) of every cell in the product of `overrides`, excluded ones left out, in order.

    Raises ValueError on a cell that cannot be run or that comes twice, Hydra's errors on what cannot be composed.
    """
    compose = Composer(config, loader)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    cells: list[tuple[list[str], Cfg]] = []
    first: dict[str, Sequence[str]] = {}
    for job in BasicSweeper.split_arguments(parsed, None)[0]:
        cfg = compose(job)
        if excluded(cfg):
            continue
        validate(cfg)
        key = digest(identity(cfg))
        if key in first:
            raise ValueError(f"the same cell comes twice: [{' '.join(first[key])}] and [{' '.join(job)}]")
        first[key] = job
        cells.append((job, cfg))
    if not cells:
        raise ValueError("the sweep has no cell: `exclude` leaves out every combination")
    return cells


def excluded(cfg: Mapping[str, Any]) -> bool:
    """Whether an entry of `exclude` matches: a mapping of group or key to a value or to a list of values, all of which hold."""
    entries = cfg.get("exclude") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry for entry in entries):
        raise ValueError(f"exclude={entries!r} must be a list of mappings: [{{policy: fcfs, predictor: [gbdt, oracle]}}]")
    return any(all(_matches(_value(cfg, key), want) for key, want in entry.items()) for entry in entries)


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


class Composer:
    """Job overrides -> plain config. Composes once per set of group choices; plain values are set on a copy, as Hydra does."""

    def __init__(self, config: DictConfig, loader: ConfigLoader) -> None:
        self._config = config
        self._loader = loader
        self._parsed: dict[str, tuple[Override, bool]] = {}
        self._composed: dict[tuple[str, ...], tuple[DictConfig, dict[str, Any]]] = {}

    def __call__(self, job: Sequence[str]) -> Cfg:
        parsed = [self._parse(text) for text in job]
        rest = tuple(text for text, (_, is_value) in zip(job, parsed, strict=True) if not is_value)
        if rest not in self._composed:
            composed = self._loader.load_sweep_config(self._config, list(rest))
            choices = OmegaConf.to_container(composed.hydra.runtime.choices)
            assert isinstance(choices, dict)
            with open_dict(composed):
                del composed["hydra"]
            self._composed[rest] = composed, {str(key): value for key, value in choices.items()}
        base, choices = self._composed[rest]
        config = base.copy()
        for override, is_value in parsed:
            if is_value:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        return plain(config, choices)

    def _parse(self, text: str) -> tuple[Override, bool]:
        """The override, and whether it sets a plain value of a key (and so composes the same config otherwise)."""
        if text not in self._parsed:
            (override,) = OverridesParser.create(config_loader=self._loader).parse_overrides([text])
            changes = not (override.is_add() or override.is_force_add() or override.is_delete() or override.package)
            number = isinstance(override.value(), (int, float, str, bool))
            is_value = changes and number and not self._loader.get_group_options(override.key_or_group)
            self._parsed[text] = override, is_value
        return self._parsed[text]
