"""The served stage: each cell's own scheduler on the real engine behind HTTP, asked by a client in another process.

A cell starts a server with its policy, batching, KV, preemption, admission, victim rule, limits and predictor, asks it as
RemoteStage asks any, and stops it. Arms differ in what the config says and in nothing else: the same model, the same requests
at the same times, answers of the same forced lengths, which only an oracle knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np

from lengthwise.predictors.constant import Constant

from .asked import Asked
from .bench.body import LENGTHS
from .bench.child import child
from .dataset import Dataset
from .learned import ready, refuse_foreign
from .native_stage import is_profile, why_another
from .nodes import Config, is_learned, load_hardware, make, predictor_target
from .provenance import name
from .remote_stage import RemoteStage
from .run import Run

ENGINE = "lengthwise.experiments.native_stage.NativeStage"
SETTINGS = "lengthwise.engine.server.settings.Settings"
SCHEDULING = ("policy", "batching", "kv", "preemption", "limits")
RULES = ("admission", "victim")  # which may be left out
BURST = 12  # x max_num_seqs requests measure the saturation rate
PATIENT = 1e6  # s without a byte: who starves is not to be given up, as nobody is in simulation
NODES = "what another process is to make must be a node, by name or as a mapping"
FALLBACKS = "lengthwise_prediction_fallbacks_total"
OWN = frozenset(("host", "port", "api_key", "replay"))  # of the settings
FIRST_COME = {  # what the saturation rate is of, as in simulation
    "policy": {"_target_": "lengthwise.sched.policies.FCFS"},
    "batching": {"_target_": "lengthwise.sched.batching.Chunked"},
    "kv": {"_target_": "lengthwise.sched.kv.Paged", "_partial_": True},
    "preemption": {"_target_": "lengthwise.sched.preemption.recompute"},
    "admission": None,
    "victim": None,
}


@dataclass(frozen=True)
class ServedStage:
    """An Asking, see stage.py. model: node of a ServedModel. engine: fields of NativeStage (compiled, linears, ...). settings:
    of the server's Settings. route: chat, or completions where the workload has no text. lengths: replay, answers are as long
    as the workload's, by answer_len, which the scheduler is not told; free, the model's own end decides. body: fields of every
    request. seed: of ids made up.
    """

    model: Any
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    route: str = "chat"
    lengths: str = "replay"
    body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    default_hardware: ClassVar[str | None] = None
    schedules: ClassVar[bool] = True

    def check(self, cfg: Config) -> None:
        nodes = {**{group: cfg.get(group) for group in SCHEDULING}, "executor.model": self.model}
        nodes |= {group: cfg[group] for group in RULES if cfg.get(group) is not None}
        if objects := [key for key, node in nodes.items() if not isinstance(node, Mapping)]:
            kind = type(nodes[objects[0]]).__name__
            raise ValueError(f"{objects[0]} is a {kind}: {NODES}")
        if self.lengths == "forced":
            raise ValueError(f"executor.lengths=forced would tell the scheduler; choose {LENGTHS[1]} or {LENGTHS[2]}")
        if cfg.get("hardware") is not None and not is_profile(cfg):
            raise ValueError(
                f"hardware={name(cfg, 'hardware')}: the server runs on this machine; hardware=null, or the engine's profile"
            )
        self._client("http://127.0.0.1", {}).check(
            {**cfg, **dict.fromkeys(RULES), "choices": {}, "predictor": self._said(cfg), "saturation": 1.0}
        )
        if own := sorted(OWN.intersection(self.settings)):
            raise ValueError(f"executor.settings.{own[0]}={self.settings[own[0]]!r}: the stage says that itself")
        make(self._settings(1))
        if cfg["limits"].get("clip"):
            raise ValueError("limits.clip=true is for runs of a workload; a server takes what its clients ask")
        if is_learned(cfg):
            if not isinstance(cfg["predictor"], Mapping):
                raise ValueError(f"predictor is a {type(cfg['predictor']).__name__}: {NODES}")
            ready(cfg)

    def rows_key(self) -> dict[str, Any]:
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(self).items()}

    def rows(self, dataset: Dataset) -> Dataset:
        return self._client("", {}).rows(dataset)

    def saturation(self, cfg: Config, dataset: Dataset) -> dict[str, Any]:
        """Under FCFS, BURST x max_num_seqs requests at once."""
        num = BURST * cfg["limits"]["max_num_seqs"]
        with self._server({**cfg, **FIRST_COME, "predictor": None}, num) as client:
            measured = replace(client, burst={"num_requests": num, "concurrency": num}).saturation(cfg, dataset)
        return {**measured, "policy": "fcfs + chunked + paged"}

    def run(self, cfg: Config, asked: Asked) -> Run:
        """Raises ValueError where the server does not come up, ends or fails, where its predictor has learned from the prompts,
        and where a constant stood in for all its predictions."""
        predictor, mark = None, ""  # an oracle's words are the client's
        if is_learned(cfg):
            made, predictor, dataset = ready(cfg), cfg["predictor"], asked.workload.dataset
            mark = refuse_foreign(made, dataset) or ""
            if isinstance(made, Constant) and not made.fitted:  # says what it would have learned, as in simulation
                predictor = {**predictor, "length": float(np.median(dataset.output_len))}
        with self._server({**cfg, "predictor": predictor}, len(asked.workload)) as client:
            run = client.run({**cfg, "predictor": self._said(cfg)}, asked)
            refuse_failed(str(client.target))
            replaced = {} if predictor is None else fallbacks(str(client.target))
        provenance, num = run.summary["provenance"], len(run.requests)
        about = provenance["server"]["told"]["models"][0]["metadata"]
        marks = [mark, *self._differs(cfg, about)]
        if replaced:
            kinds = ", ".join(f"{kind} {n}" for kind, n in replaced.items())
            words = f"a constant stood in for {sum(replaced.values())} of {num} predictions ({kinds})"
            if sum(replaced.values()) >= num:
                raise ValueError(f"{words}: nothing was predicted")
            provenance["predictor"] |= {"fallback": replaced}
            marks.append(words)
        run.summary["cell"]["executor"] = "served"
        provenance |= {"kv_pool_tokens": about["kv_pool_tokens"], "engine": about["engine"]}
        provenance["marks"] += [mark for mark in marks if mark]
        return run

    def _differs(self, cfg: Config, about: Mapping[str, Any]) -> list[str]:
        """A mark where the profile that simulations stand on is of another engine than the one that served."""
        why = None if cfg.get("hardware") is None else why_another(load_hardware(cfg), about["engine"])
        return [] if why is None else [f"simulated beside another engine: {why}"]

    @contextmanager
    def _server(self, cfg: Config, num_requests: int) -> Iterator[RemoteStage]:
        """A client of the server of `cfg`, which is there as long as the block runs."""
        with child(self.serving(cfg, num_requests)) as server:
            groups = (*SCHEDULING, *(group for group in RULES if cfg.get(group)), "predictor", "hardware")
            yield self._client(server.url, {group: name(cfg, group) for group in groups})

    def serving(self, cfg: Config, num_requests: int) -> dict[str, Any]:
        """What `lengthwise serve` would be told: the scheduling and the predictor of `cfg`, and no bound on the queue."""
        return {
            **{group: cfg[group] for group in SCHEDULING}, **{group: cfg.get(group) for group in RULES},
            "predictor": cfg["predictor"], "check": False,
            "choices": dict(cfg.get("choices") or {}), "server": self._settings(num_requests),
            "executor": {"_target_": ENGINE, "_recursive_": False, "_convert_": "all", "model": self.model, **self.engine},
        }  # fmt: skip

    def _client(self, url: str, server: Mapping[str, Any]) -> RemoteStage:
        return RemoteStage(
            target=url, server=server, route=self.route, lengths=self.lengths, body=self.body, extensions=True,
            stall=PATIENT, seed=self.seed,
        )  # fmt: skip

    def _settings(self, num_requests: int) -> dict[str, Any]:
        """The server's: none is turned away, however long the queue."""
        own = {"port": 0, "replay": self.lengths == "replay", "max_waiting": num_requests}
        return {"_target_": SETTINGS, **own, **self.settings}

    def _said(self, cfg: Config) -> Any:
        """The predictor at work in the client: an oracle, or none."""
        return None if predictor_target(cfg) is None or is_learned(cfg) else cfg["predictor"]


def refuse_failed(url: str) -> None:
    """Raises ValueError where the engine of the server at `url` has failed."""
    try:
        with urlopen(f"{url}/health", timeout=60):
            pass
    except HTTPError as error:
        raise ValueError(f"the engine failed while it served: {error.read().decode(errors='replace')[:300]}") from None


def fallbacks(url: str) -> dict[str, int]:
    """Predictions that a constant stood in for, by kind, as the server at `url` has counted them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"{url}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
    counted = (sample for family in families for sample in family.samples if sample.name == FALLBACKS)
    return {sample.labels["kind"]: int(sample.value) for sample in counted if sample.value}
