"""Body: how a request of the workload is put to a server: its prompt, how long its answer is to be, what only ours takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lengthwise.engine.native.names import synthetic_ids
from lengthwise.sched import SLO, Request

from ..dataset import Workload

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LENGTHS = ("forced", "replay", "free")
IDS = (32, 128)  # made-up prompts: ids that every vocabulary has, above those with a meaning of their own


@dataclass(frozen=True)
class Bodies:
    """Makes the bodies of `workload`'s requests, one when it is asked for. Fields as of RemoteStage."""

    workload: Workload
    model: str
    route: str = "completions"
    lengths: str = "forced"
    fields: Mapping[str, Any] = field(default_factory=dict)
    continuous_usage: bool = False
    extensions: bool = False
    slo: SLO = field(default_factory=SLO)
    seed: int = 0

    def of(self, request: Request) -> dict[str, Any]:
        """The JSON of one request."""
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self.continuous_usage else {})
        out: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": options}
        if self.route == "chat":
            out["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            out["prompt"] = self._ids(request) if request.prompt is None else request.prompt
        out["max_tokens"] = request.max_new_tokens
        length = int(self.workload.dataset.output_len[self.workload.rows[request.rid]])
        if self.lengths == "forced":
            out |= {"max_tokens": min(length, request.max_new_tokens), "ignore_eos": True}
        elif self.lengths == "replay":
            out["answer_len"] = min(length, request.max_new_tokens)
        if self.extensions:
            out |= self._extensions(request)
        return {**out, **self.fields}

    def _ids(self, request: Request) -> list[int]:
        names, first = request.block_hashes or (), IDS[0]
        row = int(self.workload.rows[request.rid])
        piece = self.workload.dataset.hash_tokens
        ids: list[int] = synthetic_ids(names, piece, request.prompt_len, IDS[1], row, self.seed, first).tolist()
        return ids

    def _extensions(self, request: Request) -> dict[str, Any]:
        """What the client knows of a request and our server takes; what is not known is left out."""
        slo = request.slo or self.slo
        limits = {name: limit for name in ("ttft", "tpot", "e2e") if (limit := getattr(slo, name)) is not None}
        said = {
            "priority": request.priority or None, "client": request.client, "session": request.session, "slo": limits or None,
            "timeout": request.timeout,
            "predicted_len": None if request.prediction is None else request.prediction.mean(),
        }  # fmt: skip
        return {name: value for name, value in said.items() if value is not None}
