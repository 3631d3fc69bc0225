"""SLO capacity as bars: the greatest request rate at which the SLOs held, per schedule, a panel per setting and SLO class.

The whisker is what the search leaves open, from the greatest rate that held to the least that did not: a bracket, no confidence
interval. A search whose upper end was never reached ends in an arrow; one where no rate held says so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..capacity import FILE
from ..capacity_table import read_capacity
from ..comparison import VARIANT, with_setting_names
from . import style
from .sources.points import schedules_of, with_variants

COLUMNS = (
    "setting_name", "slo", "policy", "predictor", "variant", "rate", "lo", "hi", "kind", "tolerance", "target", "gpus",
    "attainment", "num_seeds", "num_requests", "num_probes", "marks", "search",
)  # fmt: skip


def read(folder: Path) -> pd.DataFrame:
    """One row per capacity.json in or below `folder`: the columns of `read_capacity`, setting_name, variant, seeds (in a word)
    and search (its hash). Raises ValueError when there is none."""
    frame = read_capacity(folder)
    answers = [json.loads((Path(place) / FILE).read_text()) for place in frame["folder"]]
    frame = frame.assign(
        seeds=[", ".join(map(str, answer["seeds"])) for answer in answers],
        search=[answer["provenance"]["search_hash"] for answer in answers],
        **{key: [answer["cell"].get(key) for answer in answers] for key in VARIANT},
    )
    return with_variants(with_setting_names(frame)).drop(columns="folder")


def footer(frame: pd.DataFrame) -> str:
    """Config hash, seeds and requests a cell of the searches."""
    code = hashlib.sha256("\n".join(sorted(frame["search"])).encode()).hexdigest()[:12]
    seeds = "; ".join(dict.fromkeys(frame["seeds"]))
    n = style.span(frame["num_requests"])
    return f"config {code}   seeds {seeds}   {n} requests a cell   {len(frame)} searches"


def size(frame: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these rows."""
    looks = style.looks(schedules_of(frame))
    settings, classes = frame["setting_name"].nunique(), frame["slo"].nunique()
    width = max(0.3 + style.label_width(looks) + 2.5 * classes, 5.9)  # what the note takes
    return width, 1.2 + settings * (0.45 + 0.21 * len(looks))


def draw(frame: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """frame: as `read` returns it. Returns one row per setting x SLO class x schedule: rate, lo, hi (requests/s of one
    replica), kind (between, at_least, none), tolerance, target, gpus, num_seeds, num_requests, marks. Raises ValueError on two
    searches for one bar."""
    table = frame[list(COLUMNS)].reset_index(drop=True)
    _refuse_twins(table)
    looks = style.looks(schedules_of(table))
    settings, classes = (list(dict.fromkeys(table[key])) for key in ("setting_name", "slo"))
    width, height = size(frame)
    left = 0.12 + style.label_width(looks) - 0.45 + 0.15
    panels = style.grid(
        ax, len(settings), len(classes),
        left=left / width, right=0.42 / width, top=0.92 / height, bottom=0.46 / height, gap=(0.45 / width, 0.45 / height),
    )  # fmt: skip
    top = float(np.nanmax([*table["rate"], *table["hi"], 0.0])) or 1.0
    for r, setting in enumerate(settings):
        for c, name in enumerate(classes):
            panel = panels[r][c]
            style.quiet(panel, grid_axis="x")
            block = table[(table["setting_name"] == setting) & (table["slo"] == name)]
            _bars(panel, block, looks, named=c == 0)
            panel.set_xlim(0, 1.08 * top)
            panel.tick_params(labelbottom=r == len(settings) - 1)
            style.panel_head(panel, setting if c == 0 else "", f"SLO {name}")
            if r == len(settings) - 1:
                panel.set_xlabel("requests/s of one replica", fontsize=style.FONT, color=style.INK)
    targets = ", ".join(dict.fromkeys(f"{target:.3g}" for target in 100 * table["target"].dropna()))
    note = f"{targets} % of requests within their SLO, nothing growing; " if targets else ""
    style.headline(ax, height, "SLO capacity", f"{note}whisker: what the search leaves open, no confidence interval")
    return table


def _refuse_twins(table: pd.DataFrame) -> None:
    """Raises ValueError on two searches for one bar: another tolerance, target, seeds, or made by another version."""
    keys = ["setting_name", "slo", "policy", "predictor", "variant"]
    for key, twins in table.groupby(keys, sort=False, dropna=False):
        if len(twins) > 1:
            name = " ".join(str(part) for part in key if part)
            raise ValueError(
                f"{len(twins)} searches are of {name}: {', '.join(twins['search'])}; one bar can show one: move the folders of "
                "the others (they end in these hashes), or give runs=PATH of one study"
            )


def _bars(panel: Axes, block: pd.DataFrame, looks: dict[style.Schedule, style.Look], *, named: bool) -> None:
    rows: dict[style.Schedule, Any] = {
        (row["policy"], row["predictor"], row["variant"]): row for row in block.to_dict("records")
    }
    panel.set_ylim(len(looks) - 0.4, -0.6)
    panel.set_yticks([])
    for y, (schedule, look) in enumerate(looks.items()):
        if named:
            panel.annotate(
                look.label, (0, y), xycoords=("axes fraction", "data"), xytext=(-5, 0), textcoords="offset points", ha="right",
                va="center", fontsize=style.FONT - 0.5, color=look.colour,
            )  # fmt: skip
        row = rows.get(schedule)
        if row is None or row["kind"] == "none":
            text, colour = ("no search", style.ALARM) if row is None else ("no rate held", style.GREY)
            panel.text(0, y, f" {text}", fontsize=style.FONT - 1.5, color=colour, va="center", style="italic")
            continue
        face = "white" if look.hollow else look.colour
        panel.barh(y, row["rate"], height=0.62, facecolor=face, edgecolor=look.colour, linewidth=1.0, zorder=2)
        open_ended = row["kind"] == "at_least" or np.isnan(row["hi"])
        end = row["rate"] if open_ended else row["hi"]
        if open_ended:
            panel.plot(row["rate"], y, ">", ms=4, color=look.colour, clip_on=False, zorder=3)
        else:
            panel.plot([row["rate"], end], [y, y], color=style.INK, linewidth=0.9, zorder=3)
        panel.annotate(
            f"{'>= ' if open_ended else ''}{row['rate']:.3g}", (end, y), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=style.FONT - 1.5, color=style.INK,
        )  # fmt: skip
