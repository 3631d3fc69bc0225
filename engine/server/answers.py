"""Answers in OpenAI's shapes: of a completion or a chat, whole or in chunks. One class a protocol; a step makes one chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from ..native.logprobs import Logprobs
from .answering import finish_reason
from .streams import Delta

Json = dict[str, Any]
LEAST = -9999.0  # JSON has no infinity
Spell = Callable[[int], str]  # token id -> its text


class Shape(Protocol):
    """How one protocol writes the answer `index` of a call."""

    kind: str  # of a whole answer
    chunk_kind: str
    prefix: str  # of ids

    def piece(self, index: int, delta: Delta, first: bool) -> Json:
        """The choice of a chunk. first: nothing of this answer was sent before."""
        ...

    def whole(self, index: int, delta: Delta) -> Json:
        """The choice of a whole answer: all its deltas in one."""
        ...


@dataclass(frozen=True)
class CompletionShape:
    """echo: the text of each answer's prompt, before it; None: not asked for."""

    spell: Spell
    logprobs: bool = False
    echo: Sequence[str] | None = None
    token_ids: bool = False
    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def piece(self, index: int, delta: Delta, first: bool) -> Json:
        before = self.echo[index] if self.echo is not None and first else ""
        out: Json = {"index": index, "text": before + delta.text, "logprobs": None}
        if self.logprobs:
            out["logprobs"] = _columns(delta.logprobs, self.spell)
        out["finish_reason"] = finish_reason(delta.reason)
        if self.token_ids:
            out["token_ids"] = delta.token_ids
        return out

    def whole(self, index: int, delta: Delta) -> Json:
        return self.piece(index, delta, first=True)


@dataclass(frozen=True)
class ChatShape:
    spell: Spell
    logprobs: bool = False
    token_ids: bool = False
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def piece(self, index: int, delta: Delta, first: bool) -> Json:
        role = {"role": "assistant"} if first else {}  # not before there is a token: clients stop TTFT at the first chunk
        return {"index": index, "delta": {**role, "content": delta.text}, **self._rest(delta)}

    def whole(self, index: int, delta: Delta) -> Json:
        return {"index": index, "message": {"role": "assistant", "content": delta.text}, **self._rest(delta)}

    def _rest(self, delta: Delta) -> Json:
        content = {"content": [_entry(each, self.spell) for each in delta.logprobs]} if self.logprobs else None
        out: Json = {"logprobs": content, "finish_reason": finish_reason(delta.reason)}
        if self.token_ids:
            out["token_ids"] = delta.token_ids
        return out


def joined(deltas: Sequence[Delta]) -> Delta:
    """All of one answer as one."""
    return Delta(
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        [each for delta in deltas for each in delta.logprobs],
        deltas[-1].reason,
        deltas[0].time,
    )


def speller(model: Any) -> Spell:
    """How tokens are spelled where logprobs name them: by their own text, or by their ids where the model has no tokenizer."""
    if model.tokenizer is None:
        return lambda token: f"token_id:{token}"
    return lru_cache(maxsize=2**16)(lambda token: str(model.tokenizer.decode([token], skip_special_tokens=False)))


def _entry(given: Logprobs, spell: Spell) -> Json:
    top = [_token(token, logprob, spell) for token, logprob in given.top]
    return {**_token(given.token_id, given.logprob, spell), "top_logprobs": top}


def _token(token: int, logprob: float, spell: Spell) -> Json:
    text = spell(token)
    part = "\ufffd" in text  # of a character: its bytes are not those of this text
    return {"token": text, "logprob": _finite(logprob), "bytes": None if part else list(text.encode())}


def _columns(given: Sequence[Logprobs], spell: Spell) -> Mapping[str, Any]:
    tokens = [spell(each.token_id) for each in given]
    top = [{spell(token): _finite(logprob) for token, logprob in ((each.token_id, each.logprob), *each.top)} for each in given]
    return {"tokens": tokens, "token_logprobs": [_finite(each.logprob) for each in given], "top_logprobs": top}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
