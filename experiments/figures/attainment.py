"""SLO attainment against the scale of the SLO, stricter to the right, a panel per setting and load.

Every limit is multiplied by the scale and the stored requests are judged again: nothing is simulated. Shares are pooled over
seeds. The dotted line is 90 %.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from . import curves, style
from .sources.attainments import JUDGED, load_attainments
from .sources.points import schedules_of

SOURCE = load_attainments
TARGET = 0.9
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)


def size(frame: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these rows."""
    looks = style.looks(schedules_of(frame))
    return (
        0.75 + style.label_width(looks) + 1.9 * len(_points(frame)),
        1.1 + 2.0 * frame["setting_name"].nunique(),
    )


def draw(frame: pd.DataFrame, ax: Axes, *, judged: str = "all") -> pd.DataFrame:
    """frame: as `load_attainments` returns it. judged: all limits together, or ttft | tpot | e2e alone.

    Returns one row per setting x load x schedule x scale: value, low, high, num_met, n, num_undecided, num_seeds, num_cells,
    absent, slo.
    """
    if judged not in JUDGED:
        raise ValueError(f"judged={judged!r}: choose {', '.join(JUDGED)}")
    table = frame[frame["judged"] == judged].reset_index(drop=True)
    if not len(table):
        raise ValueError(f"no cell has a limit of {judged}")
    looks, points = style.looks(schedules_of(table)), _points(table)
    settings = list(dict.fromkeys(table["setting_name"]))
    width, height = size(frame)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, len(settings), len(points),
        left=0.55 / width, right=right / width, top=0.92 / height, bottom=0.48 / height, gap=(0.16 / width, 0.48 / height),
    )  # fmt: skip
    at = curves.axis_of(table)
    for r, setting in enumerate(settings):
        for c, point in enumerate(points):
            panel = panels[r][c]
            block = table[(table["setting_name"] == setting) & (table[at] == point)]
            style.quiet(panel)
            panel.axhline(TARGET, color=style.GREY, linewidth=0.8, dashes=(1, 2), zorder=1)
            for schedule, look in looks.items():
                line = curves.rows_of(block, schedule).sort_values("scale")
                x, low, high = (line[key].to_numpy(np.float64) for key in ("scale", "low", "high"))
                panel.fill_between(x, low, high, color=look.colour, alpha=0.10, linewidth=0, zorder=2)
                panel.plot(x, line["value"], color=look.colour, linewidth=1.2, dashes=look.dashes, zorder=3)
            panel.axvline(1.0, color=style.FAINT, linewidth=0.8, zorder=0)
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(FixedLocator(TICKS))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
            panel.set_xlim(frame["scale"].max(), frame["scale"].min())
            panel.set_ylim(0, 1.02)
            panel.tick_params(labelleft=c == 0, labelbottom=r == len(settings) - 1)
            missing = block["absent"].ne("").any() or not len(block)
            style.panel_head(panel, setting if c == 0 else "", f"{at} {point:g}", style.seeds_of(block) if missing else "")
            if r == len(settings) - 1 and c == 0:
                panel.set_xlabel("SLO scale (stricter to the right)", fontsize=style.FONT, color=style.INK)
    style.key(panels[0][-1], looks, dots=False)
    limits = " | ".join(dict.fromkeys(text for text in table["slo"] if text))
    what = "all limits" if judged == "all" else judged.upper()
    note = f"scale 1 is {limits}; {what}; seeds pooled, {style.span(table['n'])} judged; bands: 95 % jackknife over seeds"
    style.headline(ax, height, "SLO attainment", note)
    return table


def _points(frame: pd.DataFrame) -> list[float]:
    return sorted(frame[curves.axis_of(frame)].dropna().unique())
