"""How figures look and are saved: colours by policy, line patterns by predictor, quiet axes, the same bytes each time.

Nothing here touches pyplot or global settings, so a figure drawn in a notebook, a worker or a test is one and the same.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GREY, FAINT = "#222222", "#767676", "#d9d9d9"
COLOURS = {  # Okabe and Ito's set, told apart by all common kinds of colour vision
    "fcfs": "#767676", "sjf": "#0072b2", "psjf": "#56b4e9", "srpt": "#d55e00", "priority": "#cc79a7", "aging": "#009e73",
    "gittins": "#e69f00",
}  # fmt: skip
SPARE = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # for policies from outside, in order of appearance
NAMES = {
    "none": "", "constant": "constant", "prompt_length": "prompt length", "gbdt": "LightGBM", "oracle": "oracle",
    "noisy_oracle": "noisy oracle",
}  # fmt: skip
DASHES = ((1, 1), (3, 1.5), (5, 1.5, 1, 1.5))  # by predictor within a policy; a solid line is the oracle, or alone
FONT = 8.0


def colours(policies: Any) -> dict[str, str]:
    """Policy -> colour; the same policy has the same colour in every figure."""
    found = list(dict.fromkeys(policies))
    spare = [policy for policy in found if policy not in COLOURS]
    return {p: COLOURS[p] if p in COLOURS else SPARE[spare.index(p) % len(SPARE)] for p in found}


def label(policy: str, predictor: str) -> str:
    """ "SRPT, LightGBM"; the predictor's name alone is left out where there is none."""
    name = NAMES.get(predictor, predictor.replace("_", " "))
    return f"{policy.upper()} {name}".strip()


def dashes(policy: str, predictor: str, schedules: list[tuple[str, str]]) -> tuple[float, ...]:
    """Line pattern of a schedule among `schedules`; () is solid."""
    others = [q for p, q in schedules if p == policy and q != "oracle"]
    alone = len(others) == 1 and (policy, "oracle") not in schedules
    return () if predictor == "oracle" or alone else DASHES[others.index(predictor) % len(DASHES)]


def page(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """A blank figure (inches) with one Axes that fills it but for a line of footer."""
    figure = Figure(figsize=size, facecolor="white")
    FigureCanvasAgg(figure)
    foot = 0.30 / size[1]
    return figure, figure.add_axes((0.0, foot, 1.0, 1.0 - foot))


def grid(
    ax: Axes, rows: int, columns: int, *, left: float, right: float, top: float, bottom: float, gap: tuple[float, float]
) -> list[list[Axes]]:
    """rows x columns of Axes inside `ax`, which turns blank. Margins and gaps (across, down) as shares of `ax`."""
    ax.set_axis_off()
    width = (1 - left - right - gap[0] * (columns - 1)) / columns
    height = (1 - top - bottom - gap[1] * (rows - 1)) / rows
    return [
        [
            ax.inset_axes((left + c * (width + gap[0]), 1 - top - height - r * (height + gap[1]), width, height))
            for c in range(columns)
        ]
        for r in range(rows)
    ]


def quiet(ax: Axes, *, grid_axis: Literal["both", "x", "y"] = "y") -> None:
    """Small ticks, no frame but where numbers stand, a faint grid behind the data."""
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)
        spine.set_linewidth(0.6)
    ax.tick_params(labelsize=FONT, colors=INK, length=2.5, width=0.6, color=GREY)
    ax.grid(axis=grid_axis, color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)


def save(figure: Figure, table: pd.DataFrame, path: Path, footer: str) -> list[Path]:
    """Write path.pdf, path.png, path.csv with `footer` on the page; no date, no version inside: same figure, same bytes."""
    figure.text(0.012, 0.06 / figure.get_size_inches()[1], footer, fontsize=6.0, color=GREY, ha="left", va="bottom")
    path.parent.mkdir(parents=True, exist_ok=True)
    pdf, png, csv = (path.parent / f"{path.name}.{ext}" for ext in ("pdf", "png", "csv"))
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # its subsetter tells every glyph at INFO
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType: what publishers ask for
        figure.savefig(pdf, metadata={"CreationDate": None, "Creator": None, "Producer": None})
    figure.savefig(png, dpi=200, metadata={"Software": None})
    table.to_csv(csv, index=False, float_format="%.10g", lineterminator="\n")
    return [pdf, png, csv]


def footer(runs: pd.DataFrame, config_hash: str) -> str:
    """Config hash, seeds, requests a cell, and how many of the cells are there."""
    done = runs[runs["status"] == "ok"]
    seeds = ", ".join(str(seed) for seed in sorted(done["seed"].dropna().unique().astype(np.int64)))
    counts = sorted(done["num_requests"].unique())
    per_cell = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}" if counts else "0"
    missing = "" if len(done) == len(runs) else " (gaps are marked)"
    return f"config {config_hash}   seeds {seeds}   {per_cell} requests a cell   {len(done)} of {len(runs)} cells{missing}"
