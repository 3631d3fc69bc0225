"""Origin: where the file behind a workload is had, under which licence, and how its content is known again.

A loader's module holds its Origins in `ORIGINS`, by the name its node gives as `trace` (one entry where there is no choice);
`lengthwise data` lists them by walking conf/workload. A loader never downloads: it opens what is there, or says what is not.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .files import find_file

COMMIT = "https://github.com/{project}/raw/{commit}/{path}"


@dataclass(frozen=True)
class File:
    """A file by its name, also with `.gz` after it. sha256, size (bytes): of the content, uncompressed; None: not known here.

    url: a public address of exactly this content.
    """

    name: str
    sha256: str | None = None
    size: int | None = None
    url: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}.gz")


@dataclass(frozen=True)
class Origin:
    """what: one line. project, page: who publishes it and where that is written. files: any one of them will do, the
    publisher's own first. how: what to do where no file has an address of its own. package: a Python package that carries the
    file, at the path that is its name."""

    what: str
    project: str
    page: str
    licence: str
    files: tuple[File, ...]
    how: str = ""
    package: str | None = None


def github(project: str, commit: str, path: str, sha256: str | None = None, size: int | None = None) -> File:
    """A file of a GitHub project at one commit, so that what its address gives never changes."""
    return File(path.rsplit("/", 1)[-1], sha256, size, COMMIT.format(project=project, commit=commit, path=path))


def origin_of(origins: Mapping[str, Origin], trace: str) -> Origin:
    """The Origin named `trace`. Raises ValueError naming those there are."""
    if trace not in origins:
        raise ValueError(f"trace {trace!r} is not one of {', '.join(origins)}")
    return origins[trace]


def found(origin: Origin) -> tuple[File, Path] | None:
    """The first of an origin's files that is there: (which, its path); None when none is."""
    if origin.package is not None:
        spec = importlib.util.find_spec(origin.package)
        places = [] if spec is None or spec.origin is None else [Path(spec.origin).parent / file.name for file in origin.files]
        return next(((file, path) for file, path in zip(origin.files, places, strict=False) if path.is_file()), None)
    for file in origin.files:
        for name in file.names:
            try:
                return file, find_file(name)
            except FileNotFoundError:
                continue
    return None


def open_origin(origin: Origin, path: str | None) -> Path:
    """`path` if given (see `find_file`), else the file of `origin` that is there. Raises FileNotFoundError naming the path, or
    all names that were looked for."""
    if path is not None:
        return find_file(path)
    there = found(origin)
    if there is None:
        names = ", ".join(file.name for file in origin.files)
        raise FileNotFoundError(
            f"no file of {origin.what}: looked for {names} (or .gz) below LENGTHWISE_DATA and the current folder; "
            "`lengthwise data` says where it is had, path= names another file"
        )
    return there[1]


def contents(path: Path) -> IO[bytes]:
    """The content of a file, uncompressed."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")  # type: ignore[return-value]


def sha256(path: Path) -> str:
    """Of the uncompressed content, in hex."""
    total = hashlib.sha256()
    with contents(path) as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def stated(origin: Origin, path: Path) -> dict[str, Any]:
    """Arguments of a Dataset that its origin settles: source (never a machine's path) and licence."""
    return {"source": f"{origin.project}: {path.name}", "licence": origin.licence}
