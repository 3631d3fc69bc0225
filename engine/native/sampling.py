"""Sampler: from logits to tokens, for a batch whose requests each ask for something else.

A feature costs only the rows that use it, and what a row gets depends on that row alone. Greedy rows that ask for nothing more
take one argmax together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .draw import draw_cut, draw_whole, on_host
from .greatest import Greatest, greatest
from .logprobs import Logprobs, raw_logprobs
from .params import SamplingParams
from .philox import uniforms

__all__ = ["Row", "Sampled", "Sampler", "SamplingParams"]


class Row(Protocol):
    """What is read of a request that a row of logits belongs to. num_output: tokens generated. prompt_ids and output_ids are
    read for penalties alone. seed: the request's own, else one chosen for it for good."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def num_output(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(slots=True)
class Sampled:
    """One token for each row; -1 for the rows in `failures`, which says why. logprobs: of the rows that asked, else None."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    failures: dict[int, str] = field(default_factory=dict)


class Sampler:
    """vocab_size: tokens that can be chosen; wider logits are padding. eos_ids: what ends a request that does not ignore it."""

    def __init__(self, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}, the least is 1")
        self.vocab_size = vocab_size
        self.eos_ids = tuple(sorted(eos_ids))
        self._buffer = torch.empty(0)  # of weights; megabytes taken anew in each step would cost more than the drawing

    def greatest(self, logits: Tensor) -> Greatest:
        """The greatest of each row of logits (E, V*) that can be chosen; see greatest.py."""
        if logits.shape[1] < self.vocab_size:
            raise ValueError(f"logits {tuple(logits.shape)} for a vocabulary of {self.vocab_size}")
        return greatest(logits[:, : self.vocab_size])

    def sample(self, logits: Tensor, rows: Sequence[Row], best: tuple[list[int], dict[int, str]] | None = None) -> Sampled:
        """Choose a token for each row of logits (E, V*) fp32, on any device; `logits` is left as it is. best: what `greatest`
        has read of the rows; logits are then looked at only if a row asks for more than its greatest.

        In this order: ending tokens are barred while there are fewer than min_new_tokens; repetition, then frequency and
        presence penalty; greedy rows take the greatest logit (of equal ones the lowest id); the others divide by temperature
        and cut by top-k, top-p and min-p, each on what the one before left over (as transformers does; vLLM cuts by min-p
        first); then the row's uniform number picks the token (`draw.py`). Log probabilities are of the logits as they came. A
        row whose greatest logit is not finite fails alone.
        """
        token_ids, failures = self.greatest(logits).read() if best is None else best
        if len(token_ids) != len(rows):
            raise ValueError(f"logits {tuple(logits.shape)} for {len(rows)} rows and a vocabulary of {self.vocab_size}")
        sampled = Sampled(token_ids, [None] * len(rows), failures)
        params = [row.params for row in rows]
        if not all(p.plain for p in params):
            with torch.inference_mode():
                self._choose(logits[:, : self.vocab_size], rows, params, sampled)
        return sampled

    def _choose(self, logits: Tensor, rows: Sequence[Row], params: list[SamplingParams], sampled: Sampled) -> None:
        """Mutates `sampled`: the rows that are not plain."""
        failures = sampled.failures
        asking = [i for i, p in enumerate(params) if not p.plain and i not in failures]
        changed = [i for i in asking if params[i].penalised or params[i].min_new_tokens > rows[i].num_output]
        adjusted = self._adjust(logits, changed, rows, sampled) if changed else None
        drawn = [i for i in asking if not params[i].greedy and i not in failures]
        if drawn:
            self._draw(logits, drawn, rows, sampled, changed, adjusted)
        wanted = [i for i in asking if params[i].logprobs is not None and i not in failures]
        if wanted:
            chosen = [sampled.token_ids[i] for i in wanted]
            num_top = [params[i].logprobs or 0 for i in wanted]
            for i, entry in zip(wanted, raw_logprobs(_take(logits, wanted), chosen, num_top), strict=True):
                sampled.logprobs[i] = entry

    def _adjust(self, logits: Tensor, changed: list[int], rows: Sequence[Row], sampled: Sampled) -> Tensor:
        """Logits (len(changed), V) after barring and penalties. Mutates `sampled`: the greedy choice of these rows."""
        part = _take(logits, changed)
        barred = [(n, token) for n, i in enumerate(changed) for token in self._barred(rows[i])]
        if barred:
            at = torch.tensor(barred, device=part.device)
            part[at[:, 0], at[:, 1]] = -math.inf
        penalised = [(n, rows[i]) for n, i in enumerate(changed) if rows[i].params.penalised]
        if penalised:
            _penalise(part, penalised)
        token_ids, failures = greatest(part).read()
        for n, i in enumerate(changed):
            sampled.token_ids[i] = token_ids[n]
            if n in failures:
                sampled.failures[i] = failures[n] + " after penalties and barred tokens"
        return part

    def _barred(self, row: Row) -> Sequence[int]:
        params = row.params
        if params.min_new_tokens <= row.num_output:
            return ()
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self.eos_ids
        return [token for token in ends if token < self.vocab_size]

    def _draw(
        self,
        logits: Tensor,
        drawn: list[int],
        rows: Sequence[Row],
        sampled: Sampled,
        changed: list[int],
        adjusted: Tensor | None,
    ) -> None:
        """Mutates `sampled`: the tokens of the rows `drawn`."""
        cut = [i for i in drawn if 0 < rows[i].params.top_k < self.vocab_size or rows[i].params.top_p < 1]
        num_whole = len(drawn) - len(cut)
        drawn = sorted(set(drawn).difference(cut)) + cut
        params = [rows[i].params for i in drawn]
        weights = self._copy(logits, drawn)
        if adjusted is not None:
            place = {i: n for n, i in enumerate(drawn)}
            both = [(place[i], n) for n, i in enumerate(changed) if i in place]
            if both:
                at = torch.tensor(both, device=weights.device)
                weights[at[:, 0]] = adjusted[at[:, 1]]
        weights -= weights.amax(-1, keepdim=True)
        if any(p.temperature != 1 for p in params):
            weights /= _column([p.temperature for p in params], weights)
        _exp(weights)
        uniform = uniforms([rows[i].seed for i in drawn], [rows[i].num_output for i in drawn])
        top_k, top_p, min_p = [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params]
        tokens: list[int] = []
        if num_whole:
            whole = weights[:num_whole]
            if any(min_p[:num_whole]):  # the greatest weight is 1
                whole.masked_fill_(whole < _column(min_p[:num_whole], whole), 0.0)
            tokens += draw_whole(whole, uniform[:num_whole])
        if cut:
            part = slice(num_whole, None)
            tokens += draw_cut(weights[part], top_k[part], top_p[part], min_p[part], uniform[part])
        for i, token in zip(drawn, tokens, strict=True):
            sampled.token_ids[i] = token

    def _copy(self, logits: Tensor, rows: list[int]) -> Tensor:
        """A copy (len(rows), vocab_size) of these rows in the buffer, until the next call."""
        size = len(rows) * self.vocab_size
        if self._buffer.numel() < size or self._buffer.device != logits.device:
            self._buffer = torch.empty(size, dtype=torch.float32, device=logits.device)
        copy = self._buffer[:size].view(len(rows), self.vocab_size)
        return torch.index_select(logits, 0, torch.tensor(rows, device=logits.device), out=copy)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _exp(weights: Tensor) -> None:
    """Mutates weights."""
    if on_host(weights):
        np.exp(weights.numpy(), out=weights.numpy())  # twice as fast as torch's
    else:
        weights.exp_()


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    """A copy of these rows."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _penalise(logits: Tensor, rows: Sequence[tuple[int, Row]]) -> None:
    """Penalties of the rows (place, row) on logits (n, V). Mutates logits. Only tokens that occurred are touched."""
    flat, width = logits.view(-1), logits.shape[1]
    repetition, frequency, presence = np.ones((3, len(logits)), dtype=np.float32)
    outputs, seen = [np.empty(0, dtype=np.int64)], []
    for n, row in rows:
        p = row.params
        repetition[n], frequency[n], presence[n] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        output = np.asarray(row.output_ids, dtype=np.int64) + n * width
        if p.repetition_penalty != 1:
            seen += [np.asarray(row.prompt_ids, dtype=np.int64) + n * width, output]
        if p.frequency_penalty or p.presence_penalty:
            outputs.append(output)
    if seen:
        tokens = np.concatenate(seen)  # one that occurs twice is read twice and then written twice, the same
        at = torch.from_numpy(tokens).to(logits.device)
        factor = torch.from_numpy(repetition[tokens // width]).to(logits.device)
        value = flat[at]
        flat[at] = torch.where(value > 0, value / factor, value * factor)
    tokens, times = np.unique(np.concatenate(outputs), return_counts=True)
    if len(tokens):
        of = tokens // width
        less = torch.from_numpy(frequency[of] * times.astype(np.float32) + presence[of])
        flat[torch.from_numpy(tokens).to(logits.device)] -= less.to(logits.device)
