"""Routing: ON WHAT RESOURCE a request runs. Types only; a single engine needs no router."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from .ports import View
from .request import Request


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicas by index: where to prefill and where to decode (the same unless disaggregated)."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str


@dataclass(frozen=True, slots=True)
class Defer:
    """Ask again at the next event."""


@dataclass(frozen=True, slots=True)
class Migration:
    request: Request
    source: int
    target: int


class Router(ABC):
    @abstractmethod
    def place(self, req: Request, replicas: Sequence[View]) -> Placement | Reject | Defer:
        """Where `req` goes. Pure."""

    def rebalance(self, replicas: Sequence[View]) -> list[Migration]:
        """Requests to move now."""
        return []
