"""What the commands that write hardware nodes share: `key=value` settings, where data lies, one node or all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]
Maker = Callable[[Settings, str | None], tuple[str, str]]  # settings, wanted name -> name, text of a node


def options(settings: Sequence[str], defaults: Settings) -> dict[str, Any]:
    """`key=value` settings over their defaults. Raises ValueError at an unknown key, or a word where a whole number stands."""
    out = dict(defaults)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in defaults:
            raise ValueError(f"'{setting}' is not one of {', '.join(f'{k}=' for k in defaults)}")
        if isinstance(defaults[key], int) and not value.isdecimal():
            raise ValueError(f"{key}={value} is not a whole number of 0 or more")
        out[key] = int(value) if isinstance(defaults[key], int) else value
    return out


def chosen(given: Settings, key: str, known: Iterable[str]) -> str:
    """The option `key`. Raises ValueError, with what there is, when it is not `known`."""
    known = list(known)
    if given[key] not in known:
        raise ValueError(f"{key}={given[key]} is not one of {', '.join(known)}")
    return str(given[key])


def command(module: str, given: Settings, defaults: Settings) -> str:
    """The command that writes a node: what is not the default, and no path of this machine."""
    words = [f"{k}={v}" for k, v in given.items() if k not in ("out", "path", "all") and v != defaults[k]]
    return " ".join([f"python -m lengthwise.engine.simulated.{module}", *words])


def data_file(path: str, usual: Sequence[str]) -> Path:
    """`path`, or the first of the `usual` names that lies in the folder LENGTHWISE_DATA. Raises ValueError, naming them."""
    folder = os.environ.get("LENGTHWISE_DATA")
    places = [Path(path)] if path else [Path(folder) / name for name in usual] if folder else []
    for place in places:
        if place.is_file():
            return place
    if path:
        raise ValueError(f"no file path={path}")
    where = "in the folder LENGTHWISE_DATA" if folder else "as LENGTHWISE_DATA is not set"
    raise ValueError(f"no file {' or '.join(usual)} {where}; path=FILE names one")


def run(
    settings: Sequence[str],
    defaults: Settings,
    shipped: Sequence[Settings],
    one: Callable[[Settings, str | None], tuple[str, str]],
) -> int:
    """Do what `settings` ask: print a node, write it to the file `out`, or with `all` write every `shipped` one into the folder
    `out`, naming those that cannot be. Returns the exit status."""
    try:
        given = options(settings, defaults)
        out = Path(given["out"] or ".")
        if not given["all"]:
            _, text = one(given, out.stem if given["out"] else None)
            if given["out"]:
                _write(out, text)
            else:
                print(text, end="")
            return 0
        if not out.is_dir():
            raise ValueError(f"out={out} is no folder to write the nodes into")
        written = 0
        for asked in shipped:
            try:
                name, text = one({**given, **asked}, None)
            except ValueError as error:
                print(f"left out {' '.join(f'{k}={v}' for k, v in asked.items())}: {error}", file=sys.stderr)
                continue
            _write(out / f"{name}.yaml", text)
            written += 1
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if written else 2


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write out={out}: {error.strerror}") from None
    print(f"wrote {out}")
