"""`lengthwise train`: fit a length predictor, score it honestly next to its baselines, and save it with its report.

Scores are means over the three named grouped splits, on uncensored test rows; the saved artefact is then fitted on all rows,
or on the training rows of one split. A report always holds the constant, prompt-length and oracle rows: a score says little
without its floor and its ceiling.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors import artefact
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.online import Online
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.profiling import profile_latency
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import errors_by_band, score
from lengthwise.predictors.splits import SPLITS, joint_groups, named_split, time_split

from .dataset import Dataset
from .label_budget import labels_of
from .regret import Held, Regret
from .train_report import MIN_ROWS, label_shares, resample_ceiling, summarise

Make = Callable[[], LengthPredictor]
Say = Callable[[str], None]
BASELINES: Mapping[str, Callable[[], LengthPredictor | Oracle]] = {
    "constant": Constant, "prompt_length": PromptLength, "ridge": Ridge, "oracle": Oracle,
}  # fmt: skip
ALWAYS = ("constant", "prompt_length", "oracle")


class Lessons(NamedTuple):
    """What there is to learn from: rows, the lengths they teach (N,), which of those are lower bounds (N,), what no split may
    divide (N,)."""

    dataset: Dataset
    labels: NDArray[Any]
    cut: NDArray[np.bool_]
    group: NDArray[np.int64]

    def teach(self, predictor: LengthPredictor, rows: NDArray[np.int64]) -> None:
        predictor.fit(self.dataset.asked(rows), self.labels[rows], self.cut[rows], group=self.group[rows])


def train(
    dataset: Dataset,
    make_predictor: Make,
    *,
    baselines: Sequence[str] = tuple(BASELINES),
    split: str = "all",
    label_samples: int | None = None,
    others: Mapping[str, Dataset] | None = None,
    regret: Regret | None = None,
    folder: Path | None = None,
    progress: Say | None = None,
    told: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score `make_predictor()` and the baselines in the named splits, fit it, and return the report (JSON values).

    folder: where report.json and artefact/ are written; None writes nothing. baselines: beside those that are ALWAYS there.
    split: rows the artefact learns from: all, the training rows of a named split, or `time`: those that arrived first; the
    artefact's scores on the rows left out are `held_out`. label_samples: learn from the median of so many answers to each
    prompt, none of which is scored (label_budget.py). others: name -> rows of other workloads, scored too (`transfer`) by what
    each split has learned, without those whose prompts it has learned from. regret: simulates what each split's predictor is
    worth to SJF and SRPT (regret.py). progress: told what is done. told: further keys of the report. Times, and what they
    change, are in its `volatile` section; the rest is the same for the same rows. Raises ValueError on too few rows, on rows
    without text where the predictor needs it, and on unknown names.
    """
    predictor = make_predictor()
    _refuse(dataset, predictor, baselines, split)
    cut = dataset.cut
    labels, bounds = (dataset.output_len, cut) if label_samples is None else labels_of(dataset, label_samples)
    lessons = Lessons(dataset, labels, bounds, groups_of(dataset))
    say = progress or (lambda text: None)
    volatile: dict[str, Any] = {}

    scored = _scored(lessons, make_predictor, say, others or {})
    base: dict[str, Any] = {}
    wanted = {*baselines, *(name for name in ALWAYS if name != predictor.name or name == "constant")}
    for name in [name for name in BASELINES if name in wanted]:
        made = BASELINES[name]
        if getattr(made, "needs_text", False) and dataset.prompts is None:
            base[name] = {"skipped": "the rows have no prompt text"}
        else:
            base[name] = summarise(_scored(lessons, made, say, {}).splits)

    learn, left_out = _split(dataset, split, lessons.group)
    say(f"{predictor.name}: fitting on {len(learn)} rows")
    begin = time.perf_counter()
    lessons.teach(predictor, learn)
    volatile["fit_s"] = {"splits": scored.seconds, "artefact": time.perf_counter() - begin}
    predictor.unit = dataset.unit
    held_out = None
    if left_out.size:
        predictions = predictor.predict_columns(dataset.asked(left_out))
        held_out = score(predictions, dataset.output_len[left_out], cut[left_out])
    profile = profile_latency(predictor, dataset.asked())
    if predictor.latency is None:
        predictor.latency = profile.model
    volatile["latency"] = {**asdict(profile), "charged": predictor.latency.as_dict()}

    hashed = artefact.data_hash(dataset.asked(), dataset.output_len, cut)
    if regret is not None:
        volatile["regret"] = regret(dataset, hashed, scored.held, predictor.latency, say)
    report = {
        **(told or {}),
        "predictor": predictor.name,
        "settings": predictor.settings(),
        "workload": dataset.name,
        "source": dataset.source,
        "licence": dataset.licence,
        "unit": dataset.unit,
        "data_hash": hashed,
        "num_rows": len(dataset),
        "num_groups": len(np.unique(lessons.group)),
        "num_censored": int(cut.sum()),
        "censored_rule": "training: lower bounds; scores: left out, counted",
        "dropped": {str(k): int(v) for k, v in dataset.dropped.items()},
        "labels": label_shares(dataset.output_len, cut),
        "label_samples": label_samples,
        "splits": list(SPLITS),
        "split": split,
        "held_out": held_out,
        "metrics": summarise(scored.splits),
        "errors": scored.errors,
        "baselines": base,
        "resample_ceiling": resample_ceiling(dataset, cut),
        "transfer": scored.transfer,
        "versions": artefact.library_versions(),
        "volatile": volatile,
    }
    if folder is not None:
        origin: dict[str, Any] = {"tokenizer": dataset.unit, "dataset": dataset.name, "data_hash": hashed, "split": split}
        origin |= {"num_rows": len(learn), "source": dataset.source, "licence": dataset.licence}
        origin |= {} if label_samples is None else {"label_samples": label_samples}
        predictor.mark_seen(dataset.asked(learn).texts)
        artefact.save(predictor, folder / "artefact", origin)
        report["artefact"] = str(folder / "artefact")
        volatile["artefact_bytes"] = sum(file.stat().st_size for file in (folder / "artefact").iterdir())
        (folder / "report.json.part").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / "report.json.part").replace(folder / "report.json")
    return report


def groups_of(dataset: Dataset) -> NDArray[np.int64]:
    """What no split may divide (N,): the dataset's groups, joined where prompts are near duplicates; else each row."""
    return joint_groups(dataset.group, dataset.prompts, len(dataset))


def _refuse(dataset: Dataset, predictor: Any, baselines: Sequence[str], split: str) -> None:
    if not isinstance(predictor, LengthPredictor):
        raise ValueError(f"a {type(predictor).__name__} cannot be trained: choose a learned predictor such as gbdt")
    dataset.refuse_unanswered()
    if predictor.needs_text and dataset.prompts is None:
        raise ValueError(
            f"predictor {predictor.name} needs prompt text, and workload {dataset.name} has none: "
            "choose constant or prompt_length"
        )
    if len(dataset) < MIN_ROWS:
        raise ValueError(f"workload {dataset.name} has {len(dataset)} rows, at least {MIN_ROWS} are needed to train and test")
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ValueError(f"baseline {unknown[0]!r} is not one of {', '.join(BASELINES)}")
    if split not in ("all", *SPLITS, "time"):
        raise ValueError(f"split={split!r}: choose all, {', '.join(SPLITS)}, time")
    if split == "time" and dataset.arrival is None:
        raise ValueError(f"split=time: workload {dataset.name} has no arrival times")


def _split(dataset: Dataset, split: str, group: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to learn from, and rows to score on: none when all are learned from."""
    if split == "all":
        return np.arange(len(dataset)), np.arange(0)
    if split == "time":
        assert dataset.arrival is not None
        return time_split(dataset.arrival, group)
    return named_split(split, group)


class Scored(NamedTuple):
    """Scores by split; seconds of each fit and test; errors of all test rows by band, None where lengths are not predicted;
    scores on other workloads; what was predicted of each split's test rows."""

    splits: dict[str, dict[str, Any]]
    seconds: list[float]
    errors: dict[str, Any] | None
    transfer: dict[str, Any]
    held: dict[str, Held]


def _scored(lessons: Lessons, make: Callable[[], LengthPredictor | Oracle], say: Say, others: Mapping[str, Dataset]) -> Scored:
    dataset, exact = lessons.dataset, ~lessons.dataset.cut
    out: dict[str, dict[str, Any]] = {}
    held: dict[str, Held] = {}
    times, medians, truths = [], [], []
    elsewhere: dict[str, dict[str, Any]] = {name: {} for name in others}
    for name in SPLITS:
        learn, test = named_split(name, lessons.group)
        predictor = make()
        begin = time.perf_counter()
        if isinstance(predictor, LengthPredictor):
            lessons.teach(predictor, learn)
            predictions = predictor.predict_columns(dataset.asked(test))
            if others:
                predictor.mark_seen(dataset.asked(learn).texts)
        else:
            predictions = predictor.from_truth(dataset.output_len[test])
        times.append(time.perf_counter() - begin)
        out[name] = score(predictions, dataset.output_len[test], dataset.cut[test])
        median = float(np.median(lessons.labels[learn]))
        learns = predictor.new_correction(median).settings() if isinstance(predictor, Online) else None
        held[name] = Held(test, predictions, median, learns)
        kept = np.flatnonzero(exact[test])
        if predictions.point is not None or predictions.survival is not None:
            medians.append(predictions.take(kept).quantiles((0.5,))[:, 0])
            truths.append(dataset.output_len[test][kept])
        for other, rows in others.items():
            assert isinstance(predictor, LengthPredictor)
            elsewhere[other][name] = _transferred(predictor, rows)
        say(f"{predictor.name}: split {name} ({len(out)} of {len(SPLITS)})")
    errors = errors_by_band(np.concatenate(medians), np.concatenate(truths)) if medians else None
    transfer = {name: _told(dataset, others[name], found) for name, found in elsewhere.items()}
    return Scored(out, times, errors, transfer, held)


def _transferred(predictor: LengthPredictor, dataset: Dataset) -> dict[str, Any]:
    """Scores on the rows of another workload whose prompts it has not learned from; why there are none."""
    if predictor.needs_text and dataset.prompts is None:
        return {"skipped": "its rows have no prompt text"}
    new = np.arange(len(dataset))
    if dataset.prompts is not None:
        new = np.flatnonzero(~predictor.has_seen(dataset.prompts))
    if len(new) < MIN_ROWS:
        return {"skipped": f"{len(new)} of its rows were not learned from, at least {MIN_ROWS} are needed"}
    predictions = predictor.predict_columns(dataset.asked(new))
    return score(predictions, dataset.output_len[new], dataset.cut[new])


def _told(here: Dataset, there: Dataset, splits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over splits, with the unit of the other workload and a mark where it is another one."""
    other = {"unit": there.unit, "mark": None if there.unit == here.unit else f"learned in {here.unit}, scored in {there.unit}"}
    skipped = next((found["skipped"] for found in splits.values() if "skipped" in found), None)
    return {**other, **({"skipped": skipped} if skipped else summarise(splits))}
