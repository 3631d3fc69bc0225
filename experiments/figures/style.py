"""How figures look and are saved: colours by policy, line patterns by predictor, quiet axes, the same bytes each time.

Nothing here touches pyplot or global settings, so a figure drawn in a notebook, a worker or a test is one and the same.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

INK, GREY, FAINT, ALARM = "#222222", "#767676", "#d9d9d9", "#b00020"
COLOURS = {  # Okabe and Ito's set, told apart by all common kinds of colour vision
    "fcfs": "#767676", "sjf": "#0072b2", "psjf": "#56b4e9", "srpt": "#d55e00", "priority": "#cc79a7", "aging": "#009e73",
    "gittins": "#e69f00", "aging_srpt": "#009e73", "aging_sjf": "#332288",
}  # fmt: skip
TITLES = {
    "e2e": "E2E latency (s)", "ttft": "TTFT (s)", "tpot": "TPOT (s)", "wait": "queueing time (s)",
    "normalised_latency": "E2E latency per token (s)",
}  # fmt: skip
STATISTICS = {"mean": "Mean", "p50": "P50", "p99": "P99", "p999": "P99.9"}
POLICIES = {"aging_srpt": "SRPT + aging", "aging_sjf": "SJF + aging"}
SPARE = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # for policies from outside, in order of appearance
NAMES = {
    "none": "", "constant": "constant", "prompt_length": "prompt length", "gbdt": "LightGBM", "oracle": "oracle",
    "noisy_oracle": "noisy oracle",
}  # fmt: skip
DASHES = ((1, 1), (3, 1.5), (5, 1.5, 1, 1.5))  # by predictor within a policy; a solid line is the oracle, or alone
MARKERS = ("o", "s", "^", "D", "v")  # where a policy has more lines than there are patterns
FONT = 8.0
CHARACTER = 0.060  # inches across, on average, at FONT - 0.5


class NothingToDraw(ValueError):
    """The cells are sound, and there is nothing among them that this figure shows."""


Schedule = tuple[str, ...]  # policy, predictor, and what else tells it apart


@dataclass(frozen=True)
class Look:
    """How one schedule looks in every panel. hollow: it knows the true lengths."""

    colour: str
    dashes: tuple[float, ...]
    marker: str
    hollow: bool
    label: str

    def dot(self, size: float = 3.6) -> dict[str, Any]:
        """Keywords of a marker."""
        face = "white" if self.hollow else self.colour
        return {"marker": self.marker, "ms": size, "mfc": face, "mec": self.colour, "mew": 1.0}


def looks(schedules: Sequence[Schedule]) -> dict[Schedule, Look]:
    """Schedule -> Look: colour by policy, line pattern by predictor (solid: the oracle, or the only one), so that a schedule
    looks the same wherever the same ones are drawn."""
    hue = colours(policy for policy, *_ in schedules)
    out: dict[Schedule, Look] = {}
    for policy in hue:
        mine = [schedule for schedule in schedules if schedule[0] == policy]
        mine.sort(key=lambda schedule: schedule[1] != "oracle")  # stable: the oracle takes the solid line
        alone = len(mine) == 1 or mine[0][1] == "oracle"
        patterns = ((), *DASHES) if alone else (*DASHES, ())
        for k, schedule in enumerate(mine):
            dashes, marker = patterns[k % len(patterns)], MARKERS[k // len(patterns) % len(MARKERS)]
            text = " ".join((label(policy, schedule[1]), *schedule[2:])).strip()
            out[schedule] = Look(hue[policy], dashes, marker, "oracle" in schedule[1], text)
    return {schedule: out[schedule] for schedule in schedules}


def label_width(found: dict[Schedule, Look]) -> float:
    """Inches that a column of labels beside a panel wants, patterns included."""
    return 0.45 + CHARACTER * max(len(look.label) for look in found.values())


def colours(policies: Any) -> dict[str, str]:
    """Policy -> colour; the same policy has the same colour in every figure."""
    found = list(dict.fromkeys(policies))
    spare = [policy for policy in found if policy not in COLOURS]
    taken = {COLOURS[policy] for policy in found if policy in COLOURS}
    free = [colour for colour in SPARE if colour not in taken] or SPARE
    return {p: COLOURS[p] if p in COLOURS else free[spare.index(p) % len(free)] for p in found}


def label(policy: str, predictor: str) -> str:
    """ "SRPT, LightGBM"; the predictor's name alone is left out where there is none."""
    name = NAMES.get(predictor, predictor.replace("_", " "))
    return f"{POLICIES.get(policy, policy.upper().replace('_', ' '))} {name}".strip()


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


def headline(ax: Axes, height: float, title: str, note: str) -> None:
    """What is shown, and under it how it was made. height: of the page, inches."""
    ax.text(0.012, 1 - 0.09 / height, title, fontsize=10, weight="bold", color=INK, va="top")
    ax.text(0.012, 1 - 0.30 / height, fitted(ax, note, FONT - 1.0), fontsize=FONT - 1.0, color=GREY, va="top")


def fitted(ax: Axes, note: str, font: float) -> str:
    """`note` in as many lines as it takes across `ax`: a page of one panel is narrow."""
    figure = ax.get_figure()
    width = figure.get_size_inches()[0] * ax.get_position().width if figure else 8.0  # type: ignore[union-attr]
    return broken(note, font, float(width))


def broken(note: str, font: float, width: float) -> str:
    """`note` with line breaks so that it takes at most `width` inches, margins included, at `font` points."""
    took = TextPath((0, 0), note, size=font).get_extents().width / 72
    room = 0.98 * width
    return note if took <= room else textwrap.fill(note, max(20, int(0.96 * len(note) * room / took)))


def span(counts: Any) -> str:
    """ "n = 6,750 to 7,500"."""
    low, high = int(counts.min()), int(counts.max())
    return f"n = {low:,}" if low == high else f"n = {low:,} to {high:,}"


def key(panel: Axes, found: dict[Schedule, Look], *, dots: bool = True) -> None:
    """A key of schedules right of `panel`, for figures whose lines cannot be named at their ends."""
    handles = []
    for look in found.values():
        keywords = look.dot() if dots else {}
        handles += panel.plot([], [], color=look.colour, linewidth=1.4, dashes=look.dashes, label=look.label, **keywords)
    legend = panel.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=FONT - 0.5, handlelength=2.2
    )
    for text, look in zip(legend.get_texts(), found.values(), strict=True):
        text.set_color(look.colour)


def panel_head(panel: Axes, setting: str, text: str, alarm: str = "") -> None:
    """A title left above `panel`, the setting on a line of its own over it, and on the right what is missing there."""
    panel.set_title(text, fontsize=FONT - 0.5, loc="left", color=GREY, pad=3)
    if setting:
        panel.annotate(
            setting, (0, 1), xycoords="axes fraction", xytext=(0, 14), textcoords="offset points", fontsize=FONT, weight="bold",
            color=INK, va="bottom",
        )  # fmt: skip
    if alarm:
        panel.set_title(alarm, fontsize=FONT - 2, loc="right", color=ALARM, pad=3)


def seeds_of(block: pd.DataFrame) -> str:
    """How many cells of a panel have a result: "5 of 6 cells"; of its schedules' rows with num_seeds and num_cells."""
    if not len(block):
        return "no cell"
    rows = block.drop_duplicates(["policy", "predictor", "variant"])
    missing = sum(len(text.split(", ")) for text in rows["absent"] if text)
    return f"{int(rows['num_cells'].sum()) - missing} of {int(rows['num_cells'].sum())} cells"


def choose(found: pd.Series, asked: float | None, name: str) -> float:
    """The load or rate that a figure of one load shows: the one asked for, else the greatest load below 1, else the least.

    Raises ValueError when it is not among those found.
    """
    there = sorted(float(value) for value in found.dropna().unique())
    if not there:
        raise ValueError(f"no cell has a {name}")
    if asked is None:
        stable = [value for value in there if value < 1] if name == "load" else there
        return stable[-1] if stable else there[0]
    near = [value for value in there if abs(value - asked) <= 1e-9 * max(abs(value), 1.0)]
    if not near:
        raise ValueError(f"{name} {asked:g} is not among {', '.join(f'{value:g}' for value in there)}")
    return near[0]
