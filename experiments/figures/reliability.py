"""Reliability: of each quantile that a predictor says, the share of answers at or below it, a panel per workload.

On the diagonal a predictor says how sure it is as it should. Under it answers are longer than said, above it shorter; flatter
than it the predictor is too sure, steeper not sure enough.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..train_table import name_of, read_reports, rows_of
from . import style


def read(folder: Path) -> pd.DataFrame:
    """From the report.json files in or below `folder`, baselines included: one row per workload x predictor x level. Columns:
    workload, predictor, level, share (mean over the named splits), n (test rows of all of them), data. Raises ValueError when
    there is none, or none that says quantiles."""
    rows, seen = [], set()
    for report in read_reports(folder):
        scored = {name_of(report): report["metrics"], **report["baselines"]}
        for name, scores in scored.items():
            if not scores.get("reliability") or (name_of(report) != name and (rows_of(report), name) in seen):
                continue
            seen.add((rows_of(report), name))
            own = {"workload": rows_of(report), "predictor": name, "n": sum(scores["n_by_split"].values())}
            own["data"] = report["data_hash"]
            rows += [{**own, "level": float(level), "share": share} for level, share in scores["reliability"].items()]
    if not rows:
        raise ValueError(f"no report in {folder} is of a predictor that says quantiles")
    frame = pd.DataFrame(rows).drop_duplicates(["workload", "predictor", "level"], ignore_index=True)
    return frame[["workload", "predictor", "level", "share", "n", "data"]]


def footer(frame: pd.DataFrame) -> str:
    """Data hash and predictors."""
    code = hashlib.sha256("\n".join(sorted(set(frame["data"]))).encode()).hexdigest()[:12]
    return f"data {code}   {frame['predictor'].nunique()} predictors   three named splits"


def size(frame: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these rows."""
    longest = max(map(len, frame["predictor"]))
    return 0.75 + 2.6 * frame["workload"].nunique() + 0.45 + style.CHARACTER * longest, 3.6


def draw(frame: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """frame: as `read` returns it. Returns what was plotted: workload, predictor, level, share, n."""
    table = frame[["workload", "predictor", "level", "share", "n"]].sort_values(
        ["workload", "predictor", "level"], kind="stable", ignore_index=True
    )
    names, workloads = list(dict.fromkeys(frame["predictor"])), list(dict.fromkeys(frame["workload"]))
    colours = style.colours(names)
    width, height = size(frame)
    right = 0.55 + style.CHARACTER * max(map(len, names))
    panels = style.grid(
        ax,
        1,
        len(workloads),
        left=0.6 / width,
        right=right / width,
        top=0.85 / height,
        bottom=0.5 / height,
        gap=(0.3 / width, 0.0),
    )[0]
    for panel, workload in zip(panels, workloads, strict=True):
        style.quiet(panel, grid_axis="both")
        panel.plot([0, 1], [0, 1], color=style.GREY, linewidth=0.8, dashes=(1, 2), zorder=1)
        for k, name in enumerate(names):
            line = table[(table["workload"] == workload) & (table["predictor"] == name)]
            x, y = (line[key].to_numpy(np.float64) for key in ("level", "share"))
            panel.plot(
                x, y, color=colours[name], marker=style.MARKERS[k // 5 % len(style.MARKERS)], ms=2.4, linewidth=1.1, label=name
            )
        panel.set_xlim(0, 1)
        panel.set_ylim(0, 1)
        panel.set_aspect("equal", adjustable="box")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
        panel.tick_params(labelleft=panel is panels[0])
        style.panel_head(panel, "", workload)
    panels[0].set_xlabel("quantile that is said", fontsize=style.FONT, color=style.INK)
    legend = panels[-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=style.FONT - 0.5)
    for text, name in zip(legend.get_texts(), names, strict=False):
        text.set_color(colours.get(name, style.INK))
    note = f"share of answers at or below it; test rows of three splits, {style.span(table['n'])}, censored ones left out"
    style.headline(ax, height, "Reliability of predicted quantiles", note)
    return table
