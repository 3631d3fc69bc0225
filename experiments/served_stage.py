"""The served stage: each cell's own scheduler on the real engine behind HTTP, asked by a client in another process.

A cell starts a server with its policy, batching, KV, preemption, limits and predictor, asks it as RemoteStage asks any, and
stops it. Arms differ in what the config says and in nothing else: the same model, the same requests at the same times, answers
of the same forced lengths, which only an oracle knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.request import urlopen

import numpy as np

from lengthwise.predictors.constant import Constant

from .asked import Asked
from .bench.body import LENGTHS
from .bench.child import child
from .dataset import Dataset
from .learned import refuse_seen
from .native_stage import is_profile
from .nodes import Config, is_learned, make, predictor_target
from .provenance import name
from .remote_stage import RemoteStage
from .run import Run

ENGINE = "lengthwise.experiments.native_stage.NativeStage"
SETTINGS = "lengthwise.engine.server.settings.Settings"
SCHEDULING = ("policy", "batching", "kv", "preemption", "limits")
FALLBACKS = "lengthwise_prediction_fallbacks_total"
OWN = frozenset(("host", "port", "api_key", "replay"))  # of the settings
FIRST_COME = {  # what the saturation rate is of, as in simulation
    "policy": {"_target_": "lengthwise.sched.policies.FCFS"},
    "batching": {"_target_": "lengthwise.sched.batching.Chunked"},
    "kv": {"_target_": "lengthwise.sched.kv.Paged", "_partial_": True},
    "preemption": {"_target_": "lengthwise.sched.preemption.recompute"},
}


@dataclass(frozen=True)
class ServedStage:
    """An Asking, see stage.py. model: node of a ServedModel. engine: fields of NativeStage (compiled, linears, ...). settings:
    of the server's Settings. route: chat, or completions where the workload has no text. lengths: replay, answers are as long
    as the workload's, by answer_len, which the scheduler is not told; free, the model's own end decides. body: fields of every
    request. burst: what measures the saturation rate, under FCFS: num_requests, so many at a time. seed: of ids made up.
    """

    model: Any
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    route: str = "chat"
    lengths: str = "replay"
    body: Mapping[str, Any] = field(default_factory=dict)
    burst: Mapping[str, int] = field(default_factory=lambda: {"num_requests": 400, "concurrency": 128})
    seed: int = 0

    default_hardware: ClassVar[str | None] = None
    schedules: ClassVar[bool] = True

    def check(self, cfg: Config) -> None:
        if self.lengths == "forced":
            raise ValueError(f"executor.lengths=forced would tell the scheduler; choose {LENGTHS[1]} or {LENGTHS[2]}")
        if cfg.get("hardware") is not None and not is_profile(cfg):
            raise ValueError(
                f"hardware={name(cfg, 'hardware')}: the server runs on this machine; hardware=null, or the engine's profile"
            )
        self._client("http://127.0.0.1", {}).check({**cfg, "choices": {}, "predictor": self._said(cfg), "saturation": 1.0})
        if own := sorted(OWN.intersection(self.settings)):
            raise ValueError(f"executor.settings.{own[0]}={self.settings[own[0]]!r}: the stage says that itself")
        make(self._settings(1))

    def rows_key(self) -> dict[str, Any]:
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(self).items()}

    def rows(self, dataset: Dataset) -> Dataset:
        return self._client("", {}).rows(dataset)

    def saturation(self, cfg: Config, dataset: Dataset) -> dict[str, Any]:
        fcfs = {**cfg, **FIRST_COME, "predictor": None}
        with self._server(fcfs, self.burst["num_requests"]) as client:
            return {**client.saturation(cfg, dataset), "policy": "fcfs + chunked + paged"}

    def run(self, cfg: Config, asked: Asked) -> Run:
        """Raises ValueError where the server does not come up or ends by itself, or its predictor has learned the prompts."""
        predictor, dataset, mark = cfg.get("predictor"), asked.workload.dataset, None
        if is_learned(cfg):
            made = make(predictor)
            if isinstance(made, Constant) and not made.fitted:  # says what it would have learned, as in simulation
                predictor = {**(predictor or {}), "length": float(np.median(dataset.output_len))}
            else:
                refuse_seen(made, dataset)
                mark = made.check_unit(dataset.unit)
        else:
            predictor = None  # an oracle's words are the client's
        with self._server({**cfg, "predictor": predictor}, len(asked.workload)) as client:
            run = client.run({**cfg, "predictor": self._said(cfg)}, asked)
            replaced = fallbacks(client.target) if predictor is not None else {}
        run.summary["cell"]["executor"] = "served"
        marks = [] if mark is None else [mark]
        if replaced:
            run.summary["provenance"]["predictor"] |= {"fallback": replaced}
            kinds = ", ".join(f"{kind} {n}" for kind, n in replaced.items())
            marks.append(f"a constant stood in for {sum(replaced.values())} of {len(run.requests)} predictions ({kinds})")
        run.summary["provenance"]["marks"] += marks
        return run

    @contextmanager
    def _server(self, cfg: Config, num_requests: int) -> Iterator[RemoteStage]:
        """A client of the server of `cfg`, which is there as long as the block runs."""
        with child(self.serving(cfg, num_requests)) as server:
            yield self._client(server.url, {group: name(cfg, group) for group in (*SCHEDULING, "predictor", "hardware")})

    def serving(self, cfg: Config, num_requests: int) -> dict[str, Any]:
        """What `lengthwise serve` would be told: the scheduling and the predictor of `cfg`, and no bound on the queue."""
        return {
            **{group: cfg[group] for group in SCHEDULING}, "predictor": cfg["predictor"], "check": cfg.get("check", False),
            "choices": dict(cfg.get("choices") or {}), "server": self._settings(num_requests),
            "executor": {"_target_": ENGINE, "_recursive_": False, "_convert_": "all", "model": self.model, **self.engine},
        }  # fmt: skip

    def _client(self, url: str, server: Mapping[str, Any]) -> RemoteStage:
        return RemoteStage(
            target=url, server=server, route=self.route, lengths=self.lengths, body=self.body, extensions=True,
            burst=self.burst, seed=self.seed,
        )  # fmt: skip

    def _settings(self, num_requests: int) -> dict[str, Any]:
        """The server's: none is turned away, however long the queue."""
        own = {"port": 0, "replay": self.lengths == "replay", "max_waiting": num_requests}
        return {"_target_": SETTINGS, **own, **self.settings}

    def _said(self, cfg: Config) -> Any:
        """The predictor at work in the client: an oracle, or none."""
        return None if predictor_target(cfg) is None or is_learned(cfg) else cfg["predictor"]


def fallbacks(url: str) -> dict[str, int]:
    """Predictions that a constant stood in for, by kind, as the server at `url` has counted them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"{url}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
    counted = (sample for family in families for sample in family.samples if sample.name == FALLBACKS)
    return {sample.labels["kind"]: int(sample.value) for sample in counted if sample.value}
