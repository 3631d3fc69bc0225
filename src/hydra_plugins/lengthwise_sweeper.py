"""StudySweeper: Hydra takes sweepers from the namespace package `hydra_plugins` only; the work is in experiments/study.py."""

from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class StudySweeper(Sweeper):
    """Sweeps the cells of a study. params: key -> comma-separated values, as for Hydra's basic sweeper."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[Any]:
        from lengthwise.experiments.study import run_study

        overrides = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        return run_study(self.config, overrides, self.hydra_context.config_loader, self.launcher)
