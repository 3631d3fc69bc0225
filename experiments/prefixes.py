"""Prefix names: what a conversation's pieces of prompt are called, so that a cache knows which are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

SPAN = 1 << 24  # pieces a conversation may ever have


class Shared(Sequence[int]):
    """Names of a prompt that begins with `num_shared` pieces of a common one (a system prompt, a group's documents) and goes
    on with pieces of its own: named by their place, answers included, as far as the conversation will ever go."""

    __slots__ = ("common", "num_shared", "own")
    covers_answers = True

    def __init__(self, common: range, num_shared: int, own: range) -> None:
        self.common, self.num_shared, self.own = common, num_shared, own

    def __len__(self) -> int:
        return len(self.own)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, int):
            return self.common[at] if 0 <= at < self.num_shared else self.own[at]
        start, stop, step = at.indices(len(self))
        if step != 1:
            raise ValueError(f"pieces follow one another: no step of {step}")
        if start >= self.num_shared:
            return self.own[start:stop]
        if stop <= self.num_shared:
            return self.common[start:stop]
        return [*self.common[start : self.num_shared], *self.own[self.num_shared : stop]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and self.key == other.key

    def __hash__(self) -> int:
        raise TypeError("prefix names are compared piece by piece, not hashed")

    @property
    def key(self) -> tuple[int, int, int]:
        """(start of the common names, pieces shared, start of its own names): all there is to store."""
        return self.common.start, self.num_shared, self.own.start

    @classmethod
    def of(cls, key: Sequence[int]) -> Shared:
        common, num_shared, own = (int(x) for x in key)
        return cls(range(common, common + SPAN), num_shared, range(own, own + SPAN))


def conversation(number: int) -> range:
    """Names of the pieces of conversation `number` (>= 0), by their place."""
    return range(number * SPAN, (number + 1) * SPAN)


def moved(hashes: Sequence[int], offset: int) -> Sequence[int]:
    """The same names, all `offset` higher."""
    if isinstance(hashes, range):
        return range(hashes.start + offset, hashes.stop + offset)
    if isinstance(hashes, Shared):
        return Shared.of((hashes.common.start + offset, hashes.num_shared, hashes.own.start + offset))
    return [name + offset for name in hashes]


def names_end(hashes: Sequence[int]) -> int:
    """One more than the greatest name; 0 for none."""
    if isinstance(hashes, Shared):
        return max(hashes.common.stop, hashes.own.stop)
    return (hashes.stop if isinstance(hashes, range) else max(hashes) + 1) if len(hashes) else 0
