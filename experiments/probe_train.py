"""Training a probe: hidden states recorded while a real engine answers, and what a probe makes of those it has not seen.

The truth is the length that was served: of an answer that was cut off at max_new_tokens that one, since a scheduler serves it
no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lengthwise.predictors.folds import grouped_folds
from lengthwise.predictors.prompts import Prompts
from lengthwise.predictors.refine_probe import Bins, Filter, Network, RefineProbe, point
from lengthwise.predictors.refine_replay import OF
from lengthwise.predictors.scores import kendall_tau
from lengthwise.predictors.splits import joint_groups
from lengthwise.sched import Request

from .cell import run_cell
from .nodes import Config, load_dataset
from .run import Run
from .simulate import OnTheFly

NUM_FOLDS = 5
BANDS = (1, 65, 129, 257, 513)  # of generated tokens, lower ends
MIN_ANSWERS = 20


class Recording:
    """A Refiner that predicts nothing and keeps what it is shown: of request `rid` at `generated` tokens its hidden state."""

    reads_truth: ClassVar[bool] = False

    def __init__(self, every: int, layer: int) -> None:
        self.every, self.layer = every, layer
        self.rid: list[int] = []
        self.generated: list[int] = []
        self.hidden: list[NDArray[np.float16]] = []

    def check(self, name: str, unit: str, prompts: Prompts, output_len: Any) -> None:
        """Nothing is predicted, so any workload will do."""

    def refiner(self, rows: Any, output_len: Any, seed: int) -> Recording:
        return self

    def refine(self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None) -> list[None]:
        for request, done in zip(requests, generated, strict=True):
            if probes is not None and request in probes:
                self.rid.append(request.rid)
                self.generated.append(done)
                self.hidden.append(probes[request].astype(np.float16))
        return [None] * len(requests)


@dataclass(frozen=True)
class Readings:
    """N readings in the order they were made: workload row, what may not be divided between training and test, generated and
    whole tokens of the answer, all (N,), and the hidden states (N, H)."""

    row: NDArray[np.int64]
    group: NDArray[np.int64]
    generated: NDArray[np.int64]
    total: NDArray[np.int64]
    hidden: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def remaining(self) -> NDArray[np.int64]:
        return self.total - self.generated


def record(cfg: Config, every: int, layer: int) -> tuple[Readings, Run]:
    """Run the cell on its engine and keep the hidden states of `layer` every so many decode steps; also what the run was.

    Raises ValueError where too few answers ended, or none was long enough to be read."""
    recording = Recording(every, layer)
    run = run_cell({**cfg, "refine": recording}, OnTheFly())
    dataset = load_dataset(cfg)
    group = joint_groups(dataset.group, dataset.prompts, len(dataset))
    done = run.requests[run.requests["status"] == "finished"].set_index("rid")
    keep = [i for i, rid in enumerate(recording.rid) if rid in done.index]
    if len(done) < MIN_ANSWERS or not keep:
        raise ValueError(f"{len(done)} answers ended, {len(keep)} readings were made of them; {MIN_ANSWERS} answers are needed")
    rid = np.array(recording.rid)[keep]
    row = done.loc[rid, "row"].to_numpy(np.int64)
    return Readings(
        row, group[row], np.array(recording.generated)[keep], done.loc[rid, "output_len"].to_numpy(np.int64),
        np.stack([recording.hidden[i] for i in keep]),
    ), run  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """The probe of all readings; `expected` (N,): the whole length that a probe expected at each reading which had not seen its
    group, smoothed, and `alone` (N,) without the filter; scores: JSON values."""

    probe: RefineProbe
    expected: NDArray[np.float64]
    alone: NDArray[np.float64]
    scores: dict[str, Any]


def train(
    readings: Readings,
    *,
    layer: int,
    every: int = 8,
    num_bins: int = 10,
    most: float | None = None,
    width: int = 512,
    seed: int = 0,
    about: dict[str, Any] | None = None,
    seen: NDArray[np.uint64] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Fit on all readings, and score on readings whose group was left out. most: tokens, upper end of the bins; None: the
    longest answer. Raises ValueError for fewer groups than folds."""
    bins = Bins(num_bins, float(readings.total.max() if most is None else most))
    target = bins.of(readings.remaining)
    fold = grouped_folds(readings.group, NUM_FOLDS)
    chances = np.empty((len(readings), num_bins))
    for k in range(NUM_FOLDS):
        learn, test = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        network = Network.fit(readings.hidden[learn], target[learn], num_bins, width, seed)
        chances[test] = network.chances(readings.hidden[test])
        say(f"fold {k + 1} of {NUM_FOLDS}: {len(learn)} readings learned from")
    alone = (readings.generated + np.maximum(chances @ bins.middles, 1.0)).astype(np.float64)
    expected = _smoothed(readings, chances, bins)
    median = float(np.median(_of_answers(readings)))
    scores = {
        "probe_filtered": scored(readings, expected), "probe": scored(readings, alone),
        "constant": scored(readings, np.maximum(readings.generated + 1.0, median).astype(np.float64)),
    }  # fmt: skip
    say("fitting on all readings")
    network = Network.fit(readings.hidden, target, num_bins, width, seed)
    told = {**(about or {}), "scores": scores, "num_readings": len(readings)}
    probe = RefineProbe(network, bins, layer, every, told, np.zeros(0, dtype=np.uint64) if seen is None else seen)
    return Trained(probe, expected, alone, scores)


def _smoothed(readings: Readings, chances: NDArray[np.float64], bins: Bins) -> NDArray[np.float64]:
    belief = Filter(bins)
    out = np.empty(len(readings))
    for i in np.lexsort((readings.generated, readings.row)).tolist():
        generated = int(readings.generated[i])
        out[i] = point(generated, belief.update(int(readings.row[i]), generated, chances[i]), bins).mean()
    return out


def _of_answers(readings: Readings) -> NDArray[np.int64]:
    """The whole length of each answer, once."""
    _, first = np.unique(readings.row, return_index=True)
    return readings.total[first]


def scored(readings: Readings, expected: NDArray[np.float64]) -> dict[str, Any]:
    """Of expected whole lengths (N,): tau-b and mean absolute error in tokens, of all readings and by generated tokens."""
    out: dict[str, Any] = {"n": len(readings), **_score(readings.total, expected), "bands": []}
    for low, high in zip(BANDS, (*BANDS[1:], np.inf), strict=True):
        inside = (readings.generated >= low) & (readings.generated < high)
        if inside.any():
            score = _score(readings.total[inside], expected[inside])
            out["bands"].append({"from": low, "n": int(inside.sum()), **score})
    return out


def _score(total: NDArray[np.int64], expected: NDArray[np.float64]) -> dict[str, Any]:
    return {"kendall_tau": kendall_tau(expected, total), "mae": float(np.mean(np.abs(expected - total)))}


def write_traces(readings: Readings, expected: NDArray[np.float64], path: Path, of: str | None = None) -> None:
    """What predictors/refine_replay.py reads. of: the hash of the rows that the traces are of."""
    columns = {"row": readings.row, "generated": readings.generated, "expected": expected}
    table = pa.table(columns).replace_schema_metadata(None if of is None else {OF: of.encode()})
    pq.write_table(table, path, compression="zstd")


def table(scores: dict[str, Any]) -> list[str]:
    """The scores as lines of text."""
    lines = [f"{'':<16}{'tau-b':>8}{'MAE':>8}" + "".join(f"{'MAE from ' + str(low):>14}" for low in BANDS)]
    for name, score in scores.items():
        by_band = {band["from"]: band["mae"] for band in score["bands"]}
        cells = "".join(f"{by_band[low]:>14.1f}" if low in by_band else f"{'-':>14}" for low in BANDS)
        tau = score["kendall_tau"]
        lines.append(f"{name.replace('_', ', '):<16}{'-' if tau is None else format(tau, '.3f'):>8}{score['mae']:>8.1f}{cells}")
    return lines
