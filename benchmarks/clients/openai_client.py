"""openai (the package): it measures nothing itself, so openai_calls.py does, by our definitions. Nothing to convert."""

from __future__ import annotations

import json
from pathlib import Path

from .load import Load, Times
from .server import Server

SCRIPT = Path(__file__).with_name("openai_calls.py")


def command(venv: Path, server: Server, tokenizer: Path, load: Load, out: Path) -> list[str]:
    return [str(venv / "bin" / "python"), str(SCRIPT), server.url, *map(str, load)]


def read(out: Path) -> Times:
    return Times(**json.loads((out / "stdout").read_text()))


def expected(ours: Times, load: Load) -> Times:
    return ours
