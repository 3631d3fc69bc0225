"""The application behind `lengthwise train`: one training, or several with -m that end in one table.

A combination that has its report already, made of the same nodes, rows and code, is found and not trained again; one that fails
stops none of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import lengthwise

from . import label_budget, regret, simulate, train_report
from . import train as training
from .cellhash import LEARNING, code, digest, files, plugins
from .composer import Cfg, Composer, plain
from .dataset import Dataset
from .hints import print_error, run_app
from .nodes import make
from .paths import root
from .regret import Regret
from .train import train
from .train_report import table
from .train_table import FILE, frame_of, text_of, transfers_of

CONFIG = "train"
REFUSALS = (ValueError, ImportError, FileNotFoundError, OmegaConfBaseException, InstantiationException)
PARTS = ("predictor", "workload", "split", "label_samples", "regret")  # of the config, that a report depends on


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """Train what the config names, print the report, save it with the artefact under `out`."""
    try:
        cfg = plain(config, HydraConfig.get().runtime.choices)
        report, folder = _trained(cfg, _named(cfg, ()), _rows(cfg), {}, cfg["baselines"])
    except REFUSALS as error:
        raise SystemExit(f"lengthwise train: {error}") from error
    print(table(report))
    print(f"\nreport: {folder / FILE}\nuse it: predictor=artefact predictor.path={report['artefact']}")


def run_trainings(config: DictConfig, overrides: Sequence[str], loader: ConfigLoader) -> list[dict[str, Any]]:
    """A training for every combination of `overrides`; prints one table and writes it, beside the transfers, as Parquet.

    Raises SystemExit when one failed, or when none can be run.
    """
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
        compose = Composer(config, loader)
        cells = [(_named(cfg, varied), cfg) for cfg, varied in zip(map(compose, jobs), _varied(jobs), strict=True)]
        sources = {name.workload: cfg for name, cfg in reversed(cells)}
        transfer = bool(cells[0][1]["transfer"])
    except REFUSALS as error:
        raise SystemExit(f"lengthwise train: {error}") from error
    loaded: dict[str, Dataset] = {}
    reports, bad, with_baselines = [], [], set()
    for number, (name, cfg) in enumerate(cells, 1):
        print_error(f"training {number}/{len(cells)}: {name.label}")
        try:
            others = {other: it for other, it in sources.items() if transfer and other != name.workload}
            keep = {name.workload, *others}
            loaded = {key: dataset for key, dataset in loaded.items() if key in keep}
            made_by = _key(cfg, others)
            report = _found(_folder(cfg, name), made_by)
            if report is None:
                for key in sorted(keep - set(loaded)):
                    loaded[key] = _rows(sources[key])
                there = {other: loaded[other] for other in others}
                first = name.workload not in with_baselines  # they are the same for every predictor
                report, _ = _trained(cfg, name, loaded[name.workload], there, cfg["baselines"] if first else (), made_by)
            with_baselines.add(name.workload)
            reports.append(report)
        except REFUSALS as error:
            why = str(error.__cause__ or error) if isinstance(error, InstantiationException) else str(error)
            print_error(why)
            bad.append(f"  {name.label}: {why}")
    if reports:
        frame, moved = frame_of(reports), transfers_of(reports)
        print(text_of(frame, moved))
        place = root(str(config.out)) / "train"
        frame.to_parquet(place / f"{config.name}.parquet", index=False)
        print(f"\nwritten: {place / f'{config.name}.parquet'}")
        if len(moved):
            moved.to_parquet(place / f"{config.name}-transfer.parquet", index=False)
            print(f"written: {place / f'{config.name}-transfer.parquet'}")
    if bad:
        raise SystemExit("\n".join([f"{len(bad)} of {len(cells)} trainings failed", *bad]))
    return reports


class _Name:
    """How a training is called: its predictor, its workload, each with what is varied of it, and both together."""

    def __init__(self, predictor: str, workload: str) -> None:
        self.predictor, self.workload = predictor, workload
        self.label = f"{predictor} on {workload}"


def _named(cfg: Cfg, varied: Sequence[str]) -> _Name:
    parts: dict[str, list[str]] = {group: [str(cfg["choices"].get(group))] for group in ("predictor", "workload")}
    for text in (text.removeprefix("+") for text in varied):
        group = "workload" if text.startswith("workload.") else "predictor"
        parts[group].append(text.removeprefix(f"{group}."))
    return _Name(" ".join(parts["predictor"]), " ".join(parts["workload"]))


def _varied(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of each job those overrides that not every job has, the chosen nodes left out."""
    common = set(jobs[0]).intersection(*map(set, jobs))
    return [[text for text in job if text not in common and not text.startswith(("predictor=", "workload="))] for job in jobs]


def _folder(cfg: Cfg, name: _Name) -> Path:
    readable = re.sub(r"[^A-Za-z0-9._=@-]+", "_", f"{name.predictor}-{name.workload}")
    return root(str(cfg["out"])) / "train" / readable[:150]


def _rows(cfg: Cfg) -> Dataset:
    dataset = make(cfg["workload"])
    if not isinstance(dataset, Dataset):
        raise ValueError(f"workload gave a {type(dataset).__name__}, not a Dataset")
    return dataset


def _simulated(cfg: Cfg) -> Regret | None:
    size, load = cfg["regret"]["num_requests"], cfg["regret"]["load"]
    return None if size is None else _regret(size, load)


_regret = lru_cache(maxsize=4)(Regret)  # one for all predictors of a sweep: it keeps the arms that they share


def _key(cfg: Cfg, others: Mapping[str, Cfg]) -> str:
    """Of all that a report depends on: nodes, files, code; the nodes of the other workloads that it scores too."""
    parts = {"own": {part: cfg[part] for part in PARTS}, "others": {name: cfg["workload"] for name, cfg in others.items()}}
    own = [_hash(one) for one in (training, train_report, label_budget)]
    version: dict[str, Any] = {"version": lengthwise.__version__, "code": code(LEARNING), "scoring": own}
    if _simulated(cfg) is not None:
        version["simulated"] = [code(("sched", "engine", "experiments", "conf")), _hash(regret), _hash(simulate)]
    return digest({**parts, **version, "plugins": plugins(parts), "files": files(parts)})


def _hash(module: ModuleType) -> str:
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()


def _found(folder: Path, made_by: str) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return report if report.get("made_by") == made_by and Path(report["artefact"], "artefact.json").is_file() else None


def _trained(
    cfg: Cfg, name: _Name, dataset: Dataset, others: Mapping[str, Dataset], baselines: Sequence[str], made_by: str | None = None
) -> tuple[dict[str, Any], Path]:
    node = cfg["predictor"]
    if not (isinstance(node, Mapping) and node.get("_target_")):
        raise ValueError("predictor=none has nothing to train: choose a learned predictor such as gbdt")
    folder, begin = _folder(cfg, name), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    report = train(
        dataset, lambda: make(node), baselines=baselines, split=str(cfg["split"]), label_samples=cfg["label_samples"],
        others=others, regret=_simulated(cfg), folder=folder,
        told={"label": name.predictor, "rows_label": name.workload, "made_by": made_by},
        progress=lambda text: print(f"{time.perf_counter() - begin:6.1f} s  {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    return report, folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: sys.argv[1:]). Returns 0; leaves by SystemExit on refusal."""
    if argv is not None:
        sys.argv = ["lengthwise", *argv]
    run_app(app, CONFIG)
    return 0
