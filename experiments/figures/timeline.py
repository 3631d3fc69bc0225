"""What happens over time in one run: requests waiting, requests running, KV cache in use; a column per setting, one load.

Curves are averages over short bins of time of one seed, so that a burst, the queue it leaves and the cache it fills stand over
each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from . import curves, style
from .sources.points import schedules_of
from .sources.steps import load_steps

SOURCE = load_steps
ROWS = {
    "waiting": "waiting", "running": "running", "kv": "KV in use", "busy": "busy",
}  # fmt: skip
SHARES = ("kv", "busy")


def size(frame: pd.DataFrame, rows: Sequence[str] = ("waiting", "running", "kv")) -> tuple[float, float]:
    """Inches that the page wants for these rows."""
    looks = style.looks(schedules_of(frame))
    return 0.75 + style.label_width(looks) + 3.1 * frame["setting_name"].nunique(), 1.45 + 1.25 * len(rows)


def draw(
    frame: pd.DataFrame,
    ax: Axes,
    *,
    load: float | None = None,
    seed: int | None = None,
    rows: Sequence[str] = ("waiting", "running", "kv"),
) -> pd.DataFrame:
    """frame: as `load_steps` returns it. load (or rate, where no cell has a load): null is the greatest below 1, else the
    least. seed: null is the least. rows: of waiting | running | kv | busy.

    Returns one row per setting x schedule x bin: time (s), waiting, running, kv, busy. Raises ValueError on a load, a seed or a
    row that is not there.
    """
    unknown = [name for name in rows if name not in ROWS]
    if unknown or not rows:
        raise ValueError(f"rows={list(rows)!r}: choose of {', '.join(ROWS)}")
    at = curves.axis_of(frame)
    chosen = style.choose(frame[at], load, at)
    seeds = sorted(int(one) for one in frame["seed"].unique())
    shown = seeds[0] if seed is None else int(seed)
    if shown not in seeds:
        raise ValueError(f"seed {shown} is not among {', '.join(map(str, seeds))}")
    every = style.looks(schedules_of(frame))
    table = frame[(frame[at] == chosen) & (frame["seed"] == shown)].reset_index(drop=True)
    settings = list(dict.fromkeys(frame["setting_name"]))
    width, height = size(frame, rows)
    right = 0.1 + style.label_width(every)
    panels = style.grid(
        ax, len(rows), len(settings),
        left=0.62 / width, right=right / width, top=0.92 / height, bottom=0.48 / height, gap=(0.22 / width, 0.14 / height),
    )  # fmt: skip
    for c, setting in enumerate(settings):
        block = table[table["setting_name"] == setting]
        some = block["time"][(block[["waiting", "running", "busy"]] > 0).any(axis=1)]
        until = some.max() * 1.02 if len(some) else 1.0
        for r, name in enumerate(rows):
            panel = panels[r][c]
            style.quiet(panel)
            for schedule, look in every.items():
                line = curves.rows_of(block, schedule)
                panel.plot(line["time"], line[name], color=look.colour, linewidth=0.9, dashes=look.dashes)
            top = np.nanmax([*table[name], 0.0])
            panel.set_ylim(0, 1.08 * top if top > 0 else 1.0)
            panel.set_xlim(0, until)
            panel.tick_params(labelleft=c == 0, labelbottom=r == len(rows) - 1)
            if name in SHARES:
                panel.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g}%")
            if c == 0:
                panel.set_ylabel(ROWS[name], fontsize=style.FONT, color=style.INK)
            if not len(block) or block[name].isna().all():
                text = "missing" if not len(block) else "the pool's size is not stored"
                colour = style.GREY if len(block) else style.ALARM
                panel.text(0.5, 0.5, text, transform=panel.transAxes, fontsize=style.FONT - 1, color=colour, ha="center")
        there = len(schedules_of(block)) if len(block) else 0
        alarm = f"{there} of {len(every)} schedules" if there < len(every) else ""
        style.panel_head(panels[0][c], setting, f"{at} {chosen:g}", alarm)
        panels[-1][c].set_xlabel("time (s)", fontsize=style.FONT, color=style.INK)
    style.key(panels[0][-1], every, dots=False)
    n = style.span(table["num_requests"]) if len(table) else "n = 0"
    style.headline(ax, height, "Queue, batch and KV cache over time", f"one run, seed {shown}, {n} requests; bins of time")
    return table
