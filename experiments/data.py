"""`lengthwise data`: what data the workload nodes know, where each is had, what is found; fetch one, or show what one is like.

lengthwise data                          every node and its files (check=false: without reading them whole)
lengthwise data fetch=NAME [to=FOLDER]   download a file that has an address, into LENGTHWISE_DATA or FOLDER
lengthwise data show=NODE [KEY=VALUE]    a summary of one workload, with arguments of its loader
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .catalogue import Entry, Status, entries, nodes, shown, status, wants, without_files
from .fetching import NotFetched, fetch

WIDTH = 28


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` asks for and print it. Returns 0, or 1 after one line on stderr when it cannot be done, 2 when it is not
    understood."""
    args = list(sys.argv[1:] if argv is None else argv)
    if any(arg in ("-h", "--help", "help") for arg in args):
        print(__doc__.strip())
        return 0
    asked = dict(arg.partition("=")[::2] for arg in args)
    odd = next((arg for arg in args if "=" not in arg), None)
    if odd is not None:
        print(f"lengthwise data: {odd!r} is not KEY=VALUE; `lengthwise data --help` shows what there is", file=sys.stderr)
        return 2
    try:
        if "fetch" in asked:
            return _fetch(asked)
        if "show" in asked:
            return _show(asked.pop("show"), args)
        if set(asked) - {"check"} or asked.get("check", "true") not in ("true", "false"):
            print(f"lengthwise data: {' '.join(args)}: there are check=false, fetch=NAME, show=NODE", file=sys.stderr)
            return 2
        print("\n".join(listing(check=asked.get("check", "true") == "true")))
    except (NotFetched, FileNotFoundError, ValueError) as error:
        print(f"lengthwise data: {error}", file=sys.stderr)
        return 1
    return 0


def listing(*, check: bool = True) -> list[str]:
    """The catalogue as lines: per entry its name, what it is, licence, what is found, and where it is had."""
    lines = []
    for entry in entries():
        state = status(entry.origin, check=check)
        lines += [
            f"{entry.name:<{WIDTH}}  {_found(state)}" + ("" if entry.chosen else f", workload={entry.node}"),
            f"{'':<{WIDTH}}  {entry.origin.what}; {entry.origin.licence}",
            f"{'':<{WIDTH}}  from {entry.origin.project}: {entry.origin.page}",
        ]
        if state.path is None:
            lines.append(f"{'':<{WIDTH}}  {_how(entry)}")
    return [*lines, f"no file needed, or the one you name: {', '.join(without_files())}"]


def _found(state: Status) -> str:
    if state.path is None:
        return "missing"
    size = f"{state.file.size:,} bytes, " if state.file is not None and state.file.size else ""
    return f"found {shown(state.path)} ({size}checksum {state.checksum or 'not looked at'})"


def _how(entry: Entry) -> str:
    """How to get what is missing."""
    names = " or ".join(file.name for file in entry.origin.files)
    if any(file.url for file in entry.origin.files):
        return f"get it: lengthwise data fetch={entry.name}, or put {names} (or .gz) below LENGTHWISE_DATA"
    return f"get it: {entry.origin.how}" + ("" if entry.origin.package else f"; as {names} below LENGTHWISE_DATA")


def _fetch(asked: Mapping[str, str]) -> int:
    unknown = set(asked) - {"fetch", "to"}
    if unknown:
        raise ValueError(f"fetch=NAME takes to=FOLDER besides, not {', '.join(sorted(unknown))}")
    for entry in wants(asked["fetch"]):
        state = status(entry.origin)
        if state.path is not None and not state.differs and "to" not in asked:
            print(f"{entry.name}: there already, {shown(state.path)} (checksum {state.checksum})")
            continue
        path = fetch(entry.origin, asked.get("to"))
        recorded = any(file.sha256 for file in entry.origin.files if file.name == path.name)
        print(f"{entry.name}: {path} (checksum {'ok' if recorded else 'not recorded'})")
    return 0


def _show(node: str, args: Sequence[str]) -> int:
    print(
        "\n".join(
            f"{key:<{WIDTH}}  {value}" for key, value in described(node, [arg for arg in args if not arg.startswith("show=")])
        )
    )
    return 0


def described(node: str, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """(what, value) lines about the dataset of a workload node, `overrides` being KEY=VALUE arguments of its loader.

    Raises ValueError naming the nodes there are, or an argument the node does not have; FileNotFoundError without its file.
    """
    from omegaconf import OmegaConf

    from .nodes import make
    from .trace_summary import summarise

    there = nodes()
    if node not in there:
        raise ValueError(f"workload {node!r} is not one of {', '.join(there)}")
    changes = OmegaConf.from_dotlist(list(overrides))
    odd = [str(key) for key in changes if key not in there[node]]
    if odd:
        raise ValueError(
            f"workload {node} has no argument {odd[0]!r}; it has {', '.join(k for k in there[node] if k[0] != '_')}"
        )
    dataset = make(OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(there[node]), changes), resolve=True))
    lines = [("workload", node), ("source", dataset.source), ("licence", dataset.licence)]
    lines += [(key, _number(value)) for key, value in summarise(dataset).items() if value is not None]
    lines += [(f"dropped {reason}", f"{count:,}") for reason, count in dataset.dropped.items()]
    return lines + [(f"note {key}", str(value)) for key, value in dataset.notes.items()]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
