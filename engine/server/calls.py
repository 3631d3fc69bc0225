"""Calls: from a body and its headers to what the engine is asked: one Call for each answer, checked against the limits."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.sched import SLO

from ..native.sampling import SamplingParams
from .errors import Refused, refusing
from .prompts import Prompt
from .protocol import MAX_NAME, Asked, ChatBody, CompletionBody
from .request_id import REQUEST_ID, own_id
from .settings import Settings
from .traces import trace_context

DEFAULT_COMPLETION = 16  # tokens of a completion that does not say: OpenAI's own default
CLIENT = "x-gateway-inference-fairness-id"
SLO_HEADERS = {"ttft": "x-slo-ttft-ms", "tpot": "x-slo-tpot-ms"}


@dataclass(frozen=True)
class Call:
    """One answer that is asked for; `fields` are further ones of Service.submit."""

    key: str
    prompt: Prompt
    max_new_tokens: int
    params: SamplingParams
    fields: Mapping[str, Any]


def check_num(num: int, settings: Settings) -> None:
    """Raises Refused for more answers than one call may ask for. To be called before anything is made of the prompts."""
    if num > settings.max_n:
        raise Refused(f"{num} answers are asked for in one call, the most is {settings.max_n}", param="n")


def request_key(headers: Mapping[str, str]) -> str:
    """The client's own id of a request, or a new one. Raises Refused for one that no log line should hold."""
    if REQUEST_ID not in headers:
        return uuid.uuid4().hex
    if (key := own_id(headers)) is None:
        raise Refused(f"{REQUEST_ID} must be 1 to {MAX_NAME} printable ASCII characters", param=REQUEST_ID)
    return key


def calls(
    key: str, body: Asked, headers: Mapping[str, str], prompts: Sequence[Prompt], settings: Settings, max_model_len: int
) -> list[Call]:
    """The n answers to each prompt, in the order of OpenAI's `index`: several are KEY-0, KEY-1, ..., with seeds of their own.

    Raises Refused for whatever is over a limit, naming what was given and what is allowed."""
    num = len(prompts) * body.n
    with refusing():
        params = [sampling(body, settings, i) for i in range(body.n)]
    fields = request_fields(body, headers)
    out: list[Call] = []
    for prompt in prompts:
        cap = answer_cap(body, len(prompt.ids), settings, max_model_len)
        for each in params:
            own = key if num == 1 else f"{key}-{len(out)}"
            out.append(Call(own, prompt, cap, each, fields))
    return out


def answer_cap(body: Asked, given: int, settings: Settings, max_model_len: int) -> int:
    """Tokens that the answer may have. Raises Refused for a prompt that leaves no room for it."""
    wanted = body.max_completion_tokens if isinstance(body, ChatBody) else None
    wanted = body.max_tokens if wanted is None else wanted
    chat = isinstance(body, ChatBody)
    if wanted is None:
        wanted = max(1, min(settings.default_max_tokens, max_model_len - given)) if chat else DEFAULT_COMPLETION
    most = max_model_len - 1 if settings.max_prompt_tokens is None else settings.max_prompt_tokens
    if given > most or given + wanted > max_model_len:
        limit = f"; a prompt may have {most}" if given > most else ""
        raise Refused(
            f"the prompt has {given} tokens and the answer is asked to have up to {wanted}: "
            f"together they may have {max_model_len}{limit}",
            param="messages" if chat else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    return wanted


def sampling(body: Asked, settings: Settings, number: int) -> SamplingParams:
    """Of the `number`-th answer to a prompt. Raises ValueError for values out of their range, Refused for too many."""
    stops = body.stops
    if len(stops) > settings.max_stops:
        raise Refused(f"{len(stops)} stop strings, the most is {settings.max_stops}", param="stop")
    if any(len(stop) > settings.max_stop_len for stop in stops):
        raise Refused(f"a stop string is longer than {settings.max_stop_len} characters", param="stop")
    return SamplingParams(
        temperature=body.temperature, top_p=body.top_p, top_k=max(body.top_k, 0), min_p=body.min_p,
        presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty, seed=None if body.seed is None else body.seed + number,
        stop=tuple(stops), stop_token_ids=tuple(body.stop_token_ids), ignore_eos=body.ignore_eos,
        min_new_tokens=body.min_tokens, logprobs=num_logprobs(body),
    )  # fmt: skip


def num_logprobs(body: Asked) -> int | None:
    """Likeliest tokens to report beside each chosen one; None: no logprobs at all."""
    if isinstance(body, CompletionBody):
        if body.echo and body.logprobs is not None:
            raise Refused("logprobs of a prompt are not served: echo and logprobs exclude each other", param="logprobs")
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused("top_logprobs wants logprobs=true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def request_fields(body: Asked, headers: Mapping[str, str]) -> dict[str, Any]:
    """What the scheduler and the predictor are told. The body's word stands before a header's."""
    said = {} if body.slo is None else {name: value for name, value in body.slo if value is not None}
    objectives = {**{name: ms for name in SLO_HEADERS if (ms := _seconds(headers, name)) is not None}, **said}
    return {
        "client": body.client or headers.get(CLIENT, "")[:MAX_NAME] or body.user, "priority": body.priority,
        "slo": SLO(**objectives) if objectives else None, "timeout": body.timeout, "predicted_len": body.predicted_len,
        "answer_len": body.answer_len, "session": body.session, "trace": trace_context(headers),
    }  # fmt: skip


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    header = SLO_HEADERS[name]
    if (text := headers.get(header)) is None:
        return None
    try:
        value = float(text) / 1e3
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise Refused(f"{header} must be a number of milliseconds above 0", param=header)
    return value
