"""RaySweepLauncher: hydra-ray-launcher for sweeps that clean up behind them. Nodes: conf/hydra/launcher/ray*.yaml."""

import os
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class RaySweepLauncher(Launcher):
    """Runs jobs in a Ray cluster: its own, ended by `close`, or one that is there, which `close` only leaves.

    ray: `init` and `remote`, the arguments of ray.init and ray.remote, as in hydra-ray-launcher. Raises SystemExit without Ray.
    """

    def __init__(self, ray: DictConfig) -> None:
        if find_spec("ray") is None or find_spec("hydra_plugins.hydra_ray_launcher") is None:
            raise SystemExit("hydra/launcher=ray_* needs the extra `cluster`: pip install 'lengthwise[cluster]'")
        self.ray_cfg = ray

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        if self.ray_cfg.init.get("address") == "local":
            _own_cluster(os.environ)
        from hydra_plugins.hydra_ray_launcher._core import launch

        launcher: Any = self
        return launch(launcher=launcher, job_overrides=job_overrides, initial_job_idx=initial_job_idx)

    def close(self) -> None:
        """Leave the cluster, which ends one of our own."""
        import ray

        ray.shutdown()


def _own_cluster(env: Any) -> None:
    """Before Ray is imported: a token for this cluster alone, which Ray would else write to the home folder; no statistics."""
    if not any(env.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        env["RAY_AUTH_MODE"] = "token"
        env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
