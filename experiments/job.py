"""Job: one cell into its folder, whole or not at all, and one line into the study's manifest."""

from __future__ import annotations

import json
import logging
import shutil
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import lengthwise

from .cell import run_cell
from .cellhash import VOLATILE, cell_hash, cell_name, digest, fields, lasting
from .manifest import Row, append, find_row
from .paths import MANIFEST, describe_error, root, temporary, traceback_file
from .prepare import Prepared
from .run import FILES
from .saved import save_workload

log = logging.getLogger(__name__)


def planned(cfg: Mapping[str, Any], prepared: Prepared) -> Row:
    """The manifest row of a cell that has not run: cell, hash, status, folder, fields, config (hash of the config alone).

    Makes prepared inputs that are absent.
    """
    code = cell_hash(cfg, prepared.hashes(cfg))
    name = cell_name(cfg, code)
    row: Row = {"cell": name, "hash": code, "status": "planned", "folder": name, "fields": fields(cfg)}
    return {**row, "config": digest(lasting(cfg))}


def run_job(cfg: Mapping[str, Any], overrides: Iterable[str] = (), *, in_sweep: bool = False) -> Row:
    """Run a cell unless its result is there. Never raises: returns the manifest row, status ok or failed (with `error`).

    in_sweep: take the row that the study has planned for it, so that a file edited meanwhile does not make it another cell.
    Adds files under PATH/<name>/: the cell's folder, or the traceback of its failure; appends the row to the manifest.
    """
    study = root(cfg["out"]) / cfg["name"]
    prepared = Prepared(root(cfg["out"]))
    row: Row = {"cell": cell_name(cfg, "unprepared"), "hash": "", "folder": cell_name(cfg, "unprepared"), "fields": fields(cfg)}
    start = time.perf_counter()
    try:
        study.mkdir(parents=True, exist_ok=True)
        row = (find_row(study, digest(lasting(cfg))) if in_sweep else None) or planned(cfg, prepared)
        row["cached"] = is_complete(study / row["folder"], row["hash"])
        if not row["cached"]:
            _compute(cfg, prepared, study / row["folder"], row["hash"], list(overrides))
        row["status"] = "ok"
        traceback_file(study / row["folder"]).unlink(missing_ok=True)
    except Exception as error:  # whatever a cell raises, the others go on; the traceback is kept
        where = study / row["folder"]
        message = str(error)
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            message = describe_error(error, where)
        row |= {"status": "failed", "error": f"{type(error).__name__}: {message}".splitlines()[0][:500]}
        row["traceback"] = _keep_traceback(traceback_file(where))
    row["seconds"] = round(time.perf_counter() - start, 3)
    try:
        append(study, row)
    except OSError as error:
        log.error("%s", describe_error(error, study / MANIFEST))
    return row


def is_complete(folder: Path, code: str) -> bool:
    """Whether `folder` holds the whole result of the cell with this hash."""
    if not all((folder / name).is_file() for name in (*FILES, ".hydra/config.yaml")):
        return False
    try:
        return bool(json.loads((folder / "summary.json").read_text())["provenance"]["config_hash"] == code)
    except (json.JSONDecodeError, KeyError):
        return False


def _compute(cfg: Mapping[str, Any], prepared: Prepared, folder: Path, code: str, overrides: list[str]) -> None:
    run = run_cell(dict(cfg), prepared)
    if not run.summary["metrics"]["num_finished"]:
        raise ValueError(f"0 of {cfg['num_requests']} requests finished: there is nothing to measure")
    run.summary.setdefault("provenance", {}).update(
        config_hash=code, version=lengthwise.__version__, prepared=prepared.hashes(cfg)
    )
    made = temporary(folder)
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        run.save(made)
        if cfg.get("keep_workload") and run.workload is not None:
            save_workload(run.workload, made / "workload")
        _write_config(made / ".hydra", cfg, overrides)
        if folder.exists() and not is_complete(folder, code):
            shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:
            if not is_complete(folder, code):  # else another process has just written the same cell
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if run.raw is not None:
        run.raw.unlink(missing_ok=True)


def _write_config(folder: Path, cfg: Mapping[str, Any], overrides: list[str]) -> None:
    """The resolved config, as Hydra would keep it; without VOLATILE keys, so that the same cell has the same bytes anywhere."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(lasting(cfg)), sort_keys=True))
    kept = [override for override in overrides if override.split("=")[0].lstrip("+~") not in VOLATILE]
    (folder / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(kept)))


def _keep_traceback(path: Path) -> str | None:
    """Write the traceback in flight to `path`; to the log when even that fails."""
    try:
        path.write_text(traceback.format_exc())
    except OSError:
        log.exception("no traceback file can be written")
        return None
    return str(path)
