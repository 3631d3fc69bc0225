"""What every benchmark prints and writes: one table, one JSON of medians with their spread."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path


def arguments(description: str, **options: int | list[str]) -> argparse.Namespace:
    """--json PATH, and one --NAME option with a default for each keyword: a number, or words."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    for name, default in options.items():
        many = {"nargs": "*"} if isinstance(default, list) else {"type": int}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **many)  # type: ignore[arg-type]
    return parser.parse_args()


def report(
    samples: dict[str, list[float]], path: Path | None, centre: Callable[[Sequence[float]], float] = statistics.median
) -> None:
    """Print name, median (or another `centre`), min, max and n of each figure; write them to `path` if given."""
    width = max(map(len, samples))
    print(f"{'figure':{width}}  {centre.__name__:>12}  {'min':>12}  {'max':>12}  n")
    for name, values in samples.items():
        print(f"{name:{width}}  {centre(values):12.4g}  {min(values):12.4g}  {max(values):12.4g}  {len(values)}")
    if path is None:
        return
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "commit": head.stdout.strip() or None,
        "n": {name: len(values) for name, values in samples.items()},
        "figures": {name: centre(values) for name, values in samples.items()},
        "spread": {name: [min(values), max(values)] for name, values in samples.items()},
    }
    path.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
