"""Composer: the config of a sweep's job, without composing it anew.

Jobs that differ only in plain values share one composition. A value that no interpolation of it reads is set on a plain copy;
those that some read are set first, and resolved once for each combination of them, as Hydra does for each job.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

Cfg = dict[str, Any]


def plain(config: DictConfig, choices: Mapping[str, Any]) -> Cfg:
    """The resolved config as a plain dict without Hydra's own node; `choices` says which node each group has.

    Raises omegaconf errors on missing values and broken interpolations.
    """
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]) if "hydra" in config else config
    return _dressed(_as_plain(own), choices)


def _as_plain(config: DictConfig) -> Cfg:
    cfg = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(cfg, dict)
    return {str(key): value for key, value in cfg.items()}


def _dressed(cfg: dict[Any, Any], choices: Mapping[str, Any]) -> Cfg:
    for key in ("load", "rate", "saturation"):  # one number, one hash: load=1 is load=1.0
        if isinstance(cfg.get(key), int) and not isinstance(cfg[key], bool):
            cfg[key] = float(cfg[key])
    cfg.setdefault("predictor", None)  # predictor=none is an empty node
    kept = {group: name for group, name in choices.items() if "hydra/" not in group and group not in ("study", "figure")}
    if "model" not in (cfg.get("executor") or {}):  # nobody is served: whatever model is named makes no difference
        kept.pop("model", None)
    cfg.pop("model", None)  # else it stands in the executor's node
    for group in ("population", "reshape", "refine"):  # where nothing is chosen nothing is said
        if kept.get(group) in (None, "none"):
            kept.pop(group, None)
            cfg.pop(group, None)
    cfg["choices"] = {k: v for k, v in sorted(kept.items()) if v is not None or k == "predictor"}
    return {str(key): value for key, value in cfg.items()}


class Composer:
    """Job overrides -> plain config. Composes once per set of group choices; plain values are set on a copy, as Hydra does."""

    def __init__(self, config: DictConfig, loader: ConfigLoader) -> None:
        self._config = config
        self._loader = copy.copy(loader)
        self._loader.repository = _ReadOnce(copy.deepcopy(loader.repository))  # type: ignore[attr-defined]
        self._parsed: dict[str, tuple[Override, bool]] = {}
        self._is_group: dict[str, bool] = {}
        self._composed: dict[tuple[str, ...], tuple[DictConfig, dict[str, Any], Cfg, list[str]]] = {}
        self._resolved: dict[tuple[str, ...], Cfg] = {}

    def __call__(self, job: Sequence[str]) -> Cfg:
        parsed = [self._parse(text) for text in job]
        rest = tuple(text for text, (_, is_value) in zip(job, parsed, strict=True) if not is_value)
        if rest not in self._composed:
            self._composed[rest] = self._compose(rest)
        base, choices, raw, read = self._composed[rest]
        early, late, texts = [], [], []
        for text, (override, is_value) in zip(job, parsed, strict=True):
            if is_value and _is_plain(raw, override, read):
                late.append(override)
            elif is_value:
                early.append(override)
                texts.append(text)
        key = (*rest, "", *texts)
        if key not in self._resolved:
            config = base.copy() if early else base
            for override in early:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
            self._resolved[key] = _as_plain(config)
        cfg = copy.deepcopy(self._resolved[key])
        for override in late:
            *parents, last = override.key_or_group.split(".")
            node = cfg
            for parent in parents:
                node = node[parent]
            node[last] = override.value()
        return _dressed(cfg, choices)

    def _compose(self, rest: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any], Cfg, list[str]]:
        """(config, choices, the config as plain values, interpolations as they are written, and those apart)."""
        composed = self._loader.load_sweep_config(self._config, list(rest))
        choices = OmegaConf.to_container(composed.hydra.runtime.choices)
        assert isinstance(choices, dict)
        with open_dict(composed):
            del composed["hydra"]
        raw = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(raw, dict)
        cfg = {str(key): value for key, value in raw.items()}
        return composed, {str(key): value for key, value in choices.items()}, cfg, _open(cfg)

    def _parse(self, text: str) -> tuple[Override, bool]:
        """The override, and whether it sets a plain value of a key (and so composes the same config otherwise)."""
        if text not in self._parsed:
            (override,) = OverridesParser.create(config_loader=self._loader).parse_overrides([text])
            key = override.key_or_group
            if key not in self._is_group:  # Hydra looks through every source for it
                self._is_group[key] = bool(self._loader.get_group_options(key))
            changes = not (override.is_add() or override.is_force_add() or override.is_delete() or override.package)
            number = isinstance(override.value(), (int, float, str, bool))
            self._parsed[text] = override, changes and number and not self._is_group[key]
        return self._parsed[text]


class _ReadOnce:
    """A repository of configs that keeps what it has read: else Hydra parses some thirty files for each set of choices."""

    def __init__(self, repository: Any) -> None:
        self._repository = repository
        self._read: dict[str, Any] = {}

    def load_config(self, config_path: str) -> Any:
        """The config there, a copy for the caller to change; None where there is none."""
        if self._read.get(config_path) is None:
            self._read[config_path] = self._repository.load_config(config_path)
        return copy.deepcopy(self._read[config_path])

    def __deepcopy__(self, memo: Any) -> _ReadOnce:
        return self  # Hydra copies its repository for each composition

    def __getattr__(self, name: str) -> Any:
        return getattr(self._repository, name)


def _is_plain(cfg: Cfg, override: Override, read: Sequence[str]) -> bool:
    """Whether `override` gives a plain value to a key of `cfg` that holds one, and that none of the interpolations names."""
    node: Any = cfg
    parts = override.key_or_group.split(".")
    for part in parts:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    if any(part in text for text in read for part in parts):
        return False
    value = override.value()
    plain_value = isinstance(value, (int, float, bool, str)) and not _open(value)
    return plain_value and not isinstance(node, (dict, list)) and not _open(node)


def _open(node: Any) -> list[str]:
    """The strings in it that do not speak for themselves: interpolations, missing values."""
    if isinstance(node, str):
        return [node] if "${" in node or node == "???" else []
    if isinstance(node, Mapping):
        node = list(node.values())
    return [text for value in node for text in _open(value)] if isinstance(node, list) else []
