"""Tune: Optuna proposes parameters of nodes, a trial is the mean of an objective over cells with the same seeds.

The cells are a study's: prepared, launched, kept and found again by hash. Proposals depend on the sampler's seed and on the
values of earlier trials alone, so that running the same command again replays what is there and goes on behind it. Trial 0 has
the nodes' own values; the best is measured again on seeds that had no part in choosing it.
"""

from __future__ import annotations

import importlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.plugins.launcher import Launcher
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from .composer import Cfg, Composer
from .job import planned
from .launch import launch, plan, say
from .manifest import Row, read_manifest
from .paths import root
from .prepare import Prepared
from .progress import Progress
from .ranges import Range, split_ranges
from .study import make_inputs, opened, refusals
from .sweep import excluded
from .tune_report import report
from .validate import nearest, validate

DIRECTIONS = ("minimize", "maximize")
LEAST = {"trials": 1, "seeds": 1, "held_out": 0, "batch": 1}
Job = tuple[list[str], Cfg]


@dataclass
class Tried:
    """One trial: params, and by seed the value and the cell. error: why it has no value (the mean over the seeds)."""

    number: int
    params: dict[str, Any]
    values: dict[int, float] = field(default_factory=dict)
    cells: dict[int, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def value(self) -> float | None:
        return None if self.error else math.fsum(self.values.values()) / len(self.values)


def run_tune(
    config: DictConfig, overrides: Sequence[str], loader: ConfigLoader, launcher: Launcher, at_once: int | None = None
) -> None:
    """Search the ranges among `overrides` as `config.tune` says; print and write (tune.json, tune.csv) what was found.

    A trial whose cells fail, or whose parameters a node refuses, has failed; the search goes on. Writes PATH/<name>/ and
    PATH/prepared/. Raises SystemExit on what cannot be searched, and when no trial has a value.
    """
    with refusals(root(str(config.out))):
        settings = _settings(config)
        ranges, fixed = split_ranges(overrides)
        compose = Composer(config, loader)
        own = {space.key: _value(compose(fixed), space.key) for space in ranges}
        validate(compose(fixed))
        sampler = _optuna().create_study(sampler=instantiate(settings["sampler"]), direction=settings["direction"])
    total = settings["trials"] * settings["seeds"] + 2 * settings["held_out"]
    with opened(config) as (folder, prepared), Progress(folder, total):
        plan(folder, [])
        search = Search(settings, fixed, compose, launcher, at_once, folder, prepared)
        tried = _search(search, sampler, ranges, own)
        best = _best(tried, settings["direction"])
        again = [] if best is None else search.held_out([tried[0]] if best is tried[0] else [tried[0], best])
    report(folder, tried, best, again, settings, _optuna().__version__, config.wandb)


class Search:
    """Runs trials as cells of the study in `folder`."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        fixed: Sequence[str],
        compose: Composer,
        launcher: Launcher,
        at_once: int | None,
        folder: Path,
        prepared: Prepared,
    ) -> None:
        self.settings = settings
        self._fixed = [text for text in fixed if not text.startswith("seed=")]
        self._first = int(compose(list(fixed))["seed"])
        self._compose = compose
        self._launcher = launcher
        self._at_once = at_once
        self._folder = folder
        self._prepared = prepared

    def run(self, trials: Sequence[Tried], *, seeds: range | None = None) -> None:
        """Run the cells of `trials` and set their values, cells and errors."""
        seeds = range(self.settings["seeds"]) if seeds is None else seeds
        jobs: dict[str, tuple[list[str], Row]] = {}
        for trial in trials:
            try:
                cells = [self._cell(trial, self._first + i) for i in seeds]
                make_inputs([cfg for _, cfg in cells], self._prepared, quiet=True)
            except (ValueError, TypeError, ImportError) as error:  # a proposal that a node refuses
                trial.error = str(error).splitlines()[0]
                continue
            for job, cfg in cells:
                row = planned(cfg, self._prepared)
                jobs.setdefault(row["hash"], (job, row))
                trial.cells[cfg["seed"]] = row["cell"]
        known = {row["hash"] for row in read_manifest(self._folder)}
        new = [(job, row) for code, (job, row) in jobs.items() if code not in known]
        todo = plan(self._folder, [row for _, row in new], anew=False)
        if todo:
            launch(self._launcher, [new[i][0] for i in todo], self._folder, self._at_once)
        rows = {row["cell"]: row for row in read_manifest(self._folder)}
        for trial in trials:
            self._read(trial, rows)

    def held_out(self, trials: Sequence[Tried]) -> list[Tried]:
        """The same parameters on seeds that no trial has seen."""
        first, count = self.settings["seeds"], self.settings["held_out"]
        again = [Tried(trial.number, trial.params) for trial in trials if count]
        self.run(again, seeds=range(first, first + count))
        return again

    def _cell(self, trial: Tried, seed: int) -> Job:
        params = trial.params if trial.number else {}  # trial 0: as the nodes say it
        job = [*self._fixed, *(f"{key}={value}" for key, value in params.items()), f"seed={seed}"]
        cfg = self._compose(job)
        if excluded(cfg):
            raise ValueError("left out by `exclude`")
        validate(cfg)
        return job, cfg

    def _read(self, trial: Tried, rows: Mapping[str, Row]) -> None:
        objective = self.settings["objective"]
        for seed, cell in trial.cells.items():
            row = rows[cell]
            if row["status"] != "ok":
                trial.error = trial.error or f"{cell}: {row.get('error', 'no result; its worker ended early')}"
                continue
            metrics = json.loads((self._folder / row["folder"] / "summary.json").read_text())["metrics"]
            if objective not in metrics:
                numbers = [key for key, value in metrics.items() if isinstance(value, (int, float))]
                raise ValueError(f"tune.objective={objective}: no such metric.{nearest(objective, numbers)}")
            if metrics[objective] is None:
                trial.error = trial.error or f"{cell}: {objective} is n/a"
            else:
                trial.values[seed] = float(metrics[objective])


def _search(search: Search, sampler: Any, ranges: Sequence[Range], own: Mapping[str, Any]) -> list[Tried]:
    """All trials in order. The nodes' own values come first; the sampler is told of them when they are in the ranges."""
    placed = {space.key: space.placed(own[space.key]) for space in ranges}
    tried = [Tried(0, {space.key: own[space.key] for space in ranges})]
    search.run(tried)
    if all(value is not None for value in placed.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2 calls it experimental
            sampler.enqueue_trial(placed)
        _tell(sampler, _ask(sampler, ranges)[0], tried[0])
    while len(tried) < search.settings["trials"]:
        count = min(search.settings["batch"], search.settings["trials"] - len(tried))
        asked = [_ask(sampler, ranges) for _ in range(count)]
        batch = [Tried(len(tried) + i, params) for i, (_, params) in enumerate(asked)]
        search.run(batch)
        for (trial, _), done in zip(asked, batch, strict=True):
            _tell(sampler, trial, done)
        tried += batch
        best = _best(tried, search.settings["direction"])
        found = "no value yet" if best is None else f"best {best.value:.6g}"
        say(f"trial {len(tried)}/{search.settings['trials']}: {found}")
    return tried


def _ask(sampler: Any, ranges: Sequence[Range]) -> tuple[Any, dict[str, Any]]:
    trial = sampler.ask()
    return trial, {space.key: space.suggest(trial) for space in ranges}


def _tell(sampler: Any, trial: Any, done: Tried) -> None:
    if done.value is None:
        sampler.tell(trial, state=_optuna().trial.TrialState.FAIL)
    else:
        sampler.tell(trial, done.value)


def _best(tried: Sequence[Tried], direction: str) -> Tried | None:
    """The trial with the best value, the earliest of equals."""
    sign = 1.0 if direction == "minimize" else -1.0
    done = [trial for trial in tried if trial.value is not None]
    return min(done, key=lambda trial: sign * trial.value, default=None)  # type: ignore[operator]


def _settings(config: DictConfig) -> dict[str, Any]:
    settings = OmegaConf.to_container(config.tune, resolve=True)
    assert isinstance(settings, dict)
    if settings["direction"] not in DIRECTIONS:
        raise ValueError(f"tune.direction={settings['direction']!r}: choose {', '.join(DIRECTIONS)}")
    for key, least in LEAST.items():
        value = settings[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"tune.{key}={value!r} must be a whole number >= {least}")
    return {str(key): value for key, value in settings.items()}


def _value(cfg: Mapping[str, Any], key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            raise ValueError(f"{key}: no such key.{nearest(key, _keys(cfg))}")
        node = node[part]
    return node


def _keys(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, Mapping):
        return []
    return [name for key, value in node.items() for name in (f"{prefix}{key}", *_keys(value, f"{prefix}{key}."))]


def _optuna() -> Any:
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise ImportError("hydra/sweeper=tune needs the extra `tune`: pip install 'lengthwise[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
