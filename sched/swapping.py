"""Swapping: whose KV lies in which tier, and the copies that no plan has told yet.

Copies are synchronous with the step of the plan that tells them: out first, then in, then the step computes (vLLM before V1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .kv import Tiers
from .plan import DEVICE, Swap
from .request import Request


class Swapping:
    """The requests swapped out, with what their tier keeps of them. num_outs, num_ins: requests copied; blocks and tokens
    beside. num_full: victims for whom no tier had room, so that they were evicted and are computed again."""

    def __init__(self, sizes: Mapping[str, int], block_size: int) -> None:
        self.tiers = Tiers({name: tokens // block_size for name, tokens in sizes.items()})
        self.there: dict[Request, tuple[str, int]] = {}  # (tier, blocks)
        self.untold: list[Swap] = []
        self.num_outs = self.num_ins = self.num_full = 0
        self.blocks_out = self.blocks_in = 0
        self.tokens_out = self.tokens_in = 0

    def take(self, req: Request, blocks: int, tokens: int, table: Sequence[int] = ()) -> bool:
        """Copy the `blocks` with `tokens` tokens of `req` out, the first of its `table` where ids are kept. False when no tier
        has room: then nothing has happened, but for the count."""
        tier = self.tiers.take(blocks)
        if tier is None:
            self.num_full += 1
            return False
        self.there[req] = tier, blocks
        self.untold.append(Swap(req, blocks, DEVICE, tier, table[:blocks]))
        self.num_outs += 1
        self.blocks_out += blocks
        self.tokens_out += tokens
        return True

    def bring(self, req: Request, cached_blocks: int, tokens: int, table: Sequence[int] = ()) -> None:
        """Copy `req` back in, all but the blocks that the device still has (a copy of none tells that the tier's may go);
        `tokens`: those in the copied blocks, if any. table: its blocks on the device, where ids are kept."""
        tier, blocks = self.there.pop(req)
        self.tiers.give(tier, blocks)
        missing = max(blocks - cached_blocks, 0)
        self.untold.append(Swap(req, missing, tier, DEVICE, table[blocks - missing : blocks]))
        self.num_ins += 1
        self.blocks_in += missing
        self.tokens_in += tokens if missing else 0  # else they are copied on the device

    def drop(self, req: Request) -> None:
        """`req` has ended: free what its tier keeps, and forget a copy that has not been told."""
        self.tiers.give(*self.there.pop(req))
        self.untold = [copy for copy in self.untold if copy.request is not req]

    def tell(self) -> list[Swap]:
        """The copies for the plan that is made now, outs first."""
        told, self.untold = self.untold, []
        return sorted(told, key=lambda copy: copy.target == DEVICE)

    def check(self) -> None:
        """Assert that free + held = total in every tier."""
        held: dict[str, int] = {}
        for tier, blocks in self.there.values():
            held[tier] = held.get(tier, 0) + blocks
        self.tiers.check(held)
