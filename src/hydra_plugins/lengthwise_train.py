"""TrainSweeper: several trainings for `lengthwise train -m`; Hydra takes sweepers from `hydra_plugins` only."""

from collections.abc import Sequence
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TrainSweeper(Sweeper):
    """A training for every combination of the overrides, one after the other, and one table at the end."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context

    def sweep(self, arguments: list[str]) -> Sequence[Any]:
        from lengthwise.experiments.train_app import run_trainings

        overrides = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        return run_trainings(self.config, overrides, self.hydra_context.config_loader)
