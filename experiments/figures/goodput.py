"""One measured number against the offered rate, a panel per setting: goodput, attainment, preemptions, KV use, ...

A point is the mean over seeds of the cells' values, its bar the 95 % t interval over seeds. For goodput the dotted line is what
is offered: a point on it serves every request within its SLO. For attainment it is 90 %, with a mark where a line falls below.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..comparison import SETTING, with_setting_names
from ..load_runs import OK
from ..statistics import over_seeds
from . import curves, style
from .sources.points import by_point, schedules_of, with_variants

SOURCE = "runs"
NAMES = {
    "goodput_rps": "Goodput (requests/s that meet their SLO)", "goodput_tokens_per_s": "Goodput (output tokens/s)",
    "attainment": "SLO attainment", "kv_use_mean": "KV cache in use", "busy_share": "Time with a step running",
    "preemptions_per_s": "Preemptions/s", "output_tokens_per_s": "Output tokens/s", "requests_per_s": "Requests finished/s",
}  # fmt: skip
SHARES = ("attainment", "kv_use_mean", "busy_share", "prefix_hit_share", "fallback_share", "recompute_tax")
TARGET = 0.9


def size(runs: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these runs."""
    looks = style.looks(schedules_of(with_variants(runs)))
    settings = with_setting_names(runs[[key for key in SETTING if key in runs]].drop_duplicates())["setting_name"].nunique()
    return 0.65 + style.label_width(looks) + 2.7 * settings, 3.4


def draw(runs: pd.DataFrame, ax: Axes, *, metric: str = "goodput_rps", at: str = "rate") -> pd.DataFrame:
    """runs: as `load_runs` returns them. metric: any number of theirs. at: rate | load.

    Returns one row per setting x load x schedule: value, low, high, num_seeds, num_cells, absent; with attainment also
    attainment_n (requests judged, all seeds) and crossing (where the line falls below 90 %, linear between points).
    """
    if metric not in runs:
        raise ValueError(f"no metric {metric} in these runs")
    if at not in curves.AXES:
        raise ValueError(f"at={at!r}: choose {' or '.join(curves.AXES)}")
    table = _table(runs, metric)
    at = "rate" if table["load"].isna().all() else at
    looks = style.looks(schedules_of(table))
    settings = list(dict.fromkeys(table["setting_name"]))
    width, height = size(runs)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, 1, len(settings),
        left=0.55 / width, right=right / width, top=0.78 / height, bottom=0.48 / height, gap=(0.25 / width, 0.0),
    )[0]  # fmt: skip
    inner = ((width - 0.55 - right - 0.25 * (len(settings) - 1)) / len(settings), height - 1.26)
    offered = metric == "goodput_rps"
    top = np.nanmax([*table["value"], *(table["rate"] if offered else ()), 0.0]) or 1.0
    for panel, setting in zip(panels, settings, strict=True):
        block = table[table["setting_name"] == setting]
        if offered:
            line = block.sort_values(at).drop_duplicates(at)
            panel.plot(line[at], line["rate"], color=style.GREY, linewidth=0.8, dashes=(1, 2), zorder=1)
        if metric == "attainment":
            panel.axhline(TARGET, color=style.GREY, linewidth=0.8, dashes=(1, 2), zorder=1)
            for schedule, look in looks.items():
                x = crossing(curves.rows_of(block, schedule), at)
                mask = (table["setting_name"] == setting) & pd.Series(
                    [s == schedule for s in zip(table["policy"], table["predictor"], table["variant"], strict=True)]
                )
                table.loc[mask, "crossing"] = x
                panel.plot([x, x], [0, TARGET], color=look.colour, linewidth=0.6, dashes=(1, 1.5), zorder=1)
        curves.lines(panel, block, looks, at=at)
        panel.set_ylim(0, 1.02 if metric in SHARES else 1.06 * top)
        x_all = block if at == "rate" else table  # saturation rates differ by setting
        curves.finish(panel, x_all, at=at, first=panel is panels[0], last=True)
        if metric in SHARES:
            panel.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
        if block["value"].isna().all():
            panel.text(0.5, 0.5, f"no {metric}", transform=panel.transAxes, fontsize=style.FONT, color=style.GREY, ha="center")
        panel.set_title(setting, fontsize=style.FONT, loc="left", weight="bold", pad=4)
        if panel is panels[-1]:
            curves.name_ends(panel, curves.ends_of(block, looks, at), inner)
    note = f"mean over seeds, {style.span(table['num_seeds'])}; bars: 95 % t interval over seeds"
    note += "; dotted: offered" if offered else f"; dotted: {TARGET:.0%}" if metric == "attainment" else ""
    style.headline(ax, height, NAMES.get(metric, metric.replace("_", " ")), note)
    return table


def crossing(line: pd.DataFrame, at: str) -> float:
    """Where the line first falls below TARGET, linear between its points; NaN when it never does, or starts below."""
    rows = line.sort_values(at)
    x, y = rows[at].to_numpy(np.float64), rows["value"].to_numpy(np.float64)
    for k in range(1, len(x)):
        if y[k - 1] >= TARGET > y[k]:
            return float(x[k - 1] + (x[k] - x[k - 1]) * (y[k - 1] - TARGET) / (y[k - 1] - y[k]))
    return float("nan")


def _table(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = []
    for point, index in by_point(runs):
        group = runs.iloc[index]
        done, others = group[group["status"] == OK], group[group["status"] != OK]
        found = over_seeds(dict(zip(done["seed"].astype(int), done[metric].astype(float), strict=True)))
        row = point | {"metric": metric, "value": found.mean, "low": found.low, "high": found.high, "num_seeds": found.n}
        row |= {"num_cells": len(group)}
        row["absent"] = ", ".join(f"{seed}: {s}" for seed, s in zip(others["seed"], others["status"], strict=True))
        if metric == "attainment" and "attainment_n" in done:
            row["attainment_n"] = int(done["attainment_n"].sum())
        rows.append(row)
    return pd.DataFrame(rows).astype({key: float for key in ("load", "rate", "value", "low", "high")})
