"""Nested: a predictor inside a predictor, as settings that JSON can hold and as parts of the outer one's state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .predictor import LengthPredictor, State, TrainingRows

Inner = LengthPredictor | Mapping[str, Any]
_PREFIX = "inner."


def described(inner: LengthPredictor) -> dict[str, Any]:
    """Class and settings, JSON values, of which `built` makes the same predictor, unfitted."""
    return {"class": f"{type(inner).__module__}:{type(inner).__qualname__}", "settings": inner.settings()}


def built(inner: Any) -> LengthPredictor:
    """`inner` itself, or what its description stands for. Raises ValueError for anything else."""
    from .artefact import class_of

    if isinstance(inner, Mapping) and set(inner) == {"class", "settings"}:
        inner = class_of(inner["class"])(**inner["settings"])
    if not isinstance(inner, LengthPredictor):
        raise ValueError(
            f"inner is a {type(inner).__name__}, not a LengthPredictor: name one, as inner._target_ or a config node"
        )
    return inner


def taught(inner: LengthPredictor, rows: TrainingRows, at: Any) -> LengthPredictor:
    """A copy of `inner`, fitted on the rows `at` (n,) of `rows`."""
    out = copy.deepcopy(inner)
    out.fit(rows.prompts.take(at), rows.lengths[at], rows.censored[at], group=rows.group[at])
    return out


def packed(inner: LengthPredictor) -> State:
    """The state of a fitted inner predictor, to be part of another one's."""
    state = inner.state()
    return State(
        {"inner": state.values, "inner_features": list(state.features), "inner_median": inner.training_median},
        {_PREFIX + name: array for name, array in state.arrays.items()},
        {_PREFIX + name: text for name, text in state.texts.items()},
    )


def unpacked(inner: LengthPredictor, state: State) -> LengthPredictor:
    """A copy of `inner` that is what `packed` was given."""
    out = copy.deepcopy(inner)
    parts: list[dict[str, Any]] = [
        {name.removeprefix(_PREFIX): part for name, part in kind.items() if name.startswith(_PREFIX)}
        for kind in (state.arrays, state.texts)
    ]
    out.restore(State(state.values["inner"], parts[0], parts[1], tuple(state.values["inner_features"])))
    out.training_median = state.values["inner_median"]
    return out
