"""Batching: WITH WHOM a request runs in one engine step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ports import View


class Batching(ABC):
    """How prefill and decode share a step.

    whole_prompts: a fresh prompt is one chunk; longer than the token budget it is rejected at the door. (A recompute of
    prompt + generated may take several, or a preempted request could never come back.)
    mixes: decodes run beside chunks; otherwise a step with chunks runs no decodes and has the whole budget for them.
    fixed_batch: a batch is formed at once, by slots and KV alone, and prefilled in as many steps as the budget asks; its
    finished rows keep computing until it is done.
    """

    whole_prompts: bool = False
    mixes: bool = True
    fixed_batch: bool = False

    def may_admit(self, view: View) -> bool:
        """May waiting requests join in this step?"""
        return True

    def budget(self, rows: int, context: int, limit: int) -> int:
        """Tokens that a step may compute, decodes included, when `rows` rows decode and attend `context` tokens: at most
        `limit`, and more than `rows` where `limit` is."""
        return limit

    @abstractmethod
    def chunk(self, left: int, budget_left: int, fresh: bool) -> int:
        """Tokens to prefill now of `left` that are missing; 0 for none. `fresh`: never preempted, nothing computed."""


def whole(left: int, budget_left: int, fresh: bool) -> int:
    """A fresh prompt whole or not at all; a recompute as the budget allows."""
    if left <= budget_left:
        return left
    return 0 if fresh else budget_left
