"""The comparison as a page of text: one block per setting and load, one row per schedule, the same strings on a terminal, in a
log and in Markdown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .comparison import SERIES, mark_kind, merge_marks, rates_apart

Line = list[tuple[str, str]]  # (text, rich style)
Row = list[list[str]]  # groups of cells
Groups = tuple[tuple[str, tuple[str, ...]], ...]  # (heading, names of its columns)

SCALE = {"e2e": 1.0, "ttft": 1.0, "tpot": 1e3, "normalised_latency": 1e3}
PARTS = ("mean", "p50", "p99")
GROUPS = (
    ("", ("policy", "predictor")),
    ("E2E (s)", ("mean", "P50", "P99")),
    ("E2E vs FCFS (%)", ("",)),
    ("gap closed (%)", ("",)),
    ("TTFT (s)", ("mean", "P50", "P99")),
    ("TPOT (ms)", ("mean", "P50", "P99")),
    ("E2E / token (ms)", ("mean", "P50", "P99")),
    ("goodput", ("req/s",)),
    ("SLO", ("met",)),
    ("wait (s)", ("P99", "max")),
)
WIDTH = 160
ENOUGH = 2000  # requests that a P99 wants: 20 beyond it
TELLING = 0.02  # share of a seed's E2E that, once owed to the end of the arrivals, is told
LEGEND = (
    "E2E vs FCFS: change of mean E2E, paired by seed (geometric mean of ratios), 95 % interval over seeds; below 0 is faster.",
    "gap closed: (FCFS - this) / (FCFS - the same policy with the oracle) of mean E2E, jackknife 95 % over seeds; "
    "n/a: the paired 95 % interval of log(FCFS / oracle) holds 0, so no gap is shown (5 seeds or more are wanted).",
    "P50 and P99 are of the pooled requests of all seeds (linear interpolation); ~ marks a P99 of fewer than 2,000 requests.",
    "SLO met: of finished, failed, timed out and rejected requests and of cut-off ones that have already missed; seeds pooled.",
    "goodput: requests that met their SLO per second counted; at load >= 1 of the whole run, the time to run empty included.",
    "* reads the true output lengths, which no method can: the mark to reach in the mean, no strict bound and none for tails.",
)


@dataclass(frozen=True)
class Form:
    """What a page shows of each row: render(row, footnote mark) gives its cells by group. legend: what the columns mean."""

    groups: Groups
    render: Callable[[Any, str], Row]
    legend: tuple[str, ...]


def page(frame: pd.DataFrame, form: Form | None = None, most: int | None = None) -> list[Line]:
    """The blocks as lines of (text, style), at most WIDTH wide where names are not very long. form: its columns; by default the
    common ones. most: rows of a block without a part of an oracle; beside them FCFS and the best oracle. What is left out is
    counted."""
    form = form or MAIN
    blocks = []
    for title, rows, styles, notes in _blocks(frame):
        kept = list(range(len(rows))) if most is None else _first([row for row, _ in rows], most)
        shown = [(form.render(*rows[k]), styles[k]) for k in kept]
        told = [note for k in kept if rows[k][1] for note in notes if note.startswith(rows[k][1].strip() + " ")]
        blocks.append((title, shown, told, len(rows) - len(kept)))
    widths = _widths([row for _, rows, _, _ in blocks for row, _ in rows], form.groups)
    top, names = _header(widths, form.groups)
    lines: list[Line] = []
    for title, shown, notes, left in blocks:
        lines += [[("", "")], *([(text, "bold cyan")] for text in wrap(title)), [(top, "dim")], [(names, "dim")]]
        lines += [[(_line(row, widths), style)] for row, style in shown]
        lines += [[(f"... and {left} more, see table.md", "dim")]] if left else []
        lines += [[(text, "red")] for note in notes for text in wrap("  " + note)]
    return [*lines, [("", "")], *([(text, "dim")] for entry in form.legend for text in wrap(entry))]


def _first(rows: Sequence[Any], most: int) -> list[int]:
    """Positions of the first `most` rows that no oracle had a part in, of FCFS and of the first oracle."""
    oracles = [k for k, row in enumerate(rows) if row["is_oracle"]]
    others = [k for k in range(len(rows)) if k not in oracles]
    return sorted({*others[:most], *oracles[:1], *(k for k in others if rows[k]["policy"] == "fcfs")})


def wrap(text: str) -> list[str]:
    """Lines of at most WIDTH, the second and later ones indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", drop_whitespace=True, replace_whitespace=False)


def markdown(frame: pd.DataFrame, form: Form | None = None) -> str:
    """The blocks as Markdown tables; mean, P50 and P99 share a column."""
    form = form or MAIN
    heads = [" ".join(part for part in (top, " / ".join(names)) if part.strip()) for top, names in form.groups[1:]]
    heads = ["schedule", *(head.replace(" (s) (s)", " (s)").strip() for head in heads)]
    parts = []
    for title, rows, _, notes in _blocks(frame):
        lines = [f"**{title}**", "", "| " + " | ".join(heads) + " |", "| :-- |" + " --: |" * (len(heads) - 1)]
        for row, note in rows:
            cells = form.render(row, note)
            lines.append("| " + " | ".join([" ".join(cells[0]).strip(), *(" / ".join(group) for group in cells[1:])]) + " |")
        parts.append("\n".join([*lines, *(f"\n{note}" for note in notes)]))
    return "\n\n".join([*parts, "\n".join(f"- {text.replace('* reads', '`*` reads')}" for text in form.legend)]) + "\n"


def number(value: float) -> str:
    """Three significant digits in at most six characters; - where there is none."""
    if value is None or math.isnan(value):
        return "-"
    value = float(f"{value:.3g}") if abs(value) < 999.5 else value
    if abs(value) >= 99_950:
        return f"{value / 1e3:.0f}k"
    if value == 0 or abs(value) < 5e-4:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) >= 1 else 3 - (abs(value) >= 0.1)
    return f"{value:.{min(digits, 3)}f}"


def render(row: Any, note: str = "") -> Row:
    """The cells of one row of `compare`, by group."""
    few = "~" if row["num_counted"] < ENOUGH else ""
    series = {}
    for key in SERIES:
        cells = [(">" if row.get(f"{key}_{part}_open") else "") + number(row[f"{key}_{part}"] * SCALE[key]) for part in PARTS]
        series[key] = [*cells[:2], cells[2] + few if cells[2] != "-" else "-"]
    change = interval([100 * (row[f"ratio{end}"] - 1) for end in ("", "_low", "_high")], percent)
    gap = (
        row["gap_note"]
        or ("oracle" if row["predictor"] == "oracle" and row["is_oracle"] else "")
        or interval([100 * row[f"gap_closed{end}"] for end in ("", "_low", "_high")], percent)
    )
    waits = (">" if row["wait_p99_open"] else "") + number(row["wait_p99"])
    waits += few if waits != "-" else ""
    met = "-" if math.isnan(row["attainment"]) else f"{100 * row['attainment']:.1f}%"
    return [
        names_of(row, note), series["e2e"], [change], [gap], series["ttft"], series["tpot"],
        series["normalised_latency"], [number(row["goodput_rps"])], [met],
        [waits, (">" if row["max_wait_open"] else "") + number(row["max_wait"])],
    ]  # fmt: skip


def names_of(row: Any, note: str = "") -> list[str]:
    """Policy and predictor, marked where it reads the true lengths, with what else tells the schedule apart."""
    return [str(row["policy"]), f"{row['predictor']}{'*' if row['is_oracle'] else ''} {row['variant']}".strip() + note]


def interval(bounds: Sequence[float], show: Callable[[float], str]) -> str:
    """ "value [low, high]" of (value, low, high)."""
    value, low, high = bounds
    if math.isnan(value):
        return ""
    if math.isnan(low) or math.isnan(high):
        return f"{show(value)} [one seed]"
    return f"{show(value)} [{show(low)}, {show(high)}]"


def percent(value: float) -> str:
    """Whole percents, tenths below 10; never a negative zero."""
    text = f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}"
    return "0" if float(text) == 0 else text


def _blocks(frame: pd.DataFrame) -> Iterator[tuple[str, list[tuple[Any, str]], list[str], list[str]]]:
    """(title, [(row, footnote mark)], styles, notes) of each setting x load, or rate where there is no load."""
    keys = [frame["setting_name"], frame["load"], rates_apart(frame)]
    for (setting, load, _), block in frame.groupby(keys, sort=False, dropna=False):
        split = [[mark for mark in marks.split("; ") if mark] for marks in block["marks"]]
        shared = set.intersection(*({mark_kind(mark) for mark in marks} for marks in split))
        common = merge_marks(mark for marks in split for mark in marks if mark_kind(mark) in shared)
        plain = [row for _, row in block.iterrows() if not row["is_oracle"] and not math.isnan(row["e2e_mean"])]
        best = min((row["e2e_mean"] for row in plain), default=math.nan)
        rows: list[tuple[Any, str]] = []
        styles: list[str] = []
        notes: list[str] = []
        for _, row in block.iterrows():
            own = [mark for mark in row["marks"].split("; ") if mark and mark_kind(mark) not in shared]
            if row["absent"]:
                own.insert(0, f"{row['num_seeds']} of {row['num_cells']} seeds (seed {row['absent']})")
            if row["num_unfinished"]:
                own.append(f"{row['num_unfinished']} of {row['num_counted']} requests unfinished: no mean, > is a lower bound")
            if row["num_rejected"]:
                own.append(f"{row['num_rejected']} of {row['num_counted']} requests rejected at the door")
            if row["load"] is not None and row["load"] < 1 and row["after_arrivals_share"] >= TELLING:
                own.append(
                    f"{row['num_after_arrivals']} of {row['num_counted']} requests ended after the last arrival, in one seed "
                    f"{100 * row['after_arrivals_share']:.0f}% of its E2E: they would have waited longer had arrivals gone on"
                )
            rows.append((row, f" [{len(notes) + 1}]" if own else ""))
            if own:
                notes.append(f"[{len(notes) + 1}] {row['policy']} {row['predictor']}: {'; '.join(own)}")
            styles.append(
                "red" if not row["num_seeds"] else "dim" if row["is_oracle"] else "bold" if row["e2e_mean"] == best else ""
            )
        yield title(str(setting), load, block, common), rows, styles, notes


def title(setting: str, load: Any, block: pd.DataFrame, marks: Sequence[str] = ()) -> str:
    seeds, a_cell = int(block["num_seeds"].max()), int(block["num_requests"].max())
    counted = int(block["num_counted"].max() / max(seeds, 1))
    parts = [
        setting,
        f"load {load:g}{_achieved(block)}" if load == load and load is not None else "",
        f"{number(block['rate'].mean())} requests/s",
    ]
    parts.append(
        f"{seeds} seed{'s' * (seeds != 1)} x {a_cell:,} requests"
        + (f", {counted:,} of them counted" if counted < a_cell else "")
    )
    if load is not None and load >= 1:
        parts.append(f"OVERLOAD, a matter of the horizon: N / rate = {block['horizon'].mean():.0f} s")
    return "  |  ".join(part for part in (*parts, *(mark for mark in marks if not mark.startswith("overload"))) if part)


def _achieved(block: pd.DataFrame) -> str:
    """What the arrivals of the seeds came to; a load below 1 that was above it for one seed is no small matter."""
    low, high = block["load_least"].min(), block["load_greatest"].max()
    asked = float(block["load"].iloc[0])
    if math.isnan(low) or math.isnan(high) or max(asked - low, high - asked) <= 0.015 * asked:
        return ""
    return f" (achieved {low:.2f} to {high:.2f})"


def _widths(rows: Sequence[Row], groups: Groups) -> list[list[int]]:
    return [
        [max([len(name), *(len(row[g][k]) for row in rows)]) for k, name in enumerate(names)]
        for g, (_, names) in enumerate(groups)
    ]


def _header(widths: list[list[int]], groups: Groups) -> tuple[str, str]:
    for (top, _), group in zip(groups, widths, strict=True):
        group[-1] += max(0, len(top) - (sum(group) + len(group) - 1))
    tops = [top.center(sum(group) + len(group) - 1) for (top, _), group in zip(groups, widths, strict=True)]
    return "  ".join(tops).rstrip(), _line([list(names) for _, names in groups], widths)


def _line(row: Row, widths: list[list[int]]) -> str:
    groups = []
    for g, (cells, group) in enumerate(zip(row, widths, strict=True)):
        groups.append(" ".join(text.ljust(w) if g == 0 else text.rjust(w) for text, w in zip(cells, group, strict=True)))
    return "  ".join(groups).rstrip()


MAIN = Form(GROUPS, render, LEGEND)
