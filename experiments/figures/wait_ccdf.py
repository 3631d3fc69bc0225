"""Starvation: the share of requests that queued longer than a time, on log axes, a panel per setting and load.

A line ends at the longest wait of all, marked by a dot and written in the panel: how far the tail reaches right is how long the
unluckiest waited.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from . import curves, style
from .sources.points import schedules_of
from .sources.waits import load_waits

SOURCE = load_waits


def size(frame: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these rows."""
    looks = style.looks(schedules_of(frame))
    points = frame[curves.axis_of(frame)].nunique()
    return 0.75 + style.label_width(looks) + 2.2 * points, 1.1 + 2.15 * frame["setting_name"].nunique()


def draw(frame: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """frame: as `load_waits` returns it, which is also what is returned: wait (s), share_above, n, num_open, max_open,
    num_seeds, num_cells, absent per setting x load x schedule."""
    table = frame.reset_index(drop=True)
    at, looks = curves.axis_of(table), style.looks(schedules_of(table))
    settings, points = list(dict.fromkeys(table["setting_name"])), sorted(table[at].dropna().unique())
    width, height = size(frame)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, len(settings), len(points),
        left=0.55 / width, right=right / width, top=0.92 / height, bottom=0.48 / height, gap=(0.14 / width, 0.48 / height),
    )  # fmt: skip
    positive = table["wait"][table["wait"] > 0]
    span = (max(positive.min(), positive.max() / 1e5), positive.max() * 1.5) if len(positive) else (0.1, 10.0)
    floor = 0.7 / max(table["n"].max(), 2)
    for r, setting in enumerate(settings):
        for c, point in enumerate(points):
            panel = panels[r][c]
            block = table[(table["setting_name"] == setting) & (table[at] == point)]
            style.quiet(panel, grid_axis="both")
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xlim(*span)
            panel.set_ylim(floor, 1.3)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
            panel.tick_params(labelleft=c == 0, labelbottom=r == len(settings) - 1)
            longest = _lines(panel, block, looks, floor)
            alarm = style.seeds_of(block) if block["absent"].ne("").any() or not len(block) else ""
            style.panel_head(panel, setting if c == 0 else "", f"{at} {point:g}", alarm)
            for k, (text, colour) in enumerate(longest):
                panel.text(
                    0.03, 0.04 + 0.075 * (len(longest) - 1 - k), text, transform=panel.transAxes, fontsize=6, color=colour
                )
            if r == len(settings) - 1 and c == 0:
                panel.set_xlabel("queueing time (s)", fontsize=style.FONT, color=style.INK)
    style.key(panels[0][-1], looks, dots=False)
    note = f"requests of all seeds pooled, {style.span(table['n'])} a line; the dot is the longest wait of all"
    style.headline(ax, height, "Requests that queued longer", note)
    return table


def _lines(panel: Axes, block: pd.DataFrame, looks: dict[style.Schedule, style.Look], floor: float) -> list[tuple[str, str]]:
    """Draw a panel's lines. Returns (longest wait in words, colour) of each, the longest first."""
    longest: list[tuple[float, str, str]] = []
    for schedule, look in looks.items():
        line = curves.rows_of(block, schedule).sort_values("wait").dropna(subset=["wait"])
        if not len(line):
            continue
        x: Any = line["wait"].to_numpy(np.float64)
        y: Any = line["share_above"].to_numpy(np.float64)
        least = 1.0 / line["n"].iloc[0]  # beyond the longest wait there is nobody: the line ends one request above it
        panel.plot(x, np.maximum(y, least), color=look.colour, linewidth=1.2, dashes=look.dashes, drawstyle="steps-post")
        panel.plot(x[-1], least, clip_on=False, **look.dot(3.2))
        longest.append((x[-1], f"max {'>' if line['max_open'].iloc[0] else ''}{x[-1]:.3g} s", look.colour))
    longest.sort(key=lambda one: -one[0])
    return [(text, colour) for _, text, colour in longest]
