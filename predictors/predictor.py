"""LengthPredictor: what learns output lengths from what a client sent, in columns, and says them as LengthDistributions.

A predictor sees prompts and prompt lengths, never a request's true length; rows are independent of each other, so permuted
rows give permuted predictions.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lengthwise.sched import LengthDistribution, Request

from .folds import Ints, grouped_folds, rows_as_groups
from .latency import LatencyModel
from .near_duplicates import prompt_keys
from .predictions import Predictions
from .prompts import Prompts

Floats = NDArray[np.float64]
MIN_ROWS = 20  # fewer training rows say nothing about a distribution


@dataclass
class State:
    """What a fitted predictor is, in parts that save as JSON, npz and text files."""

    values: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    features: Sequence[str] = ()


@dataclass(frozen=True)
class TrainingRows:
    """N rows to learn from, checked; columns (N,). A censored length is a lower bound. Rows of one group belong together."""

    prompts: Prompts
    lengths: Floats
    censored: NDArray[np.bool_]
    group: Ints

    def folds(self, num_folds: int) -> Ints:
        """The fold (N,) of each row, for predictions out of sample inside a fit; fewer folds where there are fewer groups."""
        return grouped_folds(self.group, min(num_folds, len(np.unique(self.group))))


class LengthPredictor(ABC):
    """Learns from (prompt, prompt length, output length) rows.

    name: as in conf/predictor/. needs_text: prompts are required, lengths alone do not do. per_row: False says the
    same of every row, so that nothing is to be gained from folds. learns: `observe` changes what it predicts. unit: how the
    lengths it was fitted on were counted, set by whoever fits it; None until then. latency: its server model, None when it
    costs nothing or was not profiled.
    """

    name: ClassVar[str]
    needs_text: ClassVar[bool] = False
    per_row: ClassVar[bool] = True
    learns: ClassVar[bool] = False

    unit: str | None = None
    latency: LatencyModel | None = None
    training_median: float | None = None  # tokens, of the rows it was fitted on: what stands in for a failed prediction
    seen: NDArray[np.uint64] | None = None  # hashes of the prompts it learned from, where they were marked
    transfer: bool = False  # lengths counted in another unit are accepted, and marked
    provenance: Mapping[str, Any] = MappingProxyType({})  # of an artefact: tokenizer, data hash, split, marks

    def fit(
        self,
        prompts: Prompts,
        lengths: NDArray[Any],
        censored: NDArray[Any],
        *,
        group: NDArray[Any] | None = None,
    ) -> None:
        """Learn from N prompts, lengths (N,) >= 1 token of their answers, censored (N,) bool: at least that long.

        Rows of one `group` (N,) stay together in any fold made inside. Raises ValueError on rows it cannot learn from.
        """
        lens, cut = self._labels(prompts, lengths, censored)
        self.learn(TrainingRows(prompts, lens, cut, rows_as_groups(group, len(lens))))

    @abstractmethod
    def learn(self, rows: TrainingRows) -> None:
        """Learn from checked rows. Raises ValueError on what only this predictor cannot use."""

    @abstractmethod
    def predict_columns(self, prompts: Prompts) -> Predictions:
        """Predictions of N >= 0 prompts. Raises ValueError when unfitted, or without texts where they are needed."""

    @abstractmethod
    def state(self) -> State:
        """All that `restore` needs."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Become the fitted predictor of `state`."""

    @property
    @abstractmethod
    def fitted(self) -> bool: ...

    def predict(self, requests: Sequence[Request]) -> list[LengthDistribution]:
        """One distribution a request, from what its client sent. Raises ValueError on a missing prompt it needs."""
        return self.predict_columns(self._prompts_of(requests)).rows()

    def observe(self, request: Request, length: int, censored: bool) -> None:  # noqa: B027 - most learn nothing here
        """Told what came of a request it has predicted: its answer has `length` tokens; censored: so far, or when it was cut
        off, aborted or timed out. Called from the thread that calls `predict`, in order; by default nothing is learned."""

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution]:
        """Predictions after `generated` tokens: by default those that the requests carry, unchanged. Raises ValueError if one
        carries none."""
        out = [r.prediction for r in requests if r.prediction is not None]
        if len(out) != len(requests):
            raise ValueError(f"{len(requests) - len(out)} of {len(requests)} requests have no prediction to refine")
        return out

    def save(self, folder: Path | str) -> None:
        """Write the artefact into `folder`, created if need be. Raises ValueError when it is unfitted or has no unit."""
        from .artefact import save

        save(self, Path(folder))

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read an artefact of this class. Raises ValueError on another class or a version it refuses."""
        from .artefact import load

        out = load(Path(folder))
        if not isinstance(out, cls):
            raise ValueError(f"{folder} holds a {type(out).__name__}, not a {cls.__name__}")
        return out

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, which it keeps as attributes of the same names; `latency` is kept apart."""
        names = [n for n in inspect.signature(type(self)).parameters if n != "latency"]
        return {n: getattr(self, n) for n in names}

    def check_unit(self, unit: str) -> str | None:
        """Compare how the workload counts lengths with how the training labels were counted.

        Returns None when equal, or the mark that tables must show when `transfer` is set. Raises ValueError otherwise.
        """
        if self.unit == unit:
            return None
        text = f"predictor {self.name} counts lengths as {self.unit!r}, the workload as {unit!r}"
        if not self.transfer:
            raise ValueError(f"{text}; set predictor.transfer=true to use it all the same, marked in every table")
        mark = f"transfer: {text}"
        self.provenance = {**self.provenance, "marks": [*self.provenance.get("marks", []), mark]}
        return mark

    def mark_seen(self, prompts: Sequence[str] | None) -> None:
        """Remember, as hashes, the prompts (N,) it learned from, so that `has_seen` can tell them in an artefact."""
        self.seen = None if prompts is None else np.unique(prompt_keys(prompts))

    def has_seen(self, prompts: Sequence[str]) -> NDArray[np.bool_]:
        """(N,) whether it learned from each prompt or a near duplicate of it: such a prediction is not out-of-sample."""
        if self.seen is None:
            return np.zeros(len(prompts), dtype=bool)
        return np.isin(prompt_keys(prompts), self.seen)

    # --- checks that fits and predictions share ------------------------------------------------------------------------

    def _labels(self, prompts: Prompts, lengths: NDArray[Any], censored: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        """The training labels, checked; sets `training_median`. Raises ValueError naming what is wrong."""
        lens = np.asarray(lengths, dtype=np.float64)
        cut = np.asarray(censored, dtype=bool)
        self._check_text(prompts)
        if not len(prompts) == len(lens) == len(cut):
            raise ValueError(f"{len(prompts)} prompts, {len(lens)} output lengths and {len(cut)} censored marks")
        if len(lens) < MIN_ROWS:
            raise ValueError(f"predictor {self.name}: {len(lens)} training rows, at least {MIN_ROWS} are needed")
        if not (np.all(np.isfinite(lens)) and lens.min() >= 1.0):
            raise ValueError("output lengths must be finite and at least 1 token")
        num_exact, needed = int(np.count_nonzero(~cut)), MIN_ROWS // 2
        if num_exact < needed:
            raise ValueError(f"only {num_exact} of {len(cut)} training rows are uncensored, {needed} are needed")
        self.training_median = float(np.median(lens))
        return lens, cut

    def _prompts_of(self, requests: Sequence[Request]) -> Prompts:
        """What the requests say. Raises ValueError, naming the request, on a missing prompt that is needed."""
        if self.needs_text and (bare := [r.rid for r in requests if r.prompt is None]):
            raise ValueError(f"predictor {self.name} needs prompt text; request {bare[0]} has none")
        return Prompts.of(requests)

    def _check_text(self, prompts: Prompts) -> None:
        if self.needs_text and prompts.texts is None:
            raise ValueError(
                f"predictor {self.name} needs prompt text, and these rows have none: choose constant or prompt_length"
            )

    def _need_fitted(self, prompts: Prompts | None = None) -> None:
        """Raise ValueError when unfitted; given `prompts`, also when they lack what this predictor needs."""
        if not self.fitted:
            raise ValueError(f"predictor {self.name} is not fitted: fit it, or load an artefact")
        if prompts is not None:
            self._check_text(prompts)
