"""RefineProbe: a small network reads a hidden state of the served model and says how many tokens are still to come; a Bayes
filter smooths what it says of one request over time (TRAIL: Shahout et al., ICLR 2025, sections 3.1 and 3.2).

It departs from the released code in that the network is scikit-learn's, trained to convergence on held-out rows instead of four
epochs, and in that its bins are as wide as the training answers ask for.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import LengthDistribution, Request

from .near_duplicates import prompt_keys
from .prompts import Prompts

Floats = NDArray[np.float64]
FORMAT = 1
FILES = ("probe.json", "probe.npz")
MOST_BELIEFS = 8192  # of one filter, the last ones to be read: a server that goes on for ever keeps no more


@dataclass(frozen=True)
class Bins:
    """`num` equal bins of tokens still to come, from 0 to `most`; what is above counts in the last."""

    num: int
    most: float

    def __post_init__(self) -> None:
        if self.num < 2 or not 0.0 < self.most < float("inf"):
            raise ValueError(f"{self.num} bins up to {self.most} tokens: at least 2, and a finite number above 0")

    @property
    def width(self) -> float:
        return self.most / self.num

    @property
    def middles(self) -> Floats:
        return np.asarray((np.arange(self.num) + 0.5) * self.width, dtype=np.float64)

    def of(self, remaining: ArrayLike) -> NDArray[np.int64]:
        """The bin (N,) of each number of tokens to come (N,)."""
        return np.minimum(np.asarray(remaining, dtype=np.float64) // self.width, self.num - 1).astype(np.int64)

    def drift(self, steps: int) -> Floats:
        """(num, num) chances to be in bin j `steps` tokens after bin i: each token leaves a bin downwards with chance
        1 / width; the lowest keeps what it has."""
        leave = min(1.0 / self.width, 1.0)
        once = np.diag(np.full(self.num, 1.0 - leave)) + np.diag(np.full(self.num - 1, leave), -1)
        once[0, 0] = 1.0
        return np.asarray(np.linalg.matrix_power(once, steps))


@dataclass(frozen=True)
class Network:
    """Two layers, ReLU between, softmax over the bins; inputs are scaled to mean 0 and deviation 1 first."""

    mean: Floats
    scale: Floats
    first: Floats
    first_bias: Floats
    second: Floats
    second_bias: Floats

    @classmethod
    def fit(cls, hidden: NDArray[Any], bins: NDArray[np.int64], num_bins: int, width: int, seed: int) -> Network:
        """Learn from hidden states (N, H) and their bins (N,), 60 epochs at most. One thread, the same for the same rows and
        seed."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier
        from threadpoolctl import threadpool_limits

        x = np.asarray(hidden, dtype=np.float32)
        mean, spread = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
        scale = np.where(spread > 1e-6, spread, 1.0)  # a column that never changes says nothing
        counts = np.bincount(bins)
        enough = len(x) >= 200 and counts[counts > 0].min() >= 10  # in each bin, for some of them to be held out
        model = MLPClassifier(
            (width,), alpha=1e-3, batch_size=min(256, len(x)), early_stopping=bool(enough), n_iter_no_change=5, max_iter=60,
            learning_rate_init=3e-3, random_state=seed,
        )  # fmt: skip
        with threadpool_limits(limits=1), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the epochs are limited on purpose
            model.fit(((x - mean) / scale).astype(np.float32), bins)
        (first, second), (first_bias, second_bias) = model.coefs_, model.intercepts_
        known = model.classes_
        if len(known) <= 2:  # one output, for the second
            second, second_bias = np.hstack([0.0 * second, second]), np.concatenate([[0.0], second_bias])
        whole, bias = np.zeros((width, num_bins)), np.full(num_bins, -30.0)  # bins without a row stay all but impossible
        whole[:, known], bias[known] = second[:, : len(known)], second_bias[: len(known)]
        return cls(mean, scale, *(np.asarray(a, dtype=np.float64) for a in (first, first_bias, whole, bias)))

    def chances(self, hidden: NDArray[Any]) -> Floats:
        """(N, H) -> (N, bins), each row adding up to 1."""
        x = (np.asarray(hidden, dtype=np.float64) - self.mean) / self.scale
        out = np.maximum(x @ self.first + self.first_bias, 0.0) @ self.second + self.second_bias
        out = np.exp(out - out.max(axis=1, keepdims=True))
        return np.asarray(out / out.sum(axis=1, keepdims=True))


class Filter:
    """What is believed of one request's remaining tokens: `belief` (bins,), as of `generated` tokens."""

    def __init__(self, bins: Bins, most: int = MOST_BELIEFS) -> None:
        self._bins, self._most = bins, most
        self._drifts: dict[int, Floats] = {}
        self._beliefs: dict[int, tuple[Floats, int]] = {}

    def update(self, rid: int, generated: int, chances: Floats) -> Floats:
        """Belief after `chances` (bins,) were said at `generated` tokens: the last belief, moved on, times them. Where the two
        contradict each other wholly, what is said now counts."""
        before = self._beliefs.pop(rid, None)
        belief = chances
        if before is not None:
            steps = generated - before[1]
            if steps not in self._drifts:
                self._drifts[steps] = self._bins.drift(steps)
            both = before[0] @ self._drifts[steps] * chances
            belief = both / both.sum() if both.sum() > 0.0 else chances
        self._beliefs[rid] = belief, generated
        if len(self._beliefs) > self._most:
            del self._beliefs[next(iter(self._beliefs))]
        return belief


@dataclass(frozen=True)
class RefineProbe:
    """every: decode steps from one reading to the next. layer: of the model, whose hidden states are read. about: what it was
    trained on (engine, workload, unit, scores), JSON values. seen: hashes of the prompts it was trained on."""

    network: Network
    bins: Bins
    layer: int
    every: int = 8
    about: Mapping[str, Any] = field(default_factory=dict)
    seen: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    reads_truth: ClassVar[bool] = False
    serves: ClassVar[bool] = True

    def check(self, name: str, unit: str, prompts: Prompts, output_len: ArrayLike) -> str | None:
        """Refuse a workload whose prompts it has learned from, or that counts tokens of another model. Returns the mark of one
        without texts, of which that cannot be known."""
        if prompts.texts is None:
            mark = f"the probe may have learned from these rows: {name} has no texts to tell"
            return mark if name == self.about.get("workload") else None
        if (known := self.about.get("unit")) not in (None, unit):
            raise ValueError(f"the probe counts lengths as {known!r}, the workload as {unit!r}")
        if num_seen := int(np.isin(prompt_keys(prompts.texts), self.seen).sum()):
            raise ValueError(
                f"the probe has learned from {num_seen} of the {len(prompts)} prompts of {name}: give it others, or, in "
                "simulation, refine=replay, whose traces are out of fold"
            )
        return None

    def refiner(self, rows: ArrayLike, output_len: ArrayLike, seed: int) -> Reading:
        """The Refiner of one run; it needs the hidden states of an engine that computes."""
        return Reading(self)

    def save(self, folder: Path) -> None:
        """Write probe.json and probe.npz into `folder`, made if absent."""
        folder.mkdir(parents=True, exist_ok=True)
        page = {"format": FORMAT, "num_bins": self.bins.num, "most": self.bins.most, "layer": self.layer, "every": self.every}
        (folder / FILES[0]).write_text(json.dumps({**page, "about": self.about}, indent=1, allow_nan=False) + "\n")
        with (folder / FILES[1]).open("wb") as file:
            np.savez(file, seen=self.seen, **vars(self.network))


def load(path: str | None, every: int | None = None) -> RefineProbe:
    """The probe in the folder `path`, read every so many decode steps, by default as it was trained. Raises ValueError where
    there is none, or one of another format."""
    if path is None:
        raise ValueError("refine.path names no probe: `lengthwise probe` trains one and prints its folder")
    folder = Path(path).expanduser()
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} holds no {missing[0]}: give the folder that `lengthwise probe` printed")
    page = json.loads((folder / FILES[0]).read_text())
    if page.get("format") != FORMAT:
        raise ValueError(f"{folder}: a probe of format {page.get('format')!r}, this version reads {FORMAT}")
    with np.load(folder / FILES[1], allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    steps = page["every"] if every is None else every
    if steps < 1:
        raise ValueError(f"refine.every={steps} decode steps: at least 1")
    seen = arrays.pop("seen")
    return RefineProbe(Network(**arrays), Bins(page["num_bins"], page["most"]), page["layer"], steps, page["about"], seen)


class Reading:
    """Refiner: each reading's expected number of tokens to come, as a point, as TRAIL's scheduler takes it."""

    def __init__(self, probe: RefineProbe) -> None:
        self._probe, self._filter = probe, Filter(probe.bins)

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution | None]:
        if probes is None:
            raise ValueError("a probe reads hidden states, and this executor gives none: take executor=native, or a replay")
        known = [request for request in requests if request in probes]
        if not known:
            return [None] * len(requests)
        said = dict(zip(known, self._probe.network.chances(np.stack([probes[r] for r in known])), strict=True))
        return [
            point(done, self._filter.update(request.rid, done, said[request]), self._probe.bins) if request in said else None
            for request, done in zip(requests, generated, strict=True)
        ]


def point(generated: int, belief: Floats, bins: Bins) -> LengthDistribution:
    """The whole length that is expected after `generated` tokens, at least one more, as a point."""
    return LengthDistribution.point(generated + max(float(belief @ bins.middles), 1.0))
