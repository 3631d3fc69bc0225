"""Ranges: what a tuned parameter may be, as Hydra's override grammar says it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep


class Trial(Protocol):
    """What of an Optuna trial is used; the same in Optuna 2, 3 and 4."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, step: int = 1, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Sequence[str]) -> Any: ...


@dataclass(frozen=True)
class Range:
    """The values of `key`: low to high, both included (step: None for reals), or one of `choices`, as texts."""

    key: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()

    def suggest(self, trial: Trial) -> Any:
        """A value, by the trial's sampler."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def placed(self, value: Any) -> Any | None:
        """`value` as `suggest` would give it; None when it is not in the range."""
        if self.choices:
            return next((choice for choice in self.choices if choice == str(value) or _number(choice) == value), None)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not self.low <= value <= self.high:
            return None
        steps = (value - self.low) / self.step if self.step else 0.0
        if not math.isclose(steps, round(steps), abs_tol=1e-9) or (self.whole and value != int(value)):
            return None
        return int(value) if self.whole else float(value)


def split_ranges(overrides: Sequence[str]) -> tuple[list[Range], list[str]]:
    """(a Range per swept override, the other overrides). The last one of a key counts, as for Hydra.

    Raises ValueError on a sweep of anything but a field of a node, and on a range that holds nothing.
    """
    last = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(list(overrides))}
    ranges = [_range(override) for override in last.values() if override.is_sweep_override()]
    fixed = [str(override.input_line) for override in last.values() if not override.is_sweep_override()]
    if not ranges:
        raise ValueError("nothing to tune: give a range, such as 'policy.alpha=interval(1.0, 500.0)'")
    return ranges, fixed


def _range(override: Override) -> Range:
    key, value = override.key_or_group, override.value()
    if "." not in key:
        why = "tune.seeds=3 says how many seeds a trial has" if key == "seed" else "tune under one value, or sweep it"
        raise ValueError(f"{override.input_line}: a trial varies fields of nodes, such as policy.alpha; {why}")
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        assert low is not None and high is not None
        log, whole = "log" in value.tags, isinstance(low, int) and isinstance(high, int)
        if not low < high or (log and low <= 0):
            raise ValueError(f"{override.input_line}: the low end must be below the high end{', and above 0' if log else ''}")
        return Range(key, low, high, None, log, whole)
    if isinstance(value, RangeSweep):
        points = list(value.range())
        if not points:
            raise ValueError(f"{override.input_line} holds no value")
        whole = all(isinstance(point, int) for point in points)
        return Range(key, float(min(points)), float(max(points)), abs(float(value.step)), False, whole)
    return Range(key, choices=tuple(dict.fromkeys(override.sweep_string_iterator())))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
