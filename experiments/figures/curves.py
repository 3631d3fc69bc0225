"""Lines against load or rate, one per schedule, a panel per setting: what the figures of serving systems have in common.

A line breaks where cells are missing, and a mark on the axis says so; a point that lacks seeds says how many it has. Lines are
named at their ends, in the order in which they end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from . import style
from .sources.points import SCHEDULE

AXES = {"load": "load (rate / saturation rate)", "rate": "requests/s"}


def axis_of(frame: pd.DataFrame) -> str:
    """load, or rate where no cell was given a load."""
    return "rate" if frame["load"].isna().all() else "load"


def points_of(table: pd.DataFrame, at: str) -> list[float]:
    """The loads or rates of a table in order; one NaN where it has none."""
    return sorted(float(x) for x in table[at].dropna().unique()) or [float("nan")]


def at_point(table: pd.DataFrame, at: str, point: float) -> Any:
    """Mask of the rows of a point of `points_of`."""
    return table[at].isna() if np.isnan(point) else table[at] == point


def name_of(point: float, at: str) -> str:
    """A point in words: "load 0.8", "20 requests/s"."""
    return "" if np.isnan(point) else f"load {point:g}" if at == "load" else f"{point:.4g} requests/s"


def lines(
    panel: Axes,
    table: pd.DataFrame,
    looks: Mapping[style.Schedule, style.Look],
    *,
    at: str,
    value: str = "value",
    bars: bool = True,
    width: float = 1.3,
) -> None:
    """Draw one setting's rows: a line per schedule over `at`, its 95 % bars from low to high, gaps marked."""
    for schedule, look in looks.items():
        line = rows_of(table, schedule).sort_values(at)
        if not len(line):
            continue
        x, y = line[at].to_numpy(np.float64), line[value].to_numpy(np.float64)
        panel.plot(x, y, color=look.colour, linewidth=width, dashes=look.dashes, zorder=3)
        if not bars:
            continue
        low, high = line["low"].to_numpy(np.float64), line["high"].to_numpy(np.float64)
        panel.vlines(x, low, high, color=look.colour, linewidth=0.9, alpha=0.55, zorder=2)
        panel.plot(x, y, linestyle="none", zorder=4, **look.dot())
        for k in np.flatnonzero(~np.isnan(y) & (line["num_seeds"] < line["num_cells"]).to_numpy()):
            panel.annotate(
                f"n={line['num_seeds'].iloc[k]}", (x[k], y[k]), xytext=(4, -7), textcoords="offset points", fontsize=6,
                color=style.ALARM,
            )  # fmt: skip
        for k in np.flatnonzero((line["num_seeds"] == 0).to_numpy()):
            panel.plot(
                x[k], 0.0, "x", ms=4.5, color=style.ALARM, transform=panel.get_xaxis_transform(), clip_on=False, zorder=5
            )


def finish(panel: Axes, table: pd.DataFrame, *, at: str, first: bool, last: bool, xlabel: bool = True) -> None:
    """Ticks, the shade of overload, and numbers only on the outer panels."""
    style.quiet(panel)
    x = table[at].dropna().to_numpy(np.float64)
    if x.size:
        pad = 0.04 * (x.max() - x.min() or max(abs(x.max()), 1.0))
        panel.set_xlim(x.min() - pad, x.max() + pad)
        if at == "load" and x.max() >= 1:
            panel.axvspan(max(1.0, x.min() - pad), x.max() + pad, color="#f3f3f3", linewidth=0, zorder=0)
            panel.annotate(
                "overload", (x.max() + pad, 1), xycoords=("data", "axes fraction"), xytext=(-2, -2), ha="right", va="top",
                textcoords="offset points", fontsize=6, color=style.GREY,
            )  # fmt: skip
    else:
        text = "neither a load nor a rate to stand at"
        panel.text(0.5, 0.5, text, transform=panel.transAxes, fontsize=style.FONT - 1, color=style.GREY, ha="center")
    panel.tick_params(labelleft=first, labelbottom=last)
    if last and xlabel:
        panel.set_xlabel(AXES[at], fontsize=style.FONT, color=style.INK)


def log_axis(panel: Axes, low: float, high: float) -> None:
    """Logarithmic y from low to high (> 0), with plain numbers: 1, 2 and 5 where the range is short."""
    panel.set_yscale("log")
    panel.set_ylim(low, high)
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def name_ends(
    panel: Axes, ends: Sequence[tuple[float, style.Look]], size: tuple[float, float], *, inches: float = 0.13
) -> None:
    """Write each line's name right of the panel, at the height where it ends, moved apart where they would touch.

    ends: (y in data, look); NaN where a line has no value. size: of the panel, inches. The panel's limits must stand. Names of
    lines without a value come last, in grey.
    """
    height = size[1]
    known = [(y, look) for y, look in ends if np.isfinite(y)]
    places = np.array([panel.transData.transform((0, y))[1] for y, _ in known]) if known else np.empty(0)
    if known:
        places = panel.transAxes.inverted().transform(np.column_stack([np.zeros(len(places)), places]))[:, 1]
    order = np.argsort(-places, kind="stable")
    gap = inches / height
    spots = _within(_apart(np.clip(places[order], 0.0, 1.0), gap), gap)
    reach = 0.20 / size[0]
    for k, spot in zip(order, spots, strict=True):
        look = known[k][1]
        start = float(np.clip(places[k], 0, 1))
        panel.plot(
            [1.0, 1.0 + reach], [start, spot], color=look.colour, linewidth=0.9, dashes=look.dashes, clip_on=False,
            transform=panel.transAxes,
        )  # fmt: skip
        panel.text(
            1.0 + reach + 0.05 / size[0], spot, look.label, transform=panel.transAxes, fontsize=style.FONT - 0.5,
            color=look.colour, va="center",
        )  # fmt: skip
    floor = (spots[-1] if len(spots) else 1.0) - gap
    for k, look in enumerate(look for y, look in ends if not np.isfinite(y)):
        panel.text(
            1.0 + reach + 0.05 / size[0], floor - k * gap, f"{look.label} (no value)", transform=panel.transAxes,
            fontsize=style.FONT - 0.5, color=style.GREY, va="center",
        )  # fmt: skip


def ends_of(
    table: pd.DataFrame, looks: Mapping[style.Schedule, style.Look], at: str, value: str = "value"
) -> list[tuple[float, style.Look]]:
    """(last value, look) of each schedule's line."""
    out = []
    for schedule, look in looks.items():
        line = rows_of(table, schedule).sort_values(at).dropna(subset=[value])
        out.append((float(line[value].iloc[-1]) if len(line) else np.nan, look))
    return out


def rows_of(table: pd.DataFrame, schedule: style.Schedule) -> pd.DataFrame:
    """The rows of one (policy, predictor, variant)."""
    mask: Any = np.ones(len(table), dtype=np.bool_)
    for key, value in zip(SCHEDULE, schedule, strict=False):
        mask = mask & (table[key] == value).to_numpy()
    return table[mask]


def _apart(places: np.ndarray, gap: float) -> np.ndarray:
    """Falling places moved as little as is simple so that neighbours are `gap` apart, centred where they were pushed."""
    groups: list[list[float]] = []  # [centre, members]
    for place in places:
        groups.append([float(place), 1.0])
        while len(groups) > 1:
            (a, m), (b, n) = groups[-2], groups[-1]
            if (a - (m - 1) / 2 * gap) - (b + (n - 1) / 2 * gap) >= gap:
                break
            groups[-2:] = [[(m * a + n * b) / (m + n), m + n]]
    out = [c + ((n - 1) / 2 - k) * gap for c, n in groups for k in range(int(n))]
    return np.array(out)


def _within(spots: np.ndarray, gap: float) -> np.ndarray:
    """The same, `gap` apart, moved into [0, 1] as far as there is room; the first one stays at or below 1."""
    n = len(spots)
    up = np.maximum(spots, gap * np.arange(n)[::-1])
    out: np.ndarray = np.minimum(up, 1.0 - gap * np.arange(n))
    return out
