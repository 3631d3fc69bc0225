"""Sweepers: Hydra takes them from the namespace package `hydra_plugins` only; the work is in lengthwise.experiments."""

from collections.abc import Sequence

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class StudySweeper(Sweeper):
    """Sweeps the cells of a study. params: key -> comma-separated values, as for Hydra's basic sweeper. at_once: jobs that the
    launcher is given at a time; None: as many as fit."""

    def __init__(self, params: dict[str, str] | None = None, at_once: int | None = None) -> None:
        self.params = params or {}
        self.at_once = at_once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from lengthwise.experiments.size import sized
        from lengthwise.experiments.study import refusals

        with refusals(self.config.out):
            params = sized(self.config, self.params, arguments)
        try:
            self.run([*(f"{key}={value}" for key, value in params.items()), *arguments])
        finally:
            getattr(self.launcher, "close", lambda: None)()  # one that holds a cluster gives it up

    def run(self, overrides: Sequence[str]) -> None:
        """Run the cells of `overrides`."""
        from lengthwise.experiments.study import run_study

        run_study(self.config, overrides, self.hydra_context.config_loader, self.launcher, self.at_once)


class TuneSweeper(StudySweeper):
    """Searches the ranges among the overrides for the parameters with the best objective, as `config.tune` says."""

    def run(self, overrides: Sequence[str]) -> None:
        from lengthwise.experiments.tune import run_tune

        run_tune(self.config, overrides, self.hydra_context.config_loader, self.launcher, self.at_once)
