"""The end of a study of errors: ratios to FCFS by strength, and below them where each policy stops being faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .load_runs import Cell, load_runs
from .robustness import METRICS, POINT, ratios, stops
from .table import Line, interval, wrap

NAMES = {"mean": "mean E2E", "p99": "P99 of E2E"}
FILES = ("error_ratios.csv", "error_stops.csv")
LEGEND = (
    "ratio to FCFS of the same seed (geometric mean over seeds), paired 95 % interval; below 1 prediction helps. 0: the truth.",
    "stops at: the strength at which the ratio first reaches 1, linear between those measured; > X: below 1 up to X, the "
    "strongest measured; <= X: not below 1 at X, the weakest measured; 0: not even the truth helps; ? where a ratio before "
    "it is missing; ~ below 1 again further on.",
)


def write_robustness(folder: Path, cells: Sequence[Cell]) -> list[Line]:
    """Write FILES into `folder` and return the page; nothing of either where no cell has an error."""
    table = ratios(load_runs(list(cells)))
    if table.empty:
        return []
    ends = stops(table)
    for name, frame in zip(FILES, (table, ends), strict=True):
        frame.to_csv(folder / name, index=False, float_format="%.10g", lineterminator="\n")
    return robustness_page(table, ends)


def robustness_page(table: pd.DataFrame, ends: pd.DataFrame) -> list[Line]:
    """Per setting and load: a block of ratios for each statistic, and one of where they stop. table, ends: of `ratios` and
    `stops`."""
    lines: list[Line] = []
    table, ends = (frame.assign(policy=(frame["policy"] + " " + frame["variant"]).str.strip()) for frame in (table, ends))
    points = (frame.groupby(POINT, sort=False, dropna=False) for frame in (table, ends))
    for (point, block), (_, here) in zip(*points, strict=True):
        where = _title(point)
        policies = list(dict.fromkeys(block["policy"]))
        for statistic in METRICS:
            part = block[block["statistic"] == statistic]
            rows = []
            for (kind, axis), own in part.groupby(["error", "error_axis"], sort=False):
                rows.append([f"{kind}: {axis}"])
                for strength in sorted(own["strength"].unique()):
                    rows.append([f"  {strength:g}", *(_ratio(own[own["strength"] == strength], p) for p in policies)])
            seeds = int(part["num_seeds"].max())
            head = f"{NAMES[statistic]} relative to FCFS  |  {where}  |  {seeds} seed{'s' * (seeds != 1)}"
            lines += _block(head, ["error and strength", *policies], rows)
        rows = [
            [f"{kind}: {axis}", *(" / ".join(_stop(own, p, statistic) for statistic in METRICS) for p in policies)]
            for (kind, axis), own in here.groupby(["error", "error_axis"], sort=False)
        ]
        lines += _block(f"prediction stops helping at ({' / '.join(NAMES.values())})  |  {where}", ["error", *policies], rows)
    return [*lines, [("", "")], *([(text, "dim")] for entry in LEGEND for text in wrap(entry))]


def _block(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Line]:
    full = [row for row in rows if len(row) == len(heads)]
    widths = [max(len(row[k]) for row in [heads, *full]) for k in range(len(heads))]

    def joined(row: Sequence[str]) -> str:
        cells = [text.ljust(w) if k == 0 else text.rjust(w) for k, (text, w) in enumerate(zip(row, widths, strict=False))]
        return "  ".join(cells).rstrip()

    body: list[Line] = [[(joined(row), "" if len(row) > 1 else "bold")] for row in rows]
    return [[("", "")], [(title, "bold cyan")], [(joined(heads), "dim")], *body]


def _title(point: Any) -> str:
    setting, load, rate = point
    return f"{setting}  |  " + (f"{rate:.4g} requests/s" if math.isnan(load) else f"load {load:g}")


def _ratio(own: pd.DataFrame, policy: str) -> str:
    row = own[own["policy"] == policy]
    if not len(row):
        return "-"
    bounds = row[["ratio", "ratio_low", "ratio_high"]].iloc[0].tolist()
    return interval(bounds, lambda x: f"{x:.2f}") or "-"


def _stop(own: pd.DataFrame, policy: str, statistic: str) -> str:
    row = own[(own["policy"] == policy) & (own["statistic"] == statistic)]
    if not len(row):
        return "-"
    at, note, strongest = (row[key].iloc[0] for key in ("stops_at", "note", "strongest"))
    again = "~" if "below 1 again" in note else ""
    if math.isnan(at):
        if note.startswith("at or below "):
            return f"{note.split(';')[0].replace('at or below', '<=')}{again}"
        return f"> {strongest:g}" if note.startswith("never up to") else "?"
    return f"{at:.3g}{again}"
