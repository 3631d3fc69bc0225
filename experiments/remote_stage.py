"""The remote stage: any OpenAI-compatible server, asked over HTTP by a client in this process, in real time.

The client knows when requests were due and sent and when each token came. What the server alone knows (its policy, its KV, its
steps, when it scheduled whom) is what the user states in `server`, else unknown, and never made up.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TextIO
from urllib.parse import urlsplit

import numpy as np

from lengthwise.sched import SLO, Request, Source

from .asked import Asked
from .bench.answer import Answer
from .bench.body import LENGTHS, ROUTES, Bodies
from .bench.driving import Connection, Driven, Told, Tries, drive
from .bench.record import Seen
from .bench.sending import differs, sending
from .cellhash import cell_name, digest, lasting
from .dataset import Dataset, Workload
from .draw import stream
from .nodes import Config, is_learned, make, predictor_target
from .paths import root
from .provenance import cell_names, load_marks, provenance, session_marks
from .run import Run, build
from .saturation import middle_rate
from .source import WorkloadSource
from .watched import Watched

log = logging.getLogger(__name__)

DECIDED = ("policy", "batching", "kv", "preemption", "limits", "hardware")  # by the server
UNKNOWN = "unknown"
LOUD = ("rejected", "failed")  # what is told at once: it may be all that will come
BUSY = 0.8  # share of one core: with more the client may be what is slow
OUTSIDE = "measured over HTTP: the same seed gives the same requests, never the same times"


@dataclass(frozen=True)
class RemoteStage:
    """An Asking, see stage.py. target: URL of the server. model_name: as the server calls it; None: the first that it lists.

    server: what the user knows of it (policy, engine, ...), for the record. route: completions (texts, or made-up token ids
    where the workload has none) or chat. lengths: forced, answers are as long as the workload's by max_tokens and ignore_eos;
    replay, by our server's answer_len, which its scheduler is not told; free, the model's own end decides. body: fields of
    every request. extensions: also what only our server takes (priority, client, slo, timeout, session, predicted length).
    continuous_usage: ask for the count with every event; None: of our server. api_key_env: the environment variable that holds
    the key. concurrency, retries, backoff, stall: see sender.py and driving.py. measure_saturation: measure what `load` is a
    share of first, by `burst` (num_requests, all at once, so many at a time). seed: of ids made up.
    """

    target: str | None = None
    model_name: str | None = None
    server: Mapping[str, Any] = field(default_factory=dict)
    route: str = "completions"
    lengths: str = "forced"
    body: Mapping[str, Any] = field(default_factory=dict)
    extensions: bool = False
    continuous_usage: bool | None = None
    api_key_env: str | None = None
    concurrency: int | None = None
    retries: int = 2
    backoff: float = 0.5
    stall: float = 600.0
    measure_saturation: bool = False
    burst: Mapping[str, int] = field(default_factory=lambda: {"num_requests": 400, "concurrency": 128})
    seed: int = 0

    default_hardware: ClassVar[str | None] = None
    schedules: ClassVar[bool] = False

    def check(self, cfg: Config) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise ValueError("a remote server is asked by aiohttp, which is not installed: pip install 'lengthwise[serve]'")
        self._address()
        for key, value, known in (("route", self.route, ROUTES), ("lengths", self.lengths, LENGTHS)):
            if value not in known:
                raise ValueError(f"executor.{key}={value!r}: choose {' or '.join(known)}")
        for key, number, least in (
            ("concurrency", 1 if self.concurrency is None else self.concurrency, 1), ("retries", self.retries, 0),
            ("backoff", self.backoff, 0), ("stall", self.stall, 1e-3),
        ):  # fmt: skip
            if not number >= least:
                raise ValueError(f"executor.{key}={number}, the least is {least}")
        chosen = [group for group in DECIDED if (cfg.get("choices") or {}).get(group)]
        if chosen:
            name = cfg["choices"][chosen[0]]
            raise ValueError(
                f"{chosen[0]}={name}: a remote server decides that; +executor.server.{chosen[0]}={name} says that it does so"
            )
        for group in ("admission", "victim"):
            if make(cfg.get(group)) is not None:
                raise ValueError(f"{group}: a remote server decides that; leave it out")
        if is_learned(cfg):
            raise ValueError("predictor: the client has none or an oracle; a learned one works in the server")
        if predictor_target(cfg) is not None and not self.extensions:
            raise ValueError("a prediction is sent as predicted_len, which only our server takes: executor.extensions=true")
        if predictor_target(cfg) is not None and self.lengths == "free":
            raise ValueError("executor.lengths=free: the model decides how long answers are, which no oracle can know")
        told = cfg["rate"] is not None or cfg["load"] is None or cfg.get("saturation") is not None
        if not told and not self.measure_saturation:
            raise ValueError(
                f"load={cfg['load']:g} is a share of a rate that nobody has told: give rate= (requests/s), "
                "saturation= (requests/s of the server when there is always work), or executor.measure_saturation=true"
            )
        self._key()

    def rows_key(self) -> dict[str, Any]:
        return {
            "target": self._address(), "model": self.model_name, "server": dict(self.server), "route": self.route,
            "lengths": self.lengths, "body": dict(self.body), "seed": self.seed,
            "burst": dict(self.burst),
        }  # fmt: skip

    def rows(self, dataset: Dataset) -> Dataset:
        if self.route == "chat" and dataset.prompts is None:
            raise ValueError(f"dataset {dataset.name} has no texts to chat with: executor.route=completions sends token ids")
        return replace(dataset, censored=None) if self.lengths == "free" and dataset.censored is not None else dataset

    # --- asking ---------------------------------------------------------------------------------------------------------

    def saturation(self, cfg: Config, dataset: Dataset) -> dict[str, Any]:
        n = self.burst["num_requests"]
        rng = stream(0, "saturation")
        rows = rng.permutation(len(dataset))[:n] if n <= len(dataset) else rng.integers(0, len(dataset), n)
        patient = replace(dataset, columns={k: v for k, v in dataset.columns.items() if k != "timeout"})
        workload = Workload(patient, rows.astype(np.int64), np.zeros(n))
        times: list[float] = []
        others: list[str] = []

        def told(request: Request, answer: Answer, reason: str, now: float) -> None:
            if reason in ("stop", "length"):
                times.append(now)
            else:
                others.append(reason)

        log.info("measuring the saturation rate by %d requests, %d at a time", n, self.burst["concurrency"])
        at_a_time = replace(self, concurrency=self.burst["concurrency"])
        at_a_time._drive(workload, WorkloadSource(workload, None, None, gate=False), told, SLO())
        if len(times) < max(n / 2, 8):
            why = f" ({others[0]})" if others else ""
            raise ValueError(f"only {len(times)} of {n} requests of the burst were served: no saturation rate{why}")
        return {"rate": middle_rate(np.sort(times)), "from": "a burst", "num_requests": n, **self.burst}

    def run(self, cfg: Config, asked: Asked) -> Run:
        workload, slo = asked.workload, SLO(**cfg["slo"])
        source, path = asked.source(gate=False), raw_file(cfg)
        with _opened(path) as raw:
            seen = Seen(len(workload), window=(asked.window.begin, asked.window.end), raw=raw)
            watched = Watched(seen, asked.num_requests, look=1)
            said: set[str] = set()

            def told(request: Request, answer: Answer, reason: str, now: float) -> None:
                if (kind := reason.split(":")[0]) in LOUD and kind not in said:
                    said.add(kind)
                    log.warning("the first one of its kind, request %d: %s", request.rid, reason)
                num_tokens, ended = seen.answered(request, answer, reason, now)
                watched.ended(request, num_tokens, reason, ended)

            try:
                driven = self._drive(workload, source, told, slo, asked.cap)
            except KeyboardInterrupt:
                kept = "" if path is None else f"; what came of them is in {path}"
                log.warning("stopped: %d of %d requests have ended%s", seen.num_answered, len(workload), kept)
                log.warning("a cell is whole or not there: the same command measures it anew")
                raise
        born, predicted = asked.came(source, driven.stopped)
        run = build(
            seen,
            born,
            predictions=predicted.columns,
            slo=slo,
            window=asked.window,
            run_end=driven.stopped,
            cell={**cell_names(cfg, asked.load, asked.rate), **self._names(cfg, driven.model)},
            provenance={
                **provenance(cfg, asked.dataset, workload, None), "predictor": dict(predicted.info), "lengths": self.lengths,
                "server": {"target": self._address(), "stated": dict(self.server), "told": dict(driven.about)},
                "untold": "steps, KV, preemptions and when requests are scheduled: the server's own", "deterministic": OUTSIDE,
                "counting": {"by_usage": seen.num_counted_by_usage, "miscounted": seen.num_miscounted},
            },
            volatile={"client_cpu": driven.cpu, "wall": driven.wall},
        )  # fmt: skip
        if run.requests["status"].isin(LOUD).all():
            most, kept = run.requests["reason"].value_counts().index[0], "" if path is None else f"; see {path}"
            raise ValueError(f"0 of {len(born)} requests finished, most of them: {most}{kept}")
        sent = sending(run.requests, asked.window, run.summary["window"]["run_end"])
        run.summary["metrics"] |= sent.metrics
        run.summary["flags"] |= sent.flags
        marks = [*self._marks(run, driven), *load_marks(cfg), *session_marks(run, workload, asked.rate)]
        run.summary["provenance"]["marks"] = marks
        run.workload, run.tokens, run.raw = workload, seen.tokens(), path
        return run

    def connection(self) -> Connection:
        """How the server is reached. Raises ValueError for a target that is no URL, an unknown route, and a key that is not
        there."""
        key = self._key()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if self.route not in ROUTES:
            raise ValueError(f"executor.route={self.route!r}: choose {' or '.join(ROUTES)}")
        tries = Tries(self.retries, self.backoff, self.stall)
        return Connection(self._address(), headers, tries, ROUTES[self.route], self.model_name, self.concurrency)

    def _drive(self, workload: Workload, source: Source, told: Told, slo: SLO, cap: float | None = None) -> Driven:
        """Ask the server all that `source` gives, in real time from now on."""
        every = self.extensions if self.continuous_usage is None else self.continuous_usage

        def bodies(model: str) -> Bodies:
            return Bodies(workload, model, self.route, self.lengths, self.body, every, self.extensions, slo, self.seed)

        return drive(self.connection(), bodies, source, told, cap)

    # --- what is said -----------------------------------------------------------------------------------------------------

    def _names(self, cfg: Config, model: str) -> dict[str, Any]:
        out = {group: str(self.server.get(group, UNKNOWN)) for group in DECIDED}
        if predictor_target(cfg) is None:
            out["predictor"] = str(self.server.get("predictor", UNKNOWN))
        return {**out, "executor": "remote", "model": model}

    def _marks(self, run: Run, driven: Driven) -> list[str]:
        metrics, requests = run.metrics, run.requests
        ended = int((requests["output_len"] > 0).sum())
        counted = run.summary["provenance"]["counting"]
        pairs = [(metrics[f"{name}_rps"], metrics[f"{name}_cv"]) for name in ("arrival", "sent")]
        marks = [OUTSIDE, differs(pairs[0], pairs[1])]
        if run.summary["cell"]["load"] is not None and self.measure_saturation:
            marks.append("the load is a share of a saturation rate measured by a burst, once for every cell that needs it")
        if counted["by_usage"] < ended:
            marks.append(f"output tokens of {ended - counted['by_usage']} of {ended} requests are counted by events: no usage")
        if counted["miscounted"]:
            marks.append(
                f"{counted['miscounted']} answers have another number of tokens by usage than by events (column miscount)"
            )
        timeless = int((requests["first_token"].isna() & (requests["output_len"] > 0)).sum())
        if timeless:
            marks.append(
                f"{timeless} answers came without text, so that nobody knows when: left out of TTFT, TPOT and goodput "
                "(executor.continuous_usage=true asks the server)"
            )
        known = requests[requests["prompt_count"] > 0]
        ratio = known["prompt_count"].sum() / max(known["prompt_len"].sum(), 1) if len(known) else 1.0
        if abs(ratio - 1) > 0.01:
            marks.append(f"the server counts {ratio:.2g} x the prompt tokens of the workload")
        if driven.cpu > BUSY * driven.wall:
            marks.append(f"the client was busy {driven.cpu / driven.wall:.0%} of the time: it may be what was slow")
        return [mark for mark in marks if mark]

    def _address(self) -> str:
        """The target without its last slash and without /v1."""
        text = (self.target or "").rstrip("/").removesuffix("/v1")
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"target={self.target}: give the server's URL, as http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query:
            raise ValueError("target holds a user, a password or a query; a key is read from executor.api_key_env")
        return text

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise ValueError(f"executor.api_key_env={self.api_key_env}: there is no such environment variable, or it is empty")
        return key


def raw_file(cfg: Config) -> Path | None:
    """Where the answers of a cell are written while it runs: beside its folder; None where the config names none."""
    if cfg.get("out") is None:
        return None
    study: Path = root(cfg["out"]) / cfg["name"]
    return study / f"{cell_name(cfg, digest(lasting(cfg)))}.raw.jsonl"


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", buffering=1) as file:  # line by line: whatever happens, they are there
        yield file
