"""Prompts: what a client wrote, as token ids, in a thread of its own so that no stream waits for a long text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from .errors import Refused, refusing
from .protocol import Turn

T = TypeVar("T")


class Prompt(NamedTuple):
    """ids: what the model reads. text: what the client wrote last, which is what length predictors have learned from.
    answers_before: tokens of each earlier answer, oldest first; None outside a chat."""

    ids: list[int]
    text: str | None
    answers_before: list[int] | None = None


class Prompts:
    """Reads for `model` (a ServedModel). One text at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def completion(self, prompt: str | Sequence[Any]) -> list[Prompt]:
        """One for each text or list of ids. Raises Refused."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise Refused("prompt is an empty list", param="prompt")
        return [await self._run(self._one, each) for each in prompt]

    async def chat(self, messages: Sequence[Turn]) -> Prompt:
        """In the model's chat template, up to where the answer begins. Raises Refused where there is none, or it refuses."""
        return await self._run(self._chat, messages)

    async def tokens(self, text: str, special: bool) -> list[int]:
        return await self._run(self._ids, text, special)

    async def text(self, ids: Sequence[int]) -> str:
        if (most := self._model.vocab_size) <= max(ids, default=0):
            raise Refused(f"token id {max(ids)}; the vocabulary has {most}", param="tokens")
        return await self._run(self._model.decode, ids)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        with refusing():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _one(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(self._ids(prompt, True), prompt)
        known = self._model.tokenizer is not None and max(prompt, default=0) < self._model.vocab_size
        return Prompt(prompt, self._model.decode(prompt) if known else None)

    def _ids(self, text: str, special: bool) -> list[int]:
        if special:
            return list(self._model.encode(text))
        return list(self._tokenizer()(text, add_special_tokens=False).input_ids)

    def _chat(self, messages: Sequence[Turn]) -> Prompt:
        from jinja2 import TemplateError

        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise ValueError(f"{self._model.name} has no chat template: ask /v1/completions")
        turns = [{"role": turn.role, "content": turn.text} for turn in messages]
        try:
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        asked = [turn.text for turn in messages if turn.role == "user"]
        before = [len(self._ids(turn.text, False)) for turn in messages if turn.role == "assistant"]
        return Prompt([int(i) for i in ids], asked[-1] if asked else "", before)

    def _tokenizer(self) -> Any:
        if self._model.tokenizer is None:
            raise ValueError(f"{self._model.name} has no tokenizer: it takes token ids only")
        return self._model.tokenizer
