"""Artefacts: a fitted predictor as a folder of JSON, npz and plain text that says what it was made from. Never pickle.

artefact.json   class, settings, unit, tokenizer, data hash, split, feature names, versions, latency, digests
arrays.npz      weights, idf, residual knots, ...
NAME.txt        LightGBM models in its own text format, the vocabulary
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .latency import LatencyModel
from .predictor import LengthPredictor, State
from .prompts import Prompts

FORMAT = 1
_SEEN = "seen_prompts"  # hashes of the training prompts, beside the predictor's own arrays
_LIBRARIES = ("lengthwise", "lightgbm", "numpy", "scikit-learn", "scipy")
_REFUSED = ("lightgbm",)  # its model text is read back: another major version may read it differently


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that a prediction passes through."""
    out = {}
    for name in _LIBRARIES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def data_hash(prompts: Prompts, lengths: ArrayLike, censored: ArrayLike | None = None) -> str:
    """SHA-256 of training rows, in their order: same rows, same hash."""
    digest = hashlib.sha256()
    for column in (prompts.prompt_len, lengths, () if censored is None else censored):
        digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
        digest.update(b"|")
    for text in prompts.texts or ():
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    if prompts.client is not None:
        digest.update(json.dumps(["client", list(prompts.client)]).encode())
    if prompts.answers_before is not None:
        before = [None if row is None else [int(n) for n in row] for row in prompts.answers_before]
        digest.update(json.dumps(["answers_before", before]).encode())
    return digest.hexdigest()


def save(predictor: LengthPredictor, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write `predictor` into `folder`, created if need be; artefact.json comes last, so that a torn folder does not load.

    provenance: JSON values such as tokenizer, data_hash, split, dataset; joined with the predictor's own. Raises ValueError
    when it is unfitted or its unit was never set.
    """
    if predictor.unit is None:
        raise ValueError(f"predictor {predictor.name} has no unit: say how its training lengths were counted (predictor.unit)")
    state = predictor.state()
    arrays = dict(state.arrays) if predictor.seen is None else {**state.arrays, _SEEN: predictor.seen}
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:  # they would be pickled
        raise ValueError(f"predictor {predictor.name}: array {objects[0]} holds Python objects, which an artefact does not")
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name, text in sorted(state.texts.items()):
        digests[f"{name}.txt"] = _write(folder / f"{name}.txt", text.encode("utf-8", "surrogatepass"))
    with (folder / "arrays.npz.part").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    raw = (folder / "arrays.npz.part").read_bytes()
    os.replace(folder / "arrays.npz.part", folder / "arrays.npz")
    digests["arrays.npz"] = hashlib.sha256(raw).hexdigest()
    page = {
        "format": FORMAT,
        "class": f"{type(predictor).__module__}:{type(predictor).__qualname__}",
        "name": predictor.name,
        "settings": predictor.settings(),
        "unit": predictor.unit,
        "training_median": predictor.training_median,
        "latency": None if predictor.latency is None else predictor.latency.as_dict(),
        "features": list(state.features),
        "values": state.values,
        "versions": library_versions(),
        "digests": digests,
        "provenance": {**predictor.provenance, **(provenance or {})},
    }
    _write(folder / "artefact.json", (json.dumps(page, indent=1, allow_nan=False) + "\n").encode())


def _write(path: Path, raw: bytes) -> str:
    part = path.with_name(path.name + ".part")
    part.write_bytes(raw)
    os.replace(part, path)
    return hashlib.sha256(raw).hexdigest()


def load(path: Path | str | None, unit: str | None = None, transfer: bool = False) -> LengthPredictor:
    """The predictor in folder `path`, ready to predict.

    unit: how the workload counts lengths; another unit than the artefact's is refused, unless `transfer`, which marks the
    predictor instead (`provenance["marks"]`). Without `unit` here, `LengthPredictor.check_unit` does the same later. Raises
    ValueError on a missing, torn or foreign artefact, or a library version that it refuses; warns on one that it doubts.
    """
    if path is None:
        raise ValueError(
            "no artefact is named: artefact=PATH, predictor.path=PATH or reshape.artefact=PATH; `lengthwise train` prints it"
        )
    folder = Path(path)
    try:
        page = json.loads((folder / "artefact.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no artefact.json: give the folder that `lengthwise train` printed") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'artefact.json'} is not JSON: {error}") from None
    if page.get("format") != FORMAT:
        raise ValueError(f"{folder}: artefact format {page.get('format')!r}, this version reads {FORMAT}")
    _check_versions(page["versions"])
    texts, arrays = _read(folder, page["digests"])
    seen = arrays.pop(_SEEN, None)
    predictor = class_of(page["class"])(**page["settings"])
    predictor.restore(State(page["values"], arrays, texts, tuple(page["features"])))
    predictor.unit = page["unit"]
    predictor.training_median = page["training_median"]
    predictor.latency = None if page["latency"] is None else LatencyModel.from_dict(page["latency"])
    predictor.provenance = page["provenance"]
    predictor.seen = seen
    predictor.transfer = transfer
    if unit is not None:
        predictor.check_unit(unit)
    return predictor


def _read(folder: Path, digests: Mapping[str, str]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    texts, arrays = {}, {}
    for name, digest in digests.items():
        file = folder / Path(name).name
        if not file.is_file():
            raise ValueError(f"{folder}: the artefact's file {name} is missing")
        raw = file.read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            raise ValueError(f"{file} is not the file that was saved: its SHA-256 differs")
        if name.endswith(".txt"):
            texts[name.removesuffix(".txt")] = raw.decode("utf-8", "surrogatepass")
    with np.load(folder / "arrays.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return texts, arrays


def class_of(path: str) -> type[LengthPredictor]:
    """The predictor class that an artefact names as "module:name". Raises ValueError where there is none."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"the artefact's predictor {path} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LengthPredictor)):
        raise ValueError(f"the artefact's class {path} is not a LengthPredictor")
    return found


def _check_versions(stored: Mapping[str, str]) -> None:
    for name, now in library_versions().items():
        then = stored.get(name, "absent")
        if then.split(".")[0] == now.split(".")[0]:
            continue
        text = f"the artefact was made with {name} {then}, installed is {now}"
        if name in _REFUSED:
            raise ValueError(f"{text}: train it again, or install {name} {then.split('.')[0]}.x")
        warnings.warn(f"{text}: predictions may differ", stacklevel=3)
