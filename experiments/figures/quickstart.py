"""Mean E2E latency relative to FCFS, per schedule: a column per setting, a row per load, and the share of the gap closed.

A dot left of the line is faster than FCFS; its bar is the paired 95 % interval over seeds. The number beside it is how
much of the way from FCFS to the same policy with the oracle it went: n/a where FCFS and the oracle do not differ.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..comparison import paired
from . import curves, style
from .sources.points import schedules_of

SOURCE = "runs"
NOTE = (
    "left of the line is faster; bars: paired 95 % over seeds; hollow: knows the true lengths; "
    "gap closed: from FCFS to the same policy with the oracle"
)
LINE = 0.13  # inches that a further line of it takes


def size(runs: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these runs. Raises NothingToDraw where FCFS has none beside it."""
    table = relative(runs)
    if table.empty:
        raise style.NothingToDraw("no other schedule was run beside FCFS, with which they are compared")
    columns = table["setting_name"].nunique()
    at = curves.axis_of(table)
    most = max(len(curves.points_of(block, at)) for _, block in table.groupby("setting_name"))
    lines = most * (len(_schedules(table)) + 1.6)
    width = _margin(_schedules(table)) - 0.07 + 3.4 * columns
    return width, 1.3 + 0.158 * lines + LINE * style.broken(NOTE, style.FONT - 0.5, width).count("\n")


def draw(runs: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """runs: as `load_runs` returns them. `ax` is divided into panels. Returns one row per setting x load x schedule: ratio,
    ratio_low, ratio_high, gap_closed, gap_note, difference_seeds, num_cells and more."""
    table = relative(runs)
    at = curves.axis_of(table)
    settings, loads = list(dict.fromkeys(table["setting_name"])), curves.points_of(table, at)
    schedules, colours = _schedules(table), style.colours(table["policy"])
    width, height = ax.get_figure().get_size_inches() if ax.get_figure() else (8, 6)  # type: ignore[union-attr]
    note = style.fitted(ax, NOTE, style.FONT - 0.5)
    top = 0.95 + LINE * note.count("\n")
    panels = style.grid(
        ax, len(loads), len(settings),
        left=_margin(schedules) / width, right=0.70 / width, top=top / height, bottom=0.24 / height,
        gap=(0.80 / width, 0.24 / height),
    )  # fmt: skip
    limits = _limits(table)
    ax.text(
        0.012, 1 - 0.10 / height, "Mean E2E latency relative to FCFS", fontsize=11, weight="bold", color=style.INK, va="top"
    )
    ax.text(0.012, 1 - 0.34 / height, note, fontsize=style.FONT - 0.5, color=style.GREY, va="top")
    for r, load in enumerate(loads):
        for c, setting in enumerate(settings):
            panel = panels[r][c]
            block = table[(table["setting_name"] == setting) & curves.at_point(table, at, load)]
            _panel(panel, block, schedules, colours, limits)
            if r == 0:
                panel.annotate(
                    "FCFS", (1.0, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 1.5), textcoords="offset points",
                    ha="right", va="bottom", fontsize=style.FONT - 0.5, color=style.INK,
                )  # fmt: skip
                panel.set_title(setting, fontsize=style.FONT + 1, weight="bold", color=style.INK, loc="left", pad=16)
                panel.text(
                    1.012,
                    1.01,
                    "gap closed",
                    transform=panel.transAxes,
                    fontsize=style.FONT - 0.5,
                    color=style.GREY,
                    va="bottom",
                )
            mark = "   overload, finite horizon" if at == "load" and load >= 1 else ""
            text = f"{curves.name_of(load, at)}{mark}"
            panel.text(0, 1.01, text, transform=panel.transAxes, fontsize=style.FONT, color=style.GREY, va="bottom")
            panel.tick_params(labelbottom=r == len(loads) - 1)
            if c == 0:
                _names(panel, schedules, colours)
    return table


def relative(runs: pd.DataFrame) -> pd.DataFrame:
    """The plotted table: all schedules but FCFS itself, a row each per setting and load; settings without FCFS are left out."""
    table = paired(runs)
    table = table[table["setting_name"].isin(table.loc[table["policy"] == "fcfs", "setting_name"])]
    columns = ["setting_name", "load", "rate", "policy", "predictor", "variant", "ratio", "ratio_low", "ratio_high"]
    columns += ["gap_closed", "gap_closed_low", "gap_closed_high", "gap_note", "difference_seeds", "num_cells"]
    return table[table["policy"] != "fcfs"][columns].reset_index(drop=True)


def percent(share: float) -> str:
    """A share in whole percents; never a negative zero."""
    return f"{round(100 * share)}%"


def _panel(
    panel: Axes, block: pd.DataFrame, schedules: list[style.Schedule], colours: dict[str, str], limits: tuple[float, float]
) -> None:
    style.quiet(panel, grid_axis="x")
    panel.set_xlim(*limits)
    places = _places(schedules)
    panel.set_ylim(places[-1] + 0.6, -0.6)
    panel.set_yticks([])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: percent(x)))
    panel.axvline(1.0, color=style.INK, linewidth=0.9, zorder=1)
    rows: dict[style.Schedule, Any] = {
        (row["policy"], row["predictor"], row["variant"]): row for row in block.to_dict("records")
    }
    for y, schedule in zip(places, schedules, strict=True):
        row, colour = rows.get(schedule), colours[schedule[0]]
        if row is None or math.isnan(row["ratio"]):
            panel.text(limits[0], y, " missing", fontsize=style.FONT - 1, color="#b00020", va="center", style="italic")
            continue
        if not math.isnan(row["ratio_low"]):
            low, high = np.clip((row["ratio_low"], row["ratio_high"]), *limits)
            panel.plot([low, high], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt", zorder=2)
            for end, cut, mark in ((low, row["ratio_low"] < low, "<"), (high, row["ratio_high"] > high, ">")):
                if cut:  # the bar goes on beyond the panel
                    panel.plot(end, y, mark, ms=4, color=colour, clip_on=False, zorder=2)
        hollow = "oracle" in schedule[1]
        panel.plot(row["ratio"], y, "o", ms=4.6, mfc="white" if hollow else colour, mec=colour, mew=1.2, zorder=3)
        text = row["gap_note"] or percent(row["gap_closed"])
        if row["difference_seeds"] < row["num_cells"]:
            text += f" n={row['difference_seeds']}"
        told = not row["gap_note"] and not hollow
        panel.annotate(
            text, (1, y), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=style.FONT - 0.5, color=style.INK if told else style.GREY, weight="bold" if told else "normal",
        )  # fmt: skip


def _names(panel: Axes, schedules: list[style.Schedule], colours: dict[str, str]) -> None:
    for y, schedule in zip(_places(schedules), schedules, strict=True):
        panel.annotate(
            _name(schedule), (0, y), xycoords=("axes fraction", "data"), xytext=(-6, 0),
            textcoords="offset points", ha="right", va="center", fontsize=style.FONT, color=colours[schedule[0]],
        )  # fmt: skip


def _name(schedule: style.Schedule) -> str:
    return " ".join((style.label(*schedule[:2]), *schedule[2:])).strip()


def _margin(schedules: list[style.Schedule]) -> float:
    """Inches left of the panels, for the names."""
    return max(1.42, 0.2 + 0.066 * max(len(_name(schedule)) for schedule in schedules))


def _places(schedules: list[style.Schedule]) -> list[float]:
    """Heights of the rows, with a little air between policies."""
    policies = [policy for policy, *_ in schedules]
    breaks = np.cumsum([0, *(a != b for a, b in pairwise(policies))])
    return [k + 0.4 * float(breaks[k]) for k in range(len(policies))]


def _schedules(table: pd.DataFrame) -> list[style.Schedule]:
    return list(schedules_of(table))


def _limits(table: pd.DataFrame) -> tuple[float, float]:
    """A range shared by all panels: every dot, and whiskers as far as they do not dwarf the dots."""
    ratios = table["ratio"].dropna().to_numpy()
    if not ratios.size:
        return 0.0, 1.1
    least, most = min(ratios.min(), 1.0), max(ratios.max(), 1.0)
    reach = 0.5 * max(most - least, 0.1)
    least = max(min(least, np.nanmin([*table["ratio_low"], least])), least - reach, 0.0)
    most = min(max(most, np.nanmax([*table["ratio_high"], most])), most + reach)
    pad = 0.04 * (most - least)
    return least - pad, most + pad
