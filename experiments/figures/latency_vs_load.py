"""One latency against load, a panel per setting and a line per schedule: the classic serving curve.

A point is the mean over seeds of the cell's value, its bar the 95 % interval over seeds. A line breaks where cells are missing.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..comparison import SETTING, with_setting_names
from ..load_runs import OK
from ..statistics import over_seeds
from . import style

SOURCE = "runs"
TITLES = {
    "e2e": "E2E latency (s)", "ttft": "TTFT (s)", "tpot": "TPOT (s)", "wait": "queueing time (s)",
    "normalised_latency": "E2E latency per token (s)",
}  # fmt: skip


def size(runs: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these runs."""
    keys = [key for key in SETTING if key in runs]
    return 2.3 + 2.6 * with_setting_names(runs[keys].drop_duplicates())["setting_name"].nunique(), 3.3


def draw(runs: pd.DataFrame, ax: Axes, *, latency: str = "ttft", statistic: str = "p99") -> pd.DataFrame:
    """runs: as `load_runs` returns them. statistic: mean | p50 | p99 | p999 of each cell.

    Returns one row per setting x schedule x load: value, low, high (s), num_seeds, num_cells. Cells that were given a rate and
    no load stand at their rate.
    """
    key = f"{latency}_{statistic}"
    if key not in runs:
        raise ValueError(f"no metric {key} in these runs")
    frame = with_setting_names(runs)
    at = "rate" if frame["load"].isna().all() else "load"
    settings = list(dict.fromkeys(frame["setting_name"]))
    schedules = list(dict.fromkeys(zip(frame["policy"], frame["predictor"], strict=True)))
    colours = style.colours(policy for policy, _ in schedules)
    rows = []
    for (setting, policy, predictor, x), group in frame.groupby(["setting_name", "policy", "predictor", at], sort=False):
        done = group[group["status"] == OK]
        found = over_seeds(dict(zip(done["seed"].astype(int), done[key].astype(float), strict=True)))
        row = {"setting_name": setting, "policy": policy, "predictor": predictor, at: x, "metric": key}
        row |= {"value": found.mean, "low": found.low, "high": found.high, "num_seeds": found.n, "num_cells": len(group)}
        rows.append(row)
    table = pd.DataFrame(rows).astype({"value": float, "low": float, "high": float})
    width, height = size(runs)
    panels = style.grid(
        ax, 1, len(settings),
        left=0.55 / width, right=1.65 / width, top=0.62 / height, bottom=0.48 / height, gap=(0.25 / width, 0.0),
    )[0]  # fmt: skip
    top = float(table["value"].max(skipna=True)) * 1.15  # NaN where no cell has a value
    top = top if top > 0 else 1.0
    for panel, setting in zip(panels, settings, strict=True):
        style.quiet(panel)
        for policy, predictor in schedules:
            same = (table["setting_name"] == setting) & (table["policy"] == policy) & (table["predictor"] == predictor)
            line = table[same].sort_values(at)
            dashes = style.dashes(policy, predictor, schedules)
            name = style.label(policy, predictor)
            panel.plot(line[at], line["value"], color=colours[policy], linewidth=1.3, dashes=dashes, label=name)
            bars = np.abs(line[["low", "high"]].to_numpy().T - line["value"].to_numpy())
            hollow = "white" if predictor == "oracle" else colours[policy]
            panel.errorbar(
                line[at], line["value"], yerr=bars, fmt="o", ms=3.5, mfc=hollow, color=colours[policy], elinewidth=1.0
            )
        if table["value"][table["setting_name"] == setting].isna().all():  # not an empty page without a word
            note = f"no {key}: no complete cell has enough requests"
            panel.text(0.5, 0.5, note, transform=panel.transAxes, fontsize=style.FONT, color=style.GREY, ha="center")
        panel.set_ylim(0, top)
        panel.set_xlabel("load (rate / saturation rate)" if at == "load" else "requests/s", fontsize=style.FONT)
        panel.tick_params(labelleft=panel is panels[0])
        panel.set_title(setting, fontsize=style.FONT, loc="left", weight="bold", pad=4)
    title = f"{statistic.upper() if statistic != 'mean' else 'Mean'} {TITLES.get(latency, latency)}, 95 % over seeds"
    ax.text(0.012, 1 - 0.10 / height, title, fontsize=10, weight="bold", color=style.INK, va="top")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.03, 1.0), frameon=False, fontsize=style.FONT - 0.5, handlelength=2.2)
    return table
