"""Prepared inputs: saturation rates and out-of-fold predictions, made once, in PATH/prepared/, named by what made them.

Whoever needs one first makes it under a file lock, everybody else waits and reads. The hash of their content is part of the
hash of every cell that uses them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lengthwise
from lengthwise.predictors.predictions import Predictions

from .cellhash import LEARNING, SERVING, code, digest, files, plugins
from .learned import make_predictions, predictions_key
from .nodes import is_asked, is_prepared
from .paths import PREPARED, remove_stale, temporary
from .saturation import measure_saturation, saturation_key

log = logging.getLogger(__name__)
Cfg = Mapping[str, Any]
Made = tuple[Predictions, NDArray[np.int64], dict[str, Any]]
SATURATION = (
    "sched",
    "engine",
    "experiments/workloads",
    "experiments/saturation.py",
    "experiments/nodes.py",
    "experiments/source.py",
    "experiments/births.py",
    "experiments/dataset.py",
    "experiments/reshape.py",
    "experiments/prefixes.py",
    "experiments/served.py",
)
ASKING = ("experiments/served_stage.py", "experiments/remote_stage.py", "experiments/bench")


class Prepared:
    """The prepared inputs under `root`/prepared. Makes what is absent; keeps the last few in memory."""

    def __init__(self, root: Path) -> None:
        self.folder = root / PREPARED
        self.made: set[Path] = set()  # by this object, not found

    def saturation_rate(self, cfg: Cfg) -> float:
        """Requests per second at saturation, see saturation.py."""
        return float(json.loads((self._saturation(cfg) / "saturation.json").read_text())["rate"])

    def predictions(self, cfg: Cfg) -> Made | None:
        """(predictions by dataset row, fold by dataset row, info); None where nothing is predicted beforehand."""
        return _read_predictions(self._predictions(cfg)) if is_prepared(cfg) else None

    def hashes(self, cfg: Cfg) -> dict[str, str]:
        """kind -> hash of content, of all that `cfg` needs; makes what is absent."""
        return {kind: (path / "content").read_text() for kind, path in self.needed(cfg, make=True).items()}

    def needed(self, cfg: Cfg, *, make: bool = False) -> dict[str, Path]:
        """kind -> folder, of all that `cfg` needs; made when `make`, else perhaps absent."""
        found = {}
        if cfg["rate"] is None and cfg["load"] is not None and cfg.get("saturation") is None:
            found["saturation"] = self._saturation(cfg) if make else self._path("saturation", cfg)
        if is_prepared(cfg):
            found["predictions"] = self._predictions(cfg) if make else self._path("predictions", cfg)
        return found

    def _saturation(self, cfg: Cfg) -> Path:
        def write(folder: Path) -> str:
            made = measure_saturation(dict(cfg))
            _write_json(folder / "saturation.json", made)
            return digest(made)

        return self._once(self._path("saturation", cfg), write)

    def _predictions(self, cfg: Cfg) -> Path:
        def write(folder: Path) -> str:
            predictions, fold, info = make_predictions(dict(cfg))
            columns = {
                "score": predictions.score, "point": predictions.point, "survival": predictions.survival,
                "fallback": predictions.fallback, "fold": fold,
            }  # fmt: skip
            arrays = {key: np.ascontiguousarray(column) for key, column in columns.items() if column is not None}
            np.savez(folder / "columns.npz", **arrays)  # type: ignore[arg-type]
            _write_json(folder / "info.json", info)
            total = hashlib.sha256(digest(info).encode())
            for key, array in arrays.items():
                total.update(f"{key} {array.dtype} {array.shape}".encode() + array.tobytes())
            return total.hexdigest()[:16]

        return self._once(self._path("predictions", cfg), write)

    def _path(self, kind: str, cfg: Cfg) -> Path:
        key = saturation_key(cfg) if kind == "saturation" else predictions_key(cfg)
        parts = LEARNING if kind == "predictions" else (*SATURATION, *SERVING, *ASKING) if is_asked(cfg) else SATURATION
        key = {"key": key, "version": lengthwise.__version__, "code": code(parts), "plugins": plugins(key), "files": files(key)}
        return self.folder / kind / digest(key)

    def _once(self, path: Path, write: Callable[[Path], str]) -> Path:
        """`path`, once `write` has filled it, here or elsewhere. It gets a temporary folder and returns a content hash."""
        if not (path / "content").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                if not (path / "content").exists():
                    log.info("preparing %s: once, for every cell that needs them", path.parent.name)
                    remove_stale(path.parent)
                    folder = temporary(path)
                    folder.mkdir()
                    try:
                        (folder / "content").write_text(write(folder))
                        folder.rename(path)
                        self.made.add(path)
                    finally:
                        shutil.rmtree(folder, ignore_errors=True)
        return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for it; it goes with the process that holds it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@lru_cache(maxsize=4)
def _read_predictions(path: Path) -> Made:
    with np.load(path / "columns.npz") as columns:
        made = Predictions(columns["score"], *(columns.get(key) for key in ("point", "survival", "fallback")))
        return made, columns["fold"], json.loads((path / "info.json").read_text())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
