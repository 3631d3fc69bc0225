"""Bisection: the greatest rate that passes, between one that passes and one that fails, on a ratio scale.

A ratio scale, because how many probes it takes is then known before the first one and does not depend on the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DIGITS = 6  # significant digits of a probed rate: the same search asks for the same rates, and they can be read
LEAST_TOLERANCE = 1e-4  # well above what rounding to DIGITS can do


@dataclass(frozen=True)
class Bracket:
    """lo: the greatest rate found to pass, 0 when even the lower bound fails. hi: the least found to fail, infinite when none
    does. kind: between | at_least (nothing failed) | none (nothing passed)."""

    lo: float
    hi: float
    kind: Literal["between", "at_least", "none"]


def rounded(rate: float) -> float:
    """`rate` to DIGITS significant digits."""
    return float(f"{rate:.{DIGITS}g}")


def num_probes(lo: float, hi: float, tolerance: float) -> int:
    """Probes that halving takes from (lo, hi) until hi / lo <= 1 + tolerance; the two bounds are probed besides.

    Raises ValueError on bounds and tolerances that cannot be searched.
    """
    _check(lo, hi, tolerance)
    return max(0, math.ceil(math.log2(math.log(hi / lo) / math.log1p(tolerance)) - 1e-9))


def bisect(
    passes: Callable[[float], bool], lo: float, hi: float, tolerance: float, *, raises: int = 0, factor: float = 2.0
) -> Bracket:
    """Narrow (lo, hi), both > 0, until hi / lo <= 1 + tolerance. `passes` is asked once for each rate, hi first, then lo.

    raises: when hi passes it is raised by `factor` this many times before the answer is "at least". What `passes` raises goes
    through. Raises ValueError on bounds and tolerances that cannot be searched.
    """
    _check(lo, hi, tolerance)
    if raises < 0 or not factor > 1:
        raise ValueError(f"raises {raises} must be >= 0 and factor {factor} > 1")
    lo, hi = rounded(lo), rounded(hi)
    known = 0.0  # the greatest rate that passed
    while passes(hi):
        known = hi
        if raises == 0:
            return Bracket(known, math.inf, "at_least")
        raises -= 1
        hi = rounded(hi * factor)
    if not known:
        if not passes(lo):
            return Bracket(0.0, lo, "none")
        known = lo
    while hi / known > 1 + tolerance:
        middle = rounded(math.sqrt(known * hi))
        if passes(middle):
            known = middle
        else:
            hi = middle
    return Bracket(known, hi, "between")


def _check(lo: float, hi: float, tolerance: float) -> None:
    if not 0 < lo < hi < math.inf:
        raise ValueError(f"lo {lo} and hi {hi} requests/s: 0 < lo < hi is needed")
    check_tolerance(tolerance)


def check_tolerance(tolerance: float) -> None:
    """Raises ValueError on one that rounding would blur, or that is no number."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not LEAST_TOLERANCE <= tolerance < math.inf:
        raise ValueError(f"tolerance {tolerance!r} must be a number of at least {LEAST_TOLERANCE}")
