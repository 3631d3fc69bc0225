"""Served rows: a Dataset as one model can be asked it, prompts as its token ids.

Texts are encoded by the model's own tokenizer and chat template, and counted anew. Rows without text, or a model without
tokenizer, get ids made up for the stated length: alike where the workload names alike pieces, else random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from .dataset import Dataset

if TYPE_CHECKING:
    from lengthwise.engine.native.model import ServedModel

NO_TEXT = "made up: the workload has no text"
NO_TOKENIZER = "made up: the model has no tokenizer"


def servable(dataset: Dataset, model: ServedModel, *, lengths: str = "forced", seed: int = 0) -> Dataset:
    """The same rows with `prompt_ids`; the last answers are kept, so that asking again for the same costs nothing.

    With texts prompt_len is the number of ids and `unit` the tokenizer's name; output_len stays as it is, in the unit it was
    counted in (`notes`). lengths free: output_len and `censored` are the workload's own and say nothing of what the model will
    answer. Raises ValueError on a text of no tokens.
    """
    for known, asked, made in _MADE:
        if known is dataset and asked == (model, lengths, seed):
            return made
    made = _servable(dataset, model, lengths, seed)
    _MADE.append((dataset, (model, lengths, seed), made))
    del _MADE[:-KEPT]
    return made


KEPT = 2
_MADE: list[tuple[Dataset, Any, Dataset]] = []


def _servable(dataset: Dataset, model: ServedModel, lengths: str, seed: int) -> Dataset:
    notes = {"model": model.name, "lengths": lengths, "output_unit": dataset.unit}
    if dataset.prompts is None or model.tokenizer is None:
        ids: Sequence[Sequence[int]] = MadeUp(dataset, model.vocab_size, seed)
        lens, unit = dataset.prompt_len, dataset.unit
        notes["prompt_ids"] = NO_TEXT if dataset.prompts is None else NO_TOKENIZER
    else:
        ids = Encoded.of(model, dataset.prompts)
        lens, unit = ids.lens, f"{model.name} tokens"
        notes["prompt_ids"] = "the texts, in the model's chat template" if chats(model) else "the texts"
        if unit != dataset.unit and lengths == "forced":
            notes["mark"] = f"answers are as long as in the workload, counted in {dataset.unit}, not in {unit}"
    if lens.min() < 1:
        raise ValueError(f"dataset {dataset.name}: the text of row {int(lens.argmin())} is no token of {model.name}")
    return replace(
        dataset, prompt_len=lens, unit=unit, prompt_ids=ids, censored=None if lengths == "free" else dataset.censored,
        notes={**dataset.notes, "served": notes},
    )  # fmt: skip


def named_pieces(dataset: Dataset, hash_tokens: int) -> Dataset:
    """The dataset with the names of its prompts' pieces of `hash_tokens` tokens, by their ids, so that prompts that begin alike
    are known to; as it is where it names pieces already, or its ids are made up."""
    if dataset.block_hashes is not None or not isinstance(dataset.prompt_ids, Encoded):
        return dataset
    return replace(dataset, block_hashes=Named(dataset.prompt_ids, hash_tokens), hash_tokens=hash_tokens)


def chats(model: Any) -> bool:
    return bool(getattr(model.tokenizer, "chat_template", None))


class Rows(Sequence[Sequence[int]]):
    """Rows of whole numbers, made when asked for."""

    @overload
    def __getitem__(self, row: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return [self.row(i) for i in range(*row.indices(len(self)))]
        return self.row(int(row))

    def __iter__(self) -> Iterator[Sequence[int]]:
        return (self.row(i) for i in range(len(self)))

    def row(self, row: int) -> Sequence[int]:
        raise NotImplementedError


class Encoded(Rows):
    """Ids of texts, one after the other in `flat` (T,) int32; row i is flat[starts[i]:starts[i + 1]]."""

    def __init__(self, flat: NDArray[np.int32], starts: NDArray[np.int64]) -> None:
        self.flat, self.starts = flat, starts

    @classmethod
    def of(cls, model: Any, texts: Sequence[str]) -> Encoded:
        parts = [np.asarray(model.encode_chat(text), dtype=np.int32) for text in texts]
        starts = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))
        return cls(np.concatenate(parts), starts)

    @property
    def lens(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, row: int) -> list[int]:
        return list(self.flat[self.starts[row] : self.starts[row + 1]].tolist())


class MadeUp(Rows):
    """Ids for prompts of which only the length is known, and the names of their pieces where there are any. Kept once made."""

    def __init__(self, dataset: Dataset, vocab_size: int, seed: int) -> None:
        self._lens, self._names, self._piece = dataset.prompt_len, dataset.block_hashes, dataset.hash_tokens
        self._vocab_size, self._seed = vocab_size, seed
        self._made: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._lens)

    def row(self, row: int) -> list[int]:
        if row not in self._made:
            from lengthwise.engine.native.names import synthetic_ids

            names = () if self._names is None else self._names[row]
            ids = synthetic_ids(names, self._piece, int(self._lens[row]), self._vocab_size, row, self._seed)
            self._made[row] = ids.tolist()
        return self._made[row]


class Named(Rows):
    """Names of the whole pieces of each row of `ids`."""

    def __init__(self, ids: Sequence[Sequence[int]], hash_tokens: int) -> None:
        self._ids, self._piece = ids, hash_tokens

    def __len__(self) -> int:
        return len(self._ids)

    def row(self, row: int) -> Sequence[int]:
        from lengthwise.engine.native.names import name_pieces

        return name_pieces(self._ids[row], self._piece)
