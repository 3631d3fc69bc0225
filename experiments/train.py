"""`lengthwise train`: fit a length predictor, score it honestly next to its baselines, and save it with its report.

Scores are means over the three named grouped splits, on uncensored test rows; the saved artefact is then fitted on all rows,
or on the training rows of one split. A report always holds the constant, prompt-length and oracle rows: a score says little
without its floor and its ceiling.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lengthwise.predictors import artefact
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.oracle import Oracle
from lengthwise.predictors.predictor import LengthPredictor
from lengthwise.predictors.profiling import profile_latency
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.ridge import Ridge
from lengthwise.predictors.scores import score
from lengthwise.predictors.splits import SPLITS, joint_groups, named_split, time_split

from .dataset import Dataset
from .train_report import MIN_ROWS, label_shares, resample_ceiling, summarise, table

log = logging.getLogger(__name__)

Make = Callable[[], LengthPredictor]
BASELINES: Mapping[str, Callable[[], LengthPredictor | Oracle]] = {
    "constant": Constant, "prompt_length": PromptLength, "ridge": Ridge, "oracle": Oracle,
}  # fmt: skip
ALWAYS = ("constant", "prompt_length", "oracle")


def train(
    dataset: Dataset,
    make_predictor: Make,
    *,
    baselines: Sequence[str] = tuple(BASELINES),
    split: str = "all",
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Score `make_predictor()` and the baselines in the named splits, fit it, and return the report (JSON values).

    folder: where report.json and artefact/ are written; None writes nothing. baselines: beside those that are ALWAYS there.
    split: rows the artefact learns from: all, the training rows of a named split, or `time`: those that arrived first; the
    artefact's scores on the rows left out are `held_out`. progress: told what is done. Times are in the report's `volatile`
    section; the rest is the same for the same rows. Raises ValueError on too few rows, on rows without text where the predictor
    needs it, and on unknown names.
    """
    predictor = make_predictor()
    _refuse(dataset, predictor, baselines, split)
    group = groups_of(dataset)
    cut = dataset.cut
    say = progress or (lambda text: None)
    volatile: dict[str, Any] = {}

    rows, fit_time = _scored(dataset, make_predictor, group, cut, say)
    others: dict[str, Any] = {}
    wanted = {*baselines, *(name for name in ALWAYS if name != predictor.name or name == "constant")}
    for name in [name for name in BASELINES if name in wanted]:
        made = BASELINES[name]
        if getattr(made, "needs_text", False) and dataset.prompts is None:
            others[name] = {"skipped": "the rows have no prompt text"}
        else:
            others[name] = summarise(_scored(dataset, made, group, cut, say)[0])

    learn, left_out = _split(dataset, split, group)
    say(f"{predictor.name}: fitting on {len(learn)} rows")
    begin = time.perf_counter()
    _fit(predictor, dataset, learn, cut, group)
    volatile["fit_s"] = {"splits": fit_time, "artefact": time.perf_counter() - begin}
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
    report = {
        "predictor": predictor.name,
        "settings": predictor.settings(),
        "workload": dataset.name,
        "source": dataset.source,
        "licence": dataset.licence,
        "unit": dataset.unit,
        "data_hash": hashed,
        "num_rows": len(dataset),
        "num_groups": len(np.unique(group)),
        "num_censored": int(cut.sum()),
        "censored_rule": "training: lower bounds; scores: left out, counted",
        "dropped": {str(k): int(v) for k, v in dataset.dropped.items()},
        "labels": label_shares(dataset.output_len, cut),
        "splits": list(SPLITS),
        "split": split,
        "held_out": held_out,
        "metrics": summarise(rows),
        "baselines": others,
        "resample_ceiling": resample_ceiling(dataset, cut),
        "versions": artefact.library_versions(),
        "volatile": volatile,
    }
    if folder is not None:
        told = {"tokenizer": dataset.unit, "dataset": dataset.name, "data_hash": hashed, "split": split, "num_rows": len(learn)}
        told |= {"source": dataset.source, "licence": dataset.licence}
        predictor.mark_seen(dataset.asked(learn).texts)
        artefact.save(predictor, folder / "artefact", told)
        report["artefact"] = str(folder / "artefact")
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


def _scored(
    dataset: Dataset,
    make: Callable[[], LengthPredictor | Oracle],
    group: NDArray[np.int64],
    cut: NDArray[np.bool_],
    say: Callable[[str], None],
) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Scores by split, and the seconds of each fit and test."""
    out, times = {}, []
    for name in SPLITS:
        learn, test = named_split(name, group)
        predictor = make()
        begin = time.perf_counter()
        if isinstance(predictor, LengthPredictor):
            _fit(predictor, dataset, learn, cut, group)
            predictions = predictor.predict_columns(dataset.asked(test))
        else:
            predictions = predictor.from_truth(dataset.output_len[test])
        times.append(time.perf_counter() - begin)
        out[name] = score(predictions, dataset.output_len[test], cut[test])
        say(f"{predictor.name}: split {name} ({len(out)} of {len(SPLITS)})")
    return out, times


def _fit(
    predictor: LengthPredictor, dataset: Dataset, rows: NDArray[np.int64], cut: NDArray[np.bool_], group: NDArray[np.int64]
) -> None:
    predictor.fit(dataset.asked(rows), dataset.output_len[rows], cut[rows], group=group[rows])


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name="train")
def app(config: DictConfig) -> None:
    """Train what the config names, print the table, save report and artefact under `out`."""
    choices = HydraConfig.get().runtime.choices
    try:
        cfg = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        assert isinstance(cfg, dict)
        node = cfg["predictor"]
        if not (isinstance(node, Mapping) and node.get("_target_")):
            raise ValueError("predictor=none has nothing to train: choose a learned predictor such as gbdt")
        dataset = instantiate(cfg["workload"])
        folder = Path(cfg["out"]) / "train" / f"{choices['predictor']}-{choices['workload']}"
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        report = train(
            dataset, lambda: instantiate(node), baselines=cfg["baselines"], split=str(cfg["split"]), folder=folder,
            progress=lambda text: print(f"{time.perf_counter() - begin:6.1f} s  {text}", file=sys.stderr, flush=True),
        )  # fmt: skip
    except InstantiationException as error:  # a constructor or a loader refused: its own words say why
        raise SystemExit(f"lengthwise train: {error.__cause__ or error}") from error
    except (ValueError, FileNotFoundError, OmegaConfBaseException) as error:
        raise SystemExit(f"lengthwise train: {error}") from error
    print(table(report))
    print(f"\nreport: {folder / 'report.json'}\nuse it: predictor=artefact predictor.path={report['artefact']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: sys.argv[1:]). Returns 0; leaves by SystemExit on refusal."""
    if argv is not None:
        sys.argv = ["lengthwise", *argv]
    from .hints import run_app

    run_app(app, "train")
    return 0
