"""SamplingParams: what a client asks of its tokens beyond how many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .logprobs import MAX_LOGPROBS

_GREEDY_BELOW = 1e-5  # a temperature that leaves no chance to any but the likeliest token, and would overflow


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Raises ValueError for a value out of its range.

    temperature: 0 is greedy (so is anything below 1e-5). top_k: 0 is off. top_p: 1 is off. min_p: 0 is off; else the share of
    the likeliest token's probability that a token needs at least. presence_penalty: taken off the logit of every token
    generated so far; frequency_penalty: once for each time; repetition_penalty: divides the positive logits, and multiplies the
    negative, of tokens in the prompt or the output. seed: None lets the engine choose. stop: strings that end the output, not
    part of it. stop_token_ids: tokens that end it. ignore_eos: the model's own end does not. min_new_tokens: tokens that come
    before any ending token can be chosen and before stop strings are looked for. logprobs: None, or how many of the likeliest
    tokens to report beside the chosen one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_new_tokens: int = 0
    greedy: bool = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)  # greedy and nothing else: an argmax does
    penalised: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}: not a finite number")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}, the least is 0 (greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: from 0 (off) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} is {getattr(self, name)}: from -2 to 2")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: above 0, 1 is off")
        _whole("top_k", self.top_k, 0)
        _whole("min_new_tokens", self.min_new_tokens, 0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{name} is {value!r}: a tuple is wanted")
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop has {text!r}: strings of at least one character are wanted")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        penalised = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        object.__setattr__(self, "greedy", self.temperature < _GREEDY_BELOW)
        object.__setattr__(self, "penalised", penalised)
        plain = self.greedy and not penalised and self.logprobs is None and self.min_new_tokens == 0
        object.__setattr__(self, "plain", plain)


def _whole(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}: not a whole number")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}: " + (f"the least is {least}" if most is None else f"from {least} to {most}"))
