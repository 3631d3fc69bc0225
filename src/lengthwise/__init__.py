"""Lengthwise: LLM request scheduling with learned output-length prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiments.simulate import simulate

__version__ = "0.1.0"
__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    """`lengthwise.simulate` is imported when first used, so that `import lengthwise.sched` costs milliseconds."""
    if name == "simulate":
        from .experiments.simulate import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
