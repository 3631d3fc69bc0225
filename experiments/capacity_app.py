"""`lengthwise capacity`: the Hydra application around a capacity search, or around several with -m."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .capacity import FILE, search
from .capacity_table import lines, table
from .composer import Composer, plain
from .hints import print_error, run_app
from .paths import root
from .probes import SearchFailed
from .sweep import excluded

CONFIG = "capacity"
REFUSALS = (ValueError, ImportError, FileNotFoundError, OmegaConfBaseException)


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One search; prints its answer. Leaves by SystemExit with the reason when there is none."""
    choices = HydraConfig.get().runtime.choices
    try:
        _refuse_study(choices.get("study"))
        cfg = plain(config, choices)
        answer = search(cfg)
    except (*REFUSALS, SearchFailed) as error:
        raise SystemExit(f"lengthwise capacity: {error}") from error
    print("\n".join(lines(answer)))
    print(f"written: {root(cfg['out']) / cfg['name'] / answer['folder'] / FILE}")


def run_searches(config: DictConfig, overrides: Sequence[str], loader: ConfigLoader) -> list[dict[str, Any]]:
    """A search for every combination of `overrides` that `exclude` leaves; prints a table of their answers.

    One that fails stops none of the others. Raises SystemExit when one failed, or when none can be run.
    """
    say = print_error
    try:
        _refuse_study(config.hydra.runtime.choices.get("study"))
        compose = Composer(config, loader)
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
        cells = [(job, cfg) for job in jobs if not excluded(cfg := compose(job))]
        if not cells:
            raise ValueError("the sweep has no search: `exclude` leaves out every combination")
    except REFUSALS as error:
        raise SystemExit(f"lengthwise capacity: {error}") from error
    answers, bad = [], []
    for number, (job, cfg) in enumerate(cells, 1):
        say(f"search {number}/{len(cells)}: {' '.join(job)}")
        try:
            answers.append(search(cfg, say))
        except (*REFUSALS, SearchFailed) as error:
            say(str(error))
            bad.append(f"  {' '.join(job)}: {error}")
    if answers:
        print(table(answers))
        for answer in answers:
            for mark in (*answer["marks"], *answer["provenance"]["marks"]):
                print(f"note: {answer['folder']}: {mark}")
    if bad:
        raise SystemExit("\n".join([f"{len(bad)} of {len(cells)} searches failed", *bad]))
    return answers


def _refuse_study(name: str | None) -> None:
    if name is not None:
        raise ValueError(f"study={name}: a study is a sweep of its own; name the parts of the cells to be searched")


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    run_app(app, CONFIG)
