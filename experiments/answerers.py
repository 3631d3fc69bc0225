"""Answerers: who answers the prompts that `lengthwise collect` asks: our engine, or a server over HTTP.

Both draw as the model's makers or the user say: a field of `sampling` that is null is the model's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import Outcome, Plan, Request, Scheduler, serve

from .bench.answer import CONTENT, Answer
from .bench.driving import drive, introduced
from .collect import Asking, Feed, Told
from .dataset import Dataset
from .native_stage import NativeStage
from .nodes import Config, load_policy, load_scheduler, new_kv
from .remote_stage import RemoteStage
from .served import chats, servable

OWN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # of a model that says nothing
SPARE = 1.02  # KV over what requests need: the pool's watermark


class NativeAnswerer:
    """Our engine, as the stage of `cfg` loads it, with the policy, batching, KV and limits of `cfg`. sampling: fields of
    SamplingParams, among OWN. seed: of ids made up where the model has no tokenizer. Raises ValueError for another field."""

    libraries: tuple[str, ...] = ("torch", "transformers", "tokenizers")

    def __init__(self, cfg: Config, stage: NativeStage, sampling: Mapping[str, Any], seed: int = 0) -> None:
        if cfg["limits"].get("clip"):
            raise ValueError("limits.clip=true would cut answers short: collect leaves out what does not fit")
        if unknown := sorted(set(sampling) - OWN.keys()):
            raise ValueError(f"sampling.{unknown[0]}: choose of {', '.join(OWN)}")
        self._cfg, self._stage, self._seed = cfg, stage, seed
        self._engine = stage.loaded()
        given = {name: value for name, value in sampling.items() if value is not None}
        self._sampling = {**OWN, **own_sampling(self._engine.model), **given}

    def asked(self, seed: int, max_new_tokens: int) -> dict[str, Any]:
        model = self._engine.model
        return {
            "model": model.name, "tokenizer": tokenizer_facts(model.tokenizer),
            "chat_template": model.tokenizer is not None and chats(model), "sampling": self._sampling, "seed": seed,
            "max_new_tokens": max_new_tokens,
            "engine": {
                "name": "lengthwise", "dtype": str(model.dtype).removeprefix("torch."), "kv_dtype": self._engine.kv_dtype,
                "linears": self._stage.linears,
            },
        }  # fmt: skip

    def too_long(self, dataset: Dataset, max_new_tokens: int) -> NDArray[np.bool_]:
        return np.asarray(self._served(dataset).prompt_len + max_new_tokens > self._stage.max_model_len(self._cfg))

    def answer(self, asking: Asking, told: Told) -> None:
        from lengthwise.engine.native.clock import WallClock
        from lengthwise.engine.native.sampling import SamplingParams

        limits, params = self._cfg["limits"], SamplingParams(**self._sampling)
        served = self._served(asking.dataset)
        longest = max(int(served.prompt_len[asking.row(int(rid))]) for rid in asking.rids) + asking.max_new_tokens
        most = asking.most(limits["max_num_seqs"])
        size = self._cfg["kv"].get("block_size", 16)
        kv = new_kv(self._cfg, min(self._stage.pool_tokens(self._cfg), int(SPARE * most * (longest + 2 * size))))
        served = self._stage.named(served, kv)
        if served.block_hashes is not None:
            kv.use_hashes(served.hash_tokens)
        names, ids = served.block_hashes, served.prompt_ids
        assert ids is not None
        born: dict[int, float] = {}

        def request(rid: int) -> Request:
            row, born[rid] = asking.row(rid), clock.now
            return Request(
                rid, 0.0, int(served.prompt_len[row]), asking.max_new_tokens, prompt_ids=ids[row],
                block_hashes=None if names is None else names[row],
            )  # fmt: skip

        clock = WallClock()
        executor = self._engine.executor(
            kv, clock, sampling=lambda request: replace(params, seed=asking.seed(request.rid)), max_num_seqs=most,
            depth=self._stage.depth,
        )  # fmt: skip
        scheduler = load_scheduler(self._cfg, load_policy(self._cfg), kv, self._stage.max_model_len(self._cfg))

        def ended(request: Request, answer: Any, now: float) -> None:
            took = now - born.pop(request.rid)
            if asking.words is not None:
                text = self._engine.model.decode(answer.output_ids) if answer is not None else ""
                asking.words(request.rid, text, took, min(most, len(asking.rids)))

        serve(Feed(asking.rids, request, most), scheduler, executor, clock, _Teller(executor, told, ended))

    def _served(self, dataset: Dataset) -> Dataset:
        return servable(dataset, self._engine.model, lengths="free", seed=self._seed)


class _Teller:
    """An Observer that tells of each answer, and lets the executor forget it. ended: told first, of what it has kept."""

    def __init__(self, executor: Any, told: Told, ended: Callable[[Request, Any, float], None]) -> None:
        self._executor, self._told, self._ended = executor, told, ended

    def step(self, start: float, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> None: ...

    def ended(self, request: Request, num_tokens: int, reason: str, now: float) -> None:
        self._ended(request, self._executor.forget(request), now)
        failed = reason.startswith("failed")  # and would again: the same tokens come by the same seed
        self._told(request.rid, request.prompt_len, num_tokens, f"rejected: {reason}" if failed else reason)


class ServerAnswerer:
    """A server that `stage` reaches. sampling: fields of every request; what is null is not sent, and the server's own."""

    libraries: tuple[str, ...] = ("aiohttp",)

    def __init__(self, stage: RemoteStage, sampling: Mapping[str, Any]) -> None:
        self._stage = stage
        self._connection = stage.connection()
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._model, about = introduced(self._connection)
        self._version = about.get("version")

    @property
    def model(self) -> str:
        """As the server calls it."""
        return self._model

    def asked(self, seed: int, max_new_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model, "tokenizer": None, "chat_template": self._stage.route == "chat", "sampling": self._sampling,
            "seed": seed, "max_new_tokens": max_new_tokens, "body": dict(self._stage.body),
            "engine": {"name": "a server", "version": self._version},
        }  # fmt: skip

    def too_long(self, dataset: Dataset, max_new_tokens: int) -> NDArray[np.bool_]:
        return np.zeros(len(dataset), np.bool_)  # it says so when it is asked

    def answer(self, asking: Asking, told: Told) -> None:
        prompts = asking.dataset.prompts
        assert prompts is not None

        def request(rid: int) -> Request:
            text = prompts[asking.row(rid)]
            return Request(rid, 0.0, max(len(text), 1), asking.max_new_tokens, prompt=text)

        def ended(request: Request, answer: Answer, reason: str, now: float) -> None:
            if reason.startswith("rejected: HTTP 429"):
                reason = reason.replace("rejected", "failed", 1)  # for lack of room, and not for good
            if reason in ("stop", "length") and (answer.count is None or not answer.prompt_count):
                reason = "failed: the server does not count tokens (no usage)"
            if asking.words is not None:
                asking.words(request.rid, getattr(answer, "words", ""), now - answer.sent, min(most, len(asking.rids)))
            told(request.rid, answer.prompt_count or 0, answer.num_tokens, reason)

        most = asking.most(self._connection.concurrency or 1)
        bodies = _Bodies(self._stage.route, {**self._stage.body, **self._sampling}, asking)
        drive(self._connection, bodies.of_model, Feed(asking.rids, request, most), ended, answer=Worded)


class Worded(Answer):
    """An Answer that keeps what is said."""

    __slots__ = ("words",)

    def __init__(self) -> None:
        super().__init__()
        self.words = ""

    def take(self, event: Mapping[str, Any], now: float) -> None:
        super().take(event, now)
        for choice in event.get("choices") or ():
            said = choice.get("delta") or choice
            self.words += "".join(str(said.get(name) or "") for name in CONTENT)


@dataclass(frozen=True)
class _Bodies:
    """What is sent for a request."""

    route: str
    fields: Mapping[str, Any]
    asking: Asking
    model: str = ""

    def of_model(self, model: str) -> _Bodies:
        return _Bodies(self.route, self.fields, self.asking, model)

    def of(self, request: Request) -> dict[str, Any]:
        text = request.prompt
        said = {"messages": [{"role": "user", "content": text}]} if self.route == "chat" else {"prompt": text}
        return {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True}, **said,
            "max_tokens": request.max_new_tokens, "seed": self.asking.seed(request.rid), **self.fields,
        }  # fmt: skip


def own_sampling(model: Any) -> dict[str, Any]:
    """What the model's generation_config says of sampling, by the names of SamplingParams."""
    config = getattr(model.model, "generation_config", None)
    said = {name: getattr(config, name, None) for name in OWN}
    return {name: value for name, value in said.items() if value is not None}


def tokenizer_facts(tokenizer: Any) -> dict[str, Any] | None:
    """What tells one tokenizer from another, wherever it lies: its kind, and hashes of its vocabulary and chat template."""
    if tokenizer is None:
        return None
    return {
        "class": type(tokenizer).__name__, "size": len(tokenizer), "sha": _sha(tokenizer.get_vocab()),
        "chat_template": _sha(tokenizer.chat_template) if tokenizer.chat_template else None,
    }  # fmt: skip


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
