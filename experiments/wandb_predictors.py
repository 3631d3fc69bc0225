"""Mirror predictors to W&B: each as one artifact of type `predictor`, once per content.

What a study's cells learned is either a trained artefact (`predictor=artefact predictor.path=...`: its files, with its
report's scores) or out-of-fold predictions that `prepare` made (one prediction per dataset row, and how they were made).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .load_runs import Cell
from .paths import PREPARED
from .stored import config_of
from .wandb_session import PATIENCE, Ledger, contained, log_once, one_line, open_run, whole_run, why_broken

TYPE = "predictor"


@dataclass(frozen=True)
class Kept:
    """A predictor on disk. hash: of its content. files: what the artifact holds. metrics: numbers of its report, flat."""

    name: str
    hash: str
    files: tuple[Path, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        return f"predictor-{self.hash}"


def trained(folder: Path | str) -> Kept:
    """The predictor that `lengthwise train` saved: its artefact folder, or the one above that holds report.json.

    Raises ValueError when there is none.
    """
    folder = Path(folder)
    if not (folder / "artefact.json").is_file():
        folder = folder / "artefact"
    if not (folder / "artefact.json").is_file():
        raise ValueError(f"{folder.parent} holds no artefact.json: give the folder that `lengthwise train` printed")
    raw = (folder / "artefact.json").read_bytes()  # it holds the digests of all other files
    page = json.loads(raw)
    files = [folder / "artefact.json", *(folder / Path(name).name for name in sorted(page["digests"]))]
    facts = {
        key: page.get(key) for key in ("name", "class", "unit", "settings", "features", "versions", "provenance", "latency")
    }
    report, metrics = folder.parent / "report.json", {}
    if report.is_file():
        told = json.loads(report.read_text())
        files.append(report)
        metrics = flat_numbers(told.get("metrics", {}))
        facts["report"] = {key: told.get(key) for key in ("workload", "source", "licence", "data_hash", "num_rows", "splits")}
    return Kept(str(page["name"]), hashlib.sha256(raw).hexdigest()[:16], tuple(files), facts, metrics)


def predictors_of(cells: Iterable[Cell], root: Path) -> list[Kept]:
    """The learned predictors of complete cells, each content once, in order of appearance. root: the PATH of `out=PATH`."""
    contents = {path.read_text().strip(): path.parent for path in sorted((root / PREPARED / "predictions").glob("*/content"))}
    found: dict[str, Kept] = {}
    seen = set()
    for cell in cells:
        code = str((cell.provenance.get("prepared") or {}).get("predictions") or "")
        if not code or code in seen:
            continue
        seen.add(code)
        kept = _trained_of(cell) or _prepared(code, contents.get(code), cell)
        if kept is not None:
            found.setdefault(kept.hash, kept)
    return list(found.values())


def mirror_predictors(
    wandb: Any, folder: Path, kept: Iterable[Kept], ledger: Ledger, *, mode: str, project: str, group: str
) -> int:
    """Log each of `kept` that the ledger does not know, as a run of its own. Returns how many. Raises what W&B raises."""
    count = 0
    for one in kept:
        if one.hash in ledger.known:
            continue
        rows = int(bool(one.metrics))
        if mode == "offline" and whole_run(folder, one.run_id, rows) is not None:
            ledger.add(one.hash, one.run_id)
            continue
        with open_run(
            wandb, folder, one.run_id, mode, project=project, name=f"predictor {one.name}", group=group, job_type=TYPE,
            tags=[TYPE, one.name[:64]], config={"predictor": dict(one.facts), "hash": one.hash},
        ) as run:  # fmt: skip
            if one.metrics:
                log_once(run, one.metrics)
            artifact = wandb.Artifact(f"{one.name}-{one.hash}", type=TYPE, metadata={**one.facts, "metrics": dict(one.metrics)})
            for file in one.files:
                artifact.add_file(str(file), name=file.name)
            run.log_artifact(artifact)
            where = Path(run.dir).parent
        if mode == "offline" and (why := why_broken(where, rows, PATIENCE)):
            raise OSError(why)
        ledger.add(one.hash, one.run_id)
        count += 1
    return count


def log_predictor(
    source: Path | str, folder: Path | str, *, mode: str = "offline", project: str = "lengthwise"
) -> dict[str, Any]:
    """Mirror one predictor that `lengthwise train` saved in `source` under `folder`/wandb; upload it when `mode` is online.

    Returns mirrored, skipped (there already), failed (counts) and error (a line, or None). Raises ValueError when `source` is
    no artefact, and never for anything W&B does.
    """
    kept = trained(source)
    where = Path(folder) / "wandb"
    told: dict[str, Any] = {"mirrored": 0, "skipped": 0, "failed": 0, "error": None}
    try:
        where.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(where, mode)
        if kept.hash not in ledger.known:
            with contained(where, mode) as wandb:
                told["mirrored"] = mirror_predictors(
                    wandb, where, [kept], ledger, mode=mode, project=project, group="predictors"
                )
        told["skipped"] = 1 - told["mirrored"]
    except Exception as error:  # W&B is a copy; what was trained is on disk
        told |= {"failed": 1, "error": one_line(error)}
    return told


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in a nested mapping, keys joined by a slash."""
    out: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[f"{prefix}{key}"] = value
    return out


def _trained_of(cell: Cell) -> Kept | None:
    """The artefact that the cell's config names, if it is still there."""
    node = config_of(cell).get("predictor")
    path = node.get("path") if isinstance(node, Mapping) else None
    return trained(path) if isinstance(path, str) and (Path(path) / "artefact.json").is_file() else None


def _prepared(code: str, folder: Path | None, cell: Cell) -> Kept | None:
    """The prepared predictions with content hash `code`; None where they are no longer there."""
    if folder is None:
        return None
    info = json.loads((folder / "info.json").read_text())
    facts = {**info, "workload": cell.fields.get("workload")}
    return Kept(str(info.get("name", "predictor")), code, (folder / "columns.npz", folder / "info.json"), facts)
