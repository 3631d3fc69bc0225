"""Generation: what the engine knows of one request beyond the scheduler: its tokens, how they are drawn, and when they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lengthwise.sched import Request
from lengthwise.sched.plan import FinishReason

from .logprobs import Logprobs
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .text import Text

GREEDY = SamplingParams()


class Generation:
    """One request's tokens. `tokens`: prompt and answer. A token that ends the answer and is the last allowed counts as stop.

    answer_len: the answer ends after so many tokens, whatever they are (replay of a trace); None: an end token, a stop string
    or max_new_tokens ends it. text: gives text as tokens come, and finds stop strings; None: nobody wants text.
    """

    __slots__ = ("_ends", "_last", "answer_len", "logprobs", "num_prompt", "params", "request", "seed", "text", "tokens")

    def __init__(
        self,
        request: Request,
        prompt_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        end_ids: frozenset[int] = frozenset(),
        answer_len: int | None = None,
        text: Text | None = None,
    ) -> None:
        self.request = request
        self.params = params
        self.seed = seed if params.seed is None else params.seed
        self.answer_len = answer_len
        self.text = text
        self.num_prompt = len(prompt_ids)
        self.tokens = [int(i) for i in prompt_ids]
        self.logprobs: list[Logprobs] = []
        if answer_len is not None or params.ignore_eos:
            end_ids = frozenset()
        self._ends = end_ids | frozenset(params.stop_token_ids) if answer_len is None else end_ids
        cap = request.max_new_tokens
        self._last = self.num_prompt + (cap if answer_len is None else min(answer_len, cap))

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.tokens[: self.num_prompt]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def goes_on(self) -> bool:
        """The answer does not end with its next token for its length, and that token is the greatest of the logits, as they
        are. It may end for what the token is."""
        return self.params.plain and len(self.tokens) + 1 < self._last

    def take(self, token: int) -> FinishReason | None:
        """The next token of the answer; returns why the answer ends with it, if it does."""
        self.tokens.append(token)
        stopped = token in self._ends and self.num_output > self.params.min_new_tokens
        if self.text is not None and self.text.take(token, stopped):
            stopped = True
        if stopped:
            return "stop"
        if len(self.tokens) < self._last:
            return None
        return "stop" if self.answer_len is not None and self.answer_len <= self.request.max_new_tokens else "length"
