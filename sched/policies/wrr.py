"""Weighted round robin over priority classes or clients: so many admissions a turn (Katevenis et al., IEEE JSAC 1991)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Literal

from ..request import Request
from .drr import DRR
from .sharing import Client


class WRR(DRR):
    """In each round of those that wait, a class of weight w is admitted w times (of weight 1.5: three times in two rounds).

    by: whether a class is a `priority`, whose value then counts no further, or a `client`. weights: of classes; else that of
    a class's first request. Deficit round robin with requests for tokens.
    """

    def __init__(self, by: Literal["priority", "client"] = "priority", weights: Mapping[Hashable, float] | None = None) -> None:
        if by not in ("priority", "client"):
            raise ValueError(f"by={by!r}: choose priority or client")
        super().__init__(1.0, 0.0, 0.0, weights)
        self.by = by
        self.needs = frozenset({"client"}) if by == "client" else frozenset()

    def group(self, req: Request) -> Hashable:
        return req.client if self.by == "client" else req.priority

    def cost(self, client: Client) -> float:
        return client.admissions
