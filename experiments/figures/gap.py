"""Share of the gap from FCFS to the same policy with the oracle that each predictor closes, against load, a panel per setting.

0 % is FCFS, 100 % the oracle. Bars are the 95 % jackknife over seeds of mean E2E latency, paired by seed. A point where no gap
is shown to exist is no number: it stands as "n/a" at the foot of the panel.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..comparison import paired
from . import curves, style
from .sources.points import schedules_of

SOURCE = "runs"
COLUMNS = (
    "setting_name", "load", "rate", "policy", "predictor", "variant", "gap_closed", "gap_closed_low", "gap_closed_high",
    "gap_note", "difference_seeds", "num_seeds", "num_cells", "absent",
)  # fmt: skip
LEAST, MOST = -0.6, 1.6  # shares shown; what lies beyond is drawn as an arrow at the edge


def size(runs: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these runs."""
    table = closed(runs)
    return 0.75 + style.label_width(style.looks(schedules_of(table))) + 2.7 * table["setting_name"].nunique(), 3.3


def draw(runs: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """runs: as `load_runs` returns them. Returns one row per setting x load x schedule other than FCFS and the oracles:
    gap_closed, gap_closed_low, gap_closed_high, gap_note (why there is no number), difference_seeds, num_cells, absent.
    Raises NothingToDraw without a schedule between FCFS and an oracle."""
    table = closed(runs)
    looks, settings = style.looks(schedules_of(table)), list(dict.fromkeys(table["setting_name"]))
    at = curves.axis_of(table)
    loads = curves.points_of(table, at)
    width, height = size(runs)
    right = 0.1 + style.label_width(looks)
    panels = style.grid(
        ax, 1, len(settings),
        left=0.65 / width, right=right / width, top=0.78 / height, bottom=0.48 / height, gap=(0.25 / width, 0.0),
    )[0]  # fmt: skip
    shown = table[["gap_closed", "gap_closed_low", "gap_closed_high"]].to_numpy(np.float64)
    low = max(min(0.0, *np.nanmin(np.append(shown, 0.0), keepdims=True)), LEAST) - 0.12
    high = min(max(1.0, np.nanmax(np.append(shown, 1.0))), MOST) + 0.08
    for panel, setting in zip(panels, settings, strict=True):
        style.quiet(panel)
        for y, name in ((0.0, "FCFS"), (1.0, "oracle")):
            panel.axhline(y, color=style.INK, linewidth=0.8, zorder=1)
            panel.annotate(
                name, (0, y), xycoords=("axes fraction", "data"), xytext=(2, 1.5), textcoords="offset points", fontsize=6,
                color=style.GREY,
            )  # fmt: skip
        block = table[table["setting_name"] == setting]
        for k, (schedule, look) in enumerate(looks.items()):
            shift = (k - (len(looks) - 1) / 2) * min(0.8 / len(looks), 0.14)
            for row in curves.rows_of(block, schedule).to_dict("records"):
                x = (0 if np.isnan(loads[0]) else loads.index(float(row[at]))) + shift
                _point(panel, x, row, look, (low, high))
        panel.set_xlim(-0.55, len(loads) - 0.45)
        panel.set_ylim(low, high)
        panel.set_xticks(range(len(loads)), [f"{load:.4g}" for load in loads])
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{round(100 * y)}%"))
        panel.tick_params(labelleft=panel is panels[0])
        panel.set_xlabel(curves.AXES[at], fontsize=style.FONT, color=style.INK)
        panel.set_title(setting, fontsize=style.FONT, loc="left", weight="bold", pad=4)
    style.key(panels[-1], looks)
    seeds = style.span(table["difference_seeds"])
    note = f"(FCFS - this) / (FCFS - oracle) of mean E2E latency, paired by seed, {seeds} seeds; bars: 95 % jackknife"
    style.headline(ax, height, "Share of the gap to the oracle closed", note)
    return table


def closed(runs: pd.DataFrame) -> pd.DataFrame:
    """The plotted table. Raises NothingToDraw when no schedule stands between FCFS and an oracle."""
    table = paired(runs)
    table = table[(table["policy"] != "fcfs") & (table["predictor"] != "oracle")][list(COLUMNS)].reset_index(drop=True)
    if not len(table):
        raise style.NothingToDraw("no schedule between FCFS and an oracle: a gap wants FCFS, a policy, and it with the oracle")
    return table


def _point(panel: Axes, x: float, row: dict[str, object], look: style.Look, limits: tuple[float, float]) -> None:
    share, low, high = (float(row[f"gap_closed{end}"]) for end in ("", "_low", "_high"))  # type: ignore[arg-type]
    if np.isnan(share):
        panel.annotate(
            "n/a" if row["num_seeds"] else "x", (x, limits[0]), xytext=(0, 2), textcoords="offset points", ha="center",
            fontsize=5.5, rotation=90, color=look.colour if row["num_seeds"] else style.ALARM, va="bottom",
        )  # fmt: skip
        return
    ends = np.clip([low, high], *limits)
    panel.plot([x, x], ends, color=look.colour, linewidth=1.2, solid_capstyle="butt", zorder=2)
    inside = limits[0] <= share <= limits[1]
    edge = {"marker": "^" if share > limits[1] else "v", "ms": 4.5, "mfc": look.colour, "mec": look.colour}
    panel.plot(x, np.clip(share, *limits), zorder=3, **(look.dot(4.4) if inside else edge))
    if row["difference_seeds"] != row["num_cells"]:
        panel.annotate(
            f"n={row['difference_seeds']}", (x, float(np.clip(share, *limits))), xytext=(4, -3), textcoords="offset points",
            fontsize=5.5, color=style.ALARM,
        )  # fmt: skip
