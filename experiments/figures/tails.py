"""P50, P99 and P99.9 of one latency against load: a row per percentile, a column per setting, log scale.

A percentile is one of the requests of all seeds together; where they are too few for it there is no point, and the panel says
how many there are and how many it wants.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from ..statistics import LEAST
from . import curves, style
from .sources.points import METHOD, load_points, schedules_of

SOURCE = load_points
ROWS = ("p50", "p99", "p999")


def size(points: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these points."""
    width = 0.75 + style.label_width(style.looks(schedules_of(points))) + 2.5 * points["setting_name"].nunique()
    return width, 1.3 + 1.95 * len(ROWS)


def draw(points: pd.DataFrame, ax: Axes, *, latency: str = "ttft") -> pd.DataFrame:
    """points: as `load_points` returns them. latency: e2e | ttft | tpot | wait | normalised_latency.

    Returns one row per setting x load x schedule x percentile: value, low, high (s), n, note, num_seeds, num_cells, absent.
    """
    if latency not in style.TITLES:
        raise ValueError(f"latency {latency!r}: choose from {', '.join(style.TITLES)}")
    table = points[(points["latency"] == latency) & points["statistic"].isin(ROWS)].reset_index(drop=True)
    at, looks = curves.axis_of(table), style.looks(schedules_of(table))
    settings = list(dict.fromkeys(table["setting_name"]))
    width, height = size(points)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, len(ROWS), len(settings),
        left=0.62 / width, right=right / width, top=0.82 / height, bottom=0.48 / height, gap=(0.22 / width, 0.20 / height),
    )  # fmt: skip
    inner = ((width - 0.62 - right - 0.22 * (len(settings) - 1)) / len(settings), (height - 1.30 - 0.40) / 3)
    for r, statistic in enumerate(ROWS):
        row = table[table["statistic"] == statistic]
        known = row["value"].dropna()
        for c, setting in enumerate(settings):
            panel, block = panels[r][c], row[row["setting_name"] == setting]
            curves.lines(panel, block, looks, at=at)
            if len(known) and known.gt(0).all():
                curves.log_axis(panel, known.min() / 1.3, known.max() * 1.4)
            curves.finish(panel, table, at=at, first=c == 0, last=r == len(ROWS) - 1)
            if block["value"].isna().all():
                panel.set_yticks([])
                note = f"{style.STATISTICS[statistic]} wants {LEAST[statistic]:,} requests\na point, {style.span(block['n'])}"
                panel.text(0.5, 0.5, note, transform=panel.transAxes, fontsize=style.FONT - 1, color=style.GREY, ha="center")
            if c == 0:
                panel.set_ylabel(style.STATISTICS[statistic], fontsize=style.FONT, weight="bold", color=style.INK)
            if r == 0:
                panel.set_title(setting, fontsize=style.FONT, loc="left", weight="bold", pad=4)
            if c == len(settings) - 1 and block["value"].notna().any():
                curves.name_ends(panel, curves.ends_of(block, looks, at), inner)
    style.headline(
        ax, height, f"Tails of {style.TITLES[latency]}",
        f"requests of all seeds pooled, {style.span(table['n'])} a point; bars: {METHOD}; log scale",
    )  # fmt: skip
    return table
