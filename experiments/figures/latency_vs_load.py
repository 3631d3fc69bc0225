"""One latency against load, a panel per setting and a line per schedule: the classic serving curve.

A point is a statistic of the requests of all seeds together, its bar the 95 % jackknife interval over seeds. A mean is never
shown alone: the median stands beside it, as a thin line.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from . import curves, style
from .sources.points import METHOD, load_points, schedules_of

SOURCE = load_points


def size(points: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these points."""
    return 0.65 + style.label_width(style.looks(schedules_of(points))) + 2.7 * points["setting_name"].nunique(), 3.4


def draw(points: pd.DataFrame, ax: Axes, *, latency: str = "ttft", statistic: str = "p99") -> pd.DataFrame:
    """points: as `load_points` returns them. latency: e2e | ttft | tpot | wait | normalised_latency. statistic: mean | p50 |
    p99 | p999.

    Returns one row per setting x load x schedule: value, low, high (s), n, note, num_seeds, num_cells, absent; with a mean,
    rows of p50 too. Cells that were given a rate and no load stand at their rate.
    """
    if latency not in style.TITLES or statistic not in style.STATISTICS:
        raise ValueError(f"no {statistic} of {latency}: choose {', '.join(style.STATISTICS)} of {', '.join(style.TITLES)}")
    shown = [statistic] if statistic != "mean" else ["mean", "p50"]
    table = points[(points["latency"] == latency) & points["statistic"].isin(shown)].reset_index(drop=True)
    at, looks = curves.axis_of(table), style.looks(schedules_of(table))
    settings = list(dict.fromkeys(table["setting_name"]))
    width, height = size(points)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, 1, len(settings),
        left=0.55 / width, right=right / width, top=0.78 / height, bottom=0.48 / height, gap=(0.25 / width, 0.0),
    )[0]  # fmt: skip
    main = table[table["statistic"] == statistic]
    known = pd.concat([table["value"], main["high"].clip(upper=main["value"] * 1.5)]).max()
    top = 1.05 * known if known > 0 else 1.0
    inner = ((width - 0.55 - right - 0.25 * (len(settings) - 1)) / len(settings), height - 1.26)
    for panel, setting in zip(panels, settings, strict=True):
        block = main[main["setting_name"] == setting]
        if statistic == "mean":
            median = table[(table["setting_name"] == setting) & (table["statistic"] == "p50")]
            curves.lines(panel, median, looks, at=at, bars=False, width=0.6)
        curves.lines(panel, block, looks, at=at)
        panel.set_ylim(0, top)
        curves.finish(panel, main, at=at, first=panel is panels[0], last=True)
        if block["value"].isna().all():  # not an empty page without a word
            note = f"no {latency}_{statistic}: no complete cell has enough requests"
            panel.text(0.5, 0.5, note, transform=panel.transAxes, fontsize=style.FONT, color=style.GREY, ha="center")
        panel.set_title(setting, fontsize=style.FONT, loc="left", weight="bold", pad=4)
        if panel is panels[-1]:
            curves.name_ends(panel, curves.ends_of(block, looks, at), inner)
    style.headline(
        ax, height, f"{style.STATISTICS[statistic]} {style.TITLES[latency]}",
        f"requests of all seeds pooled, {style.span(main['n'])} a point; bars: {METHOD}"
        + ("; thin: P50" if statistic == "mean" else ""),
    )  # fmt: skip
    return table
