"""Slowdown by size: who pays for shortest-first. A row for the median and one for the tail, a column per setting, at one load.

x is the decile of the output length, 1 the shortest tenth; slowdown is E2E latency over E2E alone on an idle engine. A flat
line treats short and long alike.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from . import curves, style
from .sources.points import METHOD, schedules_of
from .sources.slowdowns import MEASURES, load_slowdowns

SOURCE = load_slowdowns
ROWS = {"p50": "P50", "p99": "P99"}
TITLES = {**style.TITLES, "slowdown": "Slowdown (E2E / E2E alone)"}


def size(frame: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these rows."""
    return 0.75 + style.label_width(style.looks(schedules_of(frame))) + 2.5 * frame["setting_name"].nunique(), 4.9


def draw(frame: pd.DataFrame, ax: Axes, *, load: float | None = None, measure: str = "slowdown") -> pd.DataFrame:
    """frame: as `load_slowdowns` returns it. load (or rate, where no cell has a load): null is the greatest below 1, else the
    least. measure: slowdown | normalised_latency | e2e | ttft | wait.

    Returns one row per setting x schedule x decile x statistic (mean, p50, p99, max): value, low, high, n, least_size,
    greatest_size (tokens), num_open, num_seeds, num_cells, absent. Raises ValueError on a load that is not there.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure={measure!r}: choose {', '.join(MEASURES)}")
    at = curves.axis_of(frame)
    chosen = style.choose(frame[at], load, at)
    table = frame[(frame["measure"] == measure) & (frame[at] == chosen)].reset_index(drop=True)
    looks, settings = style.looks(schedules_of(table)), list(dict.fromkeys(table["setting_name"]))
    width, height = size(frame)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, len(ROWS), len(settings),
        left=0.62 / width, right=right / width, top=0.92 / height, bottom=0.48 / height, gap=(0.22 / width, 0.22 / height),
    )  # fmt: skip
    inner = ((width - 0.62 - right - 0.22 * (len(settings) - 1)) / len(settings), (height - 1.40 - 0.22) / 2)
    for r, (statistic, name) in enumerate(ROWS.items()):
        row = table[table["statistic"] == statistic]
        known = row["value"].dropna()
        for c, setting in enumerate(settings):
            panel, block = panels[r][c], row[row["setting_name"] == setting]
            curves.lines(panel, block, looks, at="decile")
            if len(known) and known.gt(0).all():
                curves.log_axis(panel, known.min() / 1.25, known.max() * 1.3)
            style.quiet(panel)
            panel.set_xlim(0.6, 10.4)
            panel.set_xticks(range(1, 11))
            panel.tick_params(labelleft=c == 0, labelbottom=r == len(ROWS) - 1)
            if c == 0:
                panel.set_ylabel(name, fontsize=style.FONT, weight="bold", color=style.INK)
            if block["value"].isna().all():
                panel.set_yticks([])
                note = f"no {name}: {style.span(block['n'])} a decile"
                panel.text(0.5, 0.5, note, transform=panel.transAxes, fontsize=style.FONT - 1, color=style.GREY, ha="center")
            elif c == len(settings) - 1:
                curves.name_ends(panel, curves.ends_of(block, looks, "decile"), inner)
            if r == 0:
                alarm = style.seeds_of(block) if block["absent"].ne("").any() else ""
                style.panel_head(panel, setting, f"{at} {chosen:g}", alarm)
            elif c == 0:
                edges = ", ".join(f"{q} {size:g}" for q, size in _sizes(block).items())
                panel.set_xlabel(f"decile of the output length ({edges} tokens)", fontsize=style.FONT)
    note = f"requests of all seeds pooled, {style.span(table['n'])} a decile; bars: {METHOD}; log scale"
    style.headline(ax, height, f"{TITLES[measure]} by size", note)
    return table


def _sizes(block: pd.DataFrame) -> dict[str, float]:
    """Output lengths (tokens) at which the deciles 1, 5 and 9 end."""
    ends = block.groupby("decile")["greatest_size"].max()
    return {f"P{10 * decile}": float(ends[decile]) for decile in (1, 5, 9) if decile in ends}
