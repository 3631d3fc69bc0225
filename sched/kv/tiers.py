"""Tiers: bounded memory below the device (CPU, then disk) that KV is swapped to. Counts of blocks, as on the device."""

from __future__ import annotations

from collections.abc import Mapping


class Tiers:
    """`sizes`: blocks by name, the first to be filled first. A request's blocks lie in one tier, or not at all.

    free: blocks by name; free + held = total in each. Raises ValueError for a negative size."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        for name, blocks in sizes.items():
            if blocks < 0:
                raise ValueError(f"swap tier {name} has {blocks} blocks, the least is 0")
        self.sizes = dict(sizes)
        self.free = dict(sizes)

    def take(self, blocks: int) -> str | None:
        """Take `blocks` of the first tier that has them; None when none has. Mutates `free`."""
        for name, free in self.free.items():
            if blocks <= free:
                self.free[name] = free - blocks
                return name
        return None

    def give(self, name: str, blocks: int) -> None:
        """Give `blocks` back. Mutates `free`."""
        self.free[name] += blocks

    def check(self, held: Mapping[str, int]) -> None:
        """Assert that free + held = total in every tier; `held`: blocks by name."""
        for name, total in self.sizes.items():
            free, there = self.free[name], held.get(name, 0)
            if free < 0 or free + there != total:
                raise AssertionError(f"blocks in {name}: free {free} + held {there} != total {total}")
