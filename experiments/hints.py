"""Hints: after Hydra has refused a command line, the nearest name, or the extra that brings what is missing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .validate import nearest

EXTRAS = {"submitit_local": "hpc", "submitit_slurm": "hpc", "ray": "cluster", "ray_aws": "cluster"}  # launchers of plug-ins
OTHER_WORDS = {"repeat": "repeats are seeds, the same for every policy: seed=0,1,2", "repeats": "repeats are seeds: seed=0,1,2"}


def run_app(app: Callable[[], object], config: str) -> None:
    """Run the Hydra application `app` on sys.argv; after a refusal by Hydra add what `hints` finds."""
    try:
        app()
    except SystemExit as end:
        if end.code == 1:  # Hydra has said why
            for line in hints(sys.argv[1:], config):
                print_error(line)
        raise


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def hints(argv: Sequence[str], config: str) -> list[str]:
    """A line for each override in `argv` that the application of `config` does not know; near names, where there are any."""
    args, _ = get_args_parser().parse_known_args(list(argv))
    GlobalHydra.instance().clear()
    lines = []
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        more = [f"hydra.searchpath=['file://{os.path.abspath(args.config_dir)}']"] if args.config_dir else []
        loader = GlobalHydra.instance().config_loader()
        if more:
            compose(config, overrides=more)  # else the loader knows nothing of that folder
        groups = loader.list_groups("")
        said = [(override, loader.get_group_options(override.key_or_group)) for override in _parsed(args.overrides)]
        chosen = [str(one.input_line) for one, options in said if not one.is_sweep_override() and one.value() in options]
        known = _known(config, more, chosen)
        launchers = {name for name in (_launcher_of(config, more, args.overrides),) if name}
        for override, options in said:
            key = override.key_or_group
            if key in OTHER_WORDS:
                lines.append(f"{key}: no such key. {OTHER_WORDS[key]}")
            elif key not in (*known, *groups) and not options and not key.startswith("hydra"):
                lines.append(f"{key}: no such key.{nearest(key, [*known, *groups])}")
            elif options:
                values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
                unknown = [str(value) for value in values if value not in (*options, None)]
                launchers |= {value for value in unknown if key == "hydra/launcher" and value in EXTRAS}
                unknown = [value for value in unknown if value not in launchers]
                lines += [f"{key}={value}: no such choice.{nearest(value, options)}" for value in unknown]
    extras = [(name, EXTRAS[name]) for name in sorted(launchers)]
    return [*lines, *(f"hydra/launcher={name} needs the extra `{x}`: pip install 'lengthwise[{x}]'" for name, x in extras)]


def _parsed(overrides: Sequence[str]) -> list[Override]:
    found = []
    for text in overrides:
        try:
            found.append(OverridesParser.create().parse_override(text))
        except HydraException:  # Hydra has said what is wrong with it
            continue
    return found


def _launcher_of(config: str, more: Sequence[str], overrides: Sequence[str]) -> str | None:
    """The launcher of a plug-in that a chosen node asks for and that is not there: a study may name one."""
    plain = [override.input_line or "" for override in _parsed(overrides) if not override.is_sweep_override()]
    try:
        compose(config, overrides=[*more, *plain], return_hydra_config=True)
    except MissingConfigException as error:
        found = re.search(r"hydra/launcher/(\w+)", error.missing_cfg_file or str(error))
        return found[1] if found and found[1] in EXTRAS else None
    except (HydraException, OmegaConfBaseException):  # Hydra has said what else is wrong
        return None
    return None


def _known(config: str, more: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The keys of the config with the nodes that were chosen; with its own where they do not compose."""
    try:
        return _keys(OmegaConf.to_container(compose(config, overrides=[*more, *chosen])))
    except (HydraException, OmegaConfBaseException):
        return _keys(OmegaConf.to_container(compose(config, overrides=list(more))))


def _keys(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, Mapping):
        return []
    return [name for key, value in node.items() for name in (f"{prefix}{key}", *_keys(value, f"{prefix}{key}."))]
