"""E2E latency relative to FCFS against the strength of a prediction's error: a panel per kind, a line per policy and variant.

Below the line prediction helps. Strengths stand at equal distances, as they were chosen, with the truth first.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..robustness import METRICS, POINT, ratios
from . import curves, style

SOURCE = "runs"
COLUMNS = 4  # of panels


def size(runs: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these runs. Raises NothingToDraw where none has an error."""
    table = _table(runs, "mean")
    rows = len(_panels(table))
    return max(0.55 + style.label_width(_looks(table)) + 2.0 * min(COLUMNS, _most(table)), 4.8), 0.85 + 2.1 * rows


def draw(runs: pd.DataFrame, ax: Axes, *, statistic: str = "mean") -> pd.DataFrame:
    """runs: as `load_runs` returns them. statistic: mean | p99. Returns `ratios` of that statistic, with `place`, the number of
    a strength within its panel."""
    if statistic not in METRICS:
        raise ValueError(f"statistic {statistic!r}: choose {' or '.join(METRICS)}")
    table = _table(runs, statistic)
    rows, looks = _panels(table), _looks(table)
    width, height = size(runs)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, len(rows), min(COLUMNS, _most(table)),
        left=0.5 / width, right=right / width, top=0.80 / height, bottom=0.45 / height, gap=(0.18 / width, 0.75 / height),
    )  # fmt: skip
    known = [*table["ratio"].dropna(), 1.0]
    low, high = 0.85 * min(known), 1.15 * max(known)  # bars may go on beyond
    for row, blocks in zip(panels, rows, strict=True):
        for panel, (title, block) in zip(row, blocks, strict=False):
            curves.log_axis(panel, low, high)
            if high < 4 * low:
                panel.yaxis.set_major_locator(MaxNLocator(5))
            panel.axhline(1.0, color=style.INK, linewidth=0.9, zorder=1)
            curves.lines(panel, block, looks, at="place", value="ratio")
            curves.finish(panel, block, at="place", first=panel is row[0], last=True, xlabel=False)
            strengths = block.drop_duplicates("place").sort_values("place")
            panel.set_xticks(strengths["place"], [f"{x:g}" for x in strengths["strength"]])
            panel.set_xlabel(block["error_axis"].iloc[0], fontsize=style.FONT - 1, color=style.INK)
            panel.set_title(title, fontsize=style.FONT, loc="left", weight="bold", pad=4)
        for panel in row[len(blocks) :]:
            panel.set_visible(False)
    style.key(panels[0][len(rows[0]) - 1], looks)
    style.headline(
        ax, height, f"{style.STATISTICS[statistic]} E2E latency relative to FCFS, by prediction error",
        "below the line prediction helps; bars: paired 95 % over seeds; 0: the truth; log scale",
    )  # fmt: skip
    return table


def _table(runs: pd.DataFrame, statistic: str) -> pd.DataFrame:
    table = ratios(runs)
    if table.empty:
        raise style.NothingToDraw("no cell has an error of a stated strength (conf/error)")
    table = table[table["statistic"] == statistic].reset_index(drop=True)
    places = table.groupby([*POINT, "error"], dropna=False)["strength"].rank(method="dense") - 1.0
    return table.assign(predictor="", low=table["ratio_low"], high=table["ratio_high"], place=places)


def _panels(table: pd.DataFrame) -> list[list[tuple[str, pd.DataFrame]]]:
    """(title, its rows) of each panel, COLUMNS to a row; a setting and load begin a new one."""
    out = []
    several = table.drop_duplicates(POINT).shape[0] > 1
    for point, block in table.groupby(POINT, sort=False, dropna=False):
        setting, load, rate = point
        where = f"{setting} {curves.name_of(*((rate, 'rate') if math.isnan(load) else (load, 'load')))}: " if several else ""
        kinds = [(f"{where}{kind}".replace("_", " "), own) for kind, own in block.groupby("error", sort=False)]
        out += [kinds[k : k + COLUMNS] for k in range(0, len(kinds), COLUMNS)]
    return out


def _most(table: pd.DataFrame) -> int:
    return int(table.groupby(POINT, dropna=False)["error"].nunique().max())


def _looks(table: pd.DataFrame) -> dict[style.Schedule, style.Look]:
    """By policy and variant: a colour, and a marker of its own too."""
    arms = dict.fromkeys(zip(table["policy"], table["variant"], strict=True))
    found = style.looks([(str(policy), "", str(variant)) for policy, variant in arms])
    return {key: replace(look, marker=style.MARKERS[k % len(style.MARKERS)]) for k, (key, look) in enumerate(found.items())}
