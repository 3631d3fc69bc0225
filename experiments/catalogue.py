"""Catalogue: every workload node, the files behind it, whether they are there and whether they are the ones meant.

Nothing is registered: nodes are those of conf/workload, and a loader's module holds its Origins (`workloads/origin.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .workloads.origin import File, Origin, found, sha256

CHOICES = ("trace", "model")  # arguments of a node that may name one of its module's Origins


@dataclass(frozen=True)
class Entry:
    """A node and one of its origins; `name` is what `fetch=` takes: the node's, or NODE.ORIGIN where it has several.

    chosen False: the node can be told to take this one, by that name, and is set to another.
    """

    name: str
    node: str
    origin: Origin
    chosen: bool = True


@dataclass(frozen=True)
class Status:
    """path None: none of the files is there. checksum: ok, not recorded, or both sums when they differ."""

    file: File | None = None
    path: Path | None = None
    checksum: str = ""

    @property
    def differs(self) -> bool:
        return self.checksum.startswith("differs")


def nodes() -> dict[str, dict[str, Any]]:
    """Name -> content of every node of conf/workload, by name."""
    folder = files("lengthwise.conf") / "workload"
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".yaml")), key=lambda path: path.name)
    return {
        path.name.removesuffix(".yaml"): dict(OmegaConf.to_container(OmegaConf.create(path.read_text()), resolve=False))  # type: ignore[arg-type]
        for path in paths
    }


def origins(node: Mapping[str, Any]) -> dict[str, Origin]:
    """The Origins of a node's files, by their names in its module: the one it chooses, else all; none for one without files."""
    target = str(node.get("_target_", ""))
    if not target.startswith("lengthwise."):
        return {}
    every: Mapping[str, Origin] = getattr(import_module(target.rsplit(".", 1)[0]), "ORIGINS", {})
    chosen = [str(node[key]) for key in CHOICES if str(node.get(key)) in every]
    return {chosen[0]: every[chosen[0]]} if chosen else dict(every)


def entries() -> list[Entry]:
    """One per node and origin, and one for each origin that a node could choose and none does, under the origin's name."""
    out: list[Entry] = []
    spare: dict[str, Entry] = {}
    for node, content in nodes().items():
        mine = origins(content)
        for name, origin in mine.items():
            out.append(Entry(node if len(mine) == 1 else f"{node}.{name}", node, origin))
        if any(key in content for key in CHOICES) and len(mine) == 1:
            module = import_module(str(content["_target_"]).rsplit(".", 1)[0])
            spare.update({name: Entry(name, node, origin, False) for name, origin in module.ORIGINS.items()})
    taken = {id(entry.origin) for entry in out}
    return out + [entry for entry in spare.values() if id(entry.origin) not in taken]


def without_files() -> list[str]:
    """Nodes that no Origin stands behind."""
    return [node for node, content in nodes().items() if not origins(content)]


def status(origin: Origin, *, check: bool = True) -> Status:
    """Which file of an origin is there; check: read it whole and compare its checksum."""
    there = found(origin)
    if there is None:
        return Status()
    file, path = there
    if not check:
        return Status(file, path)
    if file.sha256 is None:
        return Status(file, path, "not recorded")
    got = sha256(path)
    return Status(file, path, "ok" if got == file.sha256 else f"differs: recorded {file.sha256}, found {got}")


def files_of(node: Mapping[str, Any]) -> list[Path]:
    """The data files a node would open that are there, packages left out: a result can be tied to their content."""
    mine = (found(origin) for origin in origins(node).values() if origin.package is None)
    return [pair[1] for pair in mine if pair is not None]


def shown(path: Path) -> str:
    """A path below LENGTHWISE_DATA by what follows it; else its name, or a package's."""
    folder = os.environ.get("LENGTHWISE_DATA")
    if folder and path.is_relative_to(Path(folder).expanduser()):
        return str(path.relative_to(Path(folder).expanduser()))
    if path.is_relative_to(Path.cwd()):
        return f"./{path.relative_to(Path.cwd())}"
    parts = path.parts
    return f"package {parts[parts.index('site-packages') + 1]}" if "site-packages" in parts else path.name


def wants(name: str) -> Iterator[Entry]:
    """The entries `name` means: one, or all of a node. Raises ValueError naming those there are."""
    every = entries()
    mine = [entry for entry in every if entry.name == name] or [entry for entry in every if entry.node == name]
    if not mine:
        raise ValueError(f"{name!r} is not one of {', '.join(entry.name for entry in every)}")
    yield from mine
