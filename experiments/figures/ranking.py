"""Every policy in a row: its mean and its tail at one load, a dot per predictor, two columns per setting.

Rows stand by the best mean that no oracle had a part in. A policy that reads no prediction has one dot. A hollow dot knows the
true lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..statistics import LEAST
from . import curves, style
from .sources.points import METHOD, load_points

SOURCE = load_points
ROW = 0.16  # inches of a policy
PANEL = 1.9  # inches across
TONES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # by predictor, in order of appearance
BESIDE = 0.22  # of a row: how far apart the dots of one policy are


def size(points: pd.DataFrame, *, statistics: Sequence[str] = ("mean", "p999")) -> tuple[float, float]:
    """Inches that the page wants for these points."""
    names = [_name(policy) for policy in dict.fromkeys(points["policy"])]
    width = 0.4 + _margin(names) + (PANEL + 0.15) * points["setting_name"].nunique() * len(statistics)
    return width, 1.95 + ROW * len(names)


def draw(
    points: pd.DataFrame,
    ax: Axes,
    *,
    latency: str = "e2e",
    statistics: Sequence[str] = ("mean", "p999"),
    load: float | None = None,
) -> pd.DataFrame:
    """points: as `load_points` returns them. load (or rate, where no cell has a load): null is the greatest below 1, else the
    least. statistics: of mean | p50 | p99 | p999.

    Returns one row per setting x policy x predictor x statistic, best policy first: value, low, high (s), n, note, num_seeds,
    num_cells, absent. Raises ValueError on a latency, statistic or load that is not there.
    """
    if latency not in style.TITLES:
        raise ValueError(f"latency {latency!r}: choose from {', '.join(style.TITLES)}")
    if not statistics or not set(statistics) <= set(style.STATISTICS):
        raise ValueError(f"statistics {list(statistics)}: choose from {', '.join(style.STATISTICS)}")
    at = curves.axis_of(points)
    chosen = style.choose(points[at], load, at)
    table = points[(points["latency"] == latency) & (points[at] == chosen)]
    order = ranked(table)
    table = table[table["statistic"].isin(list(statistics))]
    table = table.assign(place=table["policy"].map({policy: k for k, policy in enumerate(order)}))
    table = table.sort_values(["setting_name", "place"], kind="stable").reset_index(drop=True)
    settings, predictors = list(dict.fromkeys(points["setting_name"])), list(dict.fromkeys(points["predictor"]))
    width, height = size(points, statistics=statistics)
    left = _margin([_name(policy) for policy in order])
    columns = [(setting, statistic) for setting in settings for statistic in statistics]
    panels = style.grid(
        ax, 1, len(columns),
        left=left / width, right=0.25 / width, top=1.22 / height, bottom=0.45 / height, gap=(0.15 / width, 0.0),
    )[0]  # fmt: skip
    for k, (panel, (setting, statistic)) in enumerate(zip(panels, columns, strict=True)):
        block = table[(table["setting_name"] == setting) & (table["statistic"] == statistic)]
        _panel(panel, block, order, predictors)
        first = k % len(statistics) == 0
        alarm = style.seeds_of(block) if first and block["absent"].ne("").any() else ""
        style.panel_head(panel, setting if first else "", style.STATISTICS[statistic], alarm)
        if block["value"].isna().all():
            note = (
                f"{style.STATISTICS[statistic]} wants {LEAST.get(statistic, 1):,}\nrequests a point,\n{style.span(block['n'])}"
            )
            panel.text(0.5, 0.5, note, transform=panel.transAxes, fontsize=style.FONT - 1, color=style.GREY, ha="center")
            panel.set_xticks([])
        if k == 0:
            panel.set_yticks(range(len(order)), [_name(policy) for policy in order])
            panel.set_xlabel(style.TITLES[latency], fontsize=style.FONT, color=style.INK)
    _key(panels[0], predictors, height - 0.30 - 1.22 - 0.45)
    note = f"{curves.name_of(chosen, at)}; requests of all seeds pooled, {style.span(table['n'])}; bars: {METHOD}; log scale"
    style.headline(ax, height, f"{style.TITLES[latency]} of each policy, best mean first", note)
    return table.drop(columns="place")


def ranked(table: pd.DataFrame) -> list[str]:
    """The policies of these points by their least mean without an oracle, as the geometric mean over settings; those without a
    mean last, in order of appearance."""
    means = table[(table["statistic"] == "mean") & ~table["predictor"].str.contains("oracle")]
    best = means.groupby(["policy", "setting_name"], sort=False)["value"].min()
    score = np.log(best).groupby("policy", sort=False).mean()
    policies = list(dict.fromkeys(table["policy"]))
    return sorted(
        policies, key=lambda policy: score.get(policy, math.nan) if score.get(policy) == score.get(policy) else math.inf
    )


def _panel(panel: Axes, block: pd.DataFrame, order: Sequence[str], predictors: Sequence[str]) -> None:
    style.quiet(panel, grid_axis="x")
    panel.set_ylim(len(order) - 0.4, -0.6)
    panel.set_yticks([])
    known = block.dropna(subset=["value"])
    known = known[known["value"] > 0]
    if not len(known):
        return
    least, most = known["value"].min() / 1.15, known["value"].max() * 1.15
    panel.set_xscale("log")
    panel.set_xlim(least, most)
    panel.set_xticks(_ticks(least, most), [f"{x:g}" for x in _ticks(least, most)])
    panel.minorticks_off()
    fcfs = known[known["policy"] == "fcfs"]
    for x in fcfs["value"]:
        panel.axvline(x, color=style.GREY, linewidth=0.8, dashes=(2, 2), zorder=1)
    for row in known.to_dict("records"):
        k, place = predictors.index(row["predictor"]), order.index(row["policy"])
        y = place + BESIDE * _shift(row, known)
        dot = _dot(row["predictor"], k)
        if not math.isnan(row["low"]):
            panel.plot(np.clip([row["low"], row["high"]], least, most), [y, y], color=dot["mec"], linewidth=1.0, zorder=2)
        panel.plot(row["value"], y, zorder=3, **dot)
        if row["num_seeds"] < row["num_cells"]:
            panel.annotate(
                f"n={row['num_seeds']}", (row["value"], y), xytext=(4, -3), textcoords="offset points", fontsize=5.5,
                color=style.ALARM,
            )  # fmt: skip


def _shift(row: dict[Any, Any], known: pd.DataFrame) -> float:
    """Where among its policy's dots this one stands: 0 in the middle."""
    mine = known[known["policy"] == row["policy"]]
    same = list(zip(mine["predictor"], mine["variant"], strict=True))
    return same.index((row["predictor"], row["variant"])) - (len(same) - 1) / 2


def _ticks(least: float, most: float) -> list[float]:
    """Round numbers within, as many as are readable."""
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        found = [float(f"{m * 10.0**e:g}") for e in range(-6, 8) for m in steps if least <= m * 10.0**e <= most]
        if len(found) >= 3:
            return found
    return found or [float(f"{math.sqrt(least * most):.2g}")]


def _dot(predictor: str, k: int) -> dict[str, Any]:
    colour = style.INK if predictor == "none" else TONES[k % len(TONES)]
    face = "white" if "oracle" in predictor else colour
    return {"marker": "o", "ms": 3.4, "mfc": face, "mec": colour, "mew": 0.9, "linestyle": "none"}


def _key(panel: Axes, predictors: Sequence[str], height: float) -> None:
    """A key of predictors above `panel`, which is `height` inches high."""
    handles = []
    for k, predictor in enumerate(predictors):
        text = "reads no prediction" if predictor == "none" else predictor.replace("_", " ")
        handles += panel.plot([], [], label=text, **_dot(predictor, k))
    panel.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0 + 0.42 / height), ncols=len(handles), frameon=False,
        fontsize=style.FONT - 1, handletextpad=0.2, columnspacing=1.2, borderaxespad=0.0,
    )  # fmt: skip


def _name(policy: str) -> str:
    return style.label(policy, "none")


def _margin(names: Sequence[str]) -> float:
    """Inches left of the panels, for the names."""
    return 0.3 + style.CHARACTER * 1.12 * max(len(name) for name in names)
