"""The end of a study: one table on the terminal and in files, its figures, and what everything rests on.

Everything is read back from the cells' files, so that a second run that computes nothing shows the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .comparison import CLOCKED, SCHEDULE, compare
from .figures.main import config_hash, default_draw, draw_figure, further_figures, only_cells
from .figures.style import NothingToDraw
from .jsonable import jsonable
from .load_runs import OK, Cell, read_cells
from .robustness_table import FILES, write_robustness
from .table import MAIN, WIDTH, Line, markdown, page, wrap
from .table_tails import MOST, TAILS, by_mean
from .tracking import mirror

MODES = ("offline", "online", "off")
FACTS = {  # what the heading tells of each cell's provenance
    "hardware": ("name", "model", "form", "held_out_error", "validated"),
    "workload": ("name", "unit", "source", "num_rows", "dropped", "max_new_tokens"),
    "predictor": ("name", "unit", "num_folds", "fallback"),
}


def finish(study_folder: Path, cells: Sequence[Mapping[str, Any]], cfg: Mapping[str, Any]) -> None:
    """Print the comparison of a finished study, write table.csv, table.md, study.json and its figures, mirror it to W&B.

    cells: manifest rows {cell, hash, status, folder, fields}; those without a result become marked gaps. cfg: reads `name`,
    `figure` (a node of conf/figure; the quickstart figure without one), `figures` (see `further_figures`), `table` (short, or
    long: sorted, with a second page, and overhead.csv, which a clock measured) and `wandb` (offline | online | off). Adds files
    to `study_folder`. Raises ValueError on another `wandb`; whatever goes wrong in W&B is told in one line and loses nothing.
    """
    mode = cfg.get("wandb") or "offline"
    if mode not in MODES:
        raise ValueError(f"wandb={mode!r}: choose {', '.join(MODES)}")
    name = str(cfg.get("name") or study_folder.name)
    found = read_cells(study_folder, cells)
    whole = compare(found)
    is_long = cfg.get("table") == "long"
    whole = by_mean(whole) if is_long else whole
    forms, most = ((MAIN, TAILS), MOST) if is_long else ((MAIN,), None)
    table = whole.drop(columns=list(CLOCKED))
    head = heading(name, found, table)
    show([*head, *(line for form in forms for line in page(whole, form, most))])
    _to_csv(table, study_folder / "table.csv")
    text = "\n".join("".join(part for part, _ in line) for line in head)
    (study_folder / "table.md").write_text("\n".join(markdown(whole, form) for form in forms) + f"\n```text\n{text}\n```\n")
    (study_folder / "study.json").write_text(json.dumps(record(name, found, table), indent=1, allow_nan=False) + "\n")
    written = ["table.csv", "table.md", "study.json"]
    if is_long:
        _to_csv(whole[["setting_name", "load", "rate", *SCHEDULE, "variant", *CLOCKED]], study_folder / "overhead.csv")
        written.append("overhead.csv")
    if errors := write_robustness(study_folder, found):
        show(errors)
        written += FILES
    for figure, draw, only in [(*default_draw(cfg.get("figure")), None), *further_figures(cfg.get("figures"))]:
        try:
            files = draw_figure(draw, only_cells(found, only), study_folder / figure)
            written += [file.name for file in files]
        except NothingToDraw as error:
            show([[("", "")], *([(text, "")] for text in wrap(f"no figure {figure}: {error}"))])
    show([[("", "")], *([(text, "")] for text in wrap(f"written to {study_folder}: {', '.join(written)}"))])
    if mode != "off":
        told = mirror(study_folder, found, mode=mode)
        show([[(text, "red" if told["error"] else "dim")] for text in wrap(_mirrored(told, mode))])


def _to_csv(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False, float_format="%.10g", lineterminator="\n")


def heading(name: str, cells: Sequence[Cell], table: pd.DataFrame) -> list[Line]:
    """What the numbers rest on: how many cells, the hardware's cost model, the lengths and what was dropped, predictors."""
    done = [cell for cell in cells if cell.status == OK]
    lines: list[Line] = [[(f"{name}: {len(done)} of {len(cells)} cells", "bold" if len(done) == len(cells) else "bold red")]]
    for cell in [cell for cell in cells if cell.status != OK][:10]:
        lines.append([(f"  {cell.status}: {cell.name}"[:WIDTH], "red")])
    for title, keys in FACTS.items():
        for facts in distinct(chosen(cell.provenance.get(title), keys) for cell in done):
            if facts:
                lines += [[(text, "dim")] for text in wrap(f"{title}: {told(facts)}")]
    counted, censored = int(table["num_counted"].sum()), int(table["num_censored"].sum())
    if censored:
        share = f"{100 * censored / counted:.1f}%"
        lines.append([(f"censored answers: {share} of the requests; their observed length is taken for the true one", "dim")])
    lines += [[(text, "dim")] for text in waiting(table)]
    for limits in distinct((cell.summary or {}).get("slo") for cell in done):
        lines.append([(f"SLO (s): {told(limits) or 'none'}", "dim")])
    return lines


def waiting(table: pd.DataFrame) -> list[str]:
    """How much there is for an order to win: waiting before the first step as a share of E2E under FCFS, by load."""
    parts = []
    fcfs = table[(table["policy"] == "fcfs") & table["wait_share"].notna()]
    for setting, rows in fcfs.groupby("setting_name", sort=False):
        shares = [
            f"{_point(load, rate) if len(rows) > 1 or not _nothing(load) else ''}{100 * share:.1f}%"
            for load, rate, share in zip(rows["load"], rows["rate"], rows["wait_share"], strict=True)
        ]
        parts.append(f"{setting}: {', '.join(shares)}")
    return wrap(f"waiting, as a share of E2E under FCFS: {'; '.join(parts)}") if parts else []


def record(name: str, cells: Sequence[Cell], table: pd.DataFrame) -> dict[str, Any]:
    """All numbers of the study and what they rest on, as JSON: no NaN, no path, no time of day."""
    done = [cell for cell in cells if cell.status == OK]
    keys = list(dict.fromkeys(key for cell in done for key in cell.provenance))
    provenance = {
        key: distinct(cell.provenance.get(key) for cell in done) for key in keys if key not in ("config_hash", "seed")
    }
    return {
        "name": name,
        "config_hash": config_hash(cells),
        "num_cells": len(cells),
        "num_complete": len(done),
        "absent": [{"cell": cell.name, "status": cell.status} for cell in cells if cell.status != OK],
        "seeds": sorted({int(cell.fields["seed"]) for cell in done}),
        "table": [{key: jsonable(value) for key, value in row.items()} for row in table.to_dict("records")],
        "provenance": provenance,
        "cells": [
            {
                "cell": cell.name,
                "hash": cell.hash,
                "fields": jsonable(dict(cell.fields)),
                "metrics": jsonable(dict(cell.metrics)),
            }
            for cell in done
        ],
    }


def chosen(facts: Any, keys: Sequence[str]) -> dict[str, Any] | None:
    """The facts of these keys that are there; of numbers for several parts, those over all parts."""
    if not isinstance(facts, Mapping):
        return None
    found = {key: facts[key] for key in keys if facts.get(key) not in (None, "", [], {})}
    return {key: value["all"] if isinstance(value, Mapping) and "all" in value else value for key, value in found.items()}


def distinct(values: Iterable[Any]) -> list[Any]:
    """The different values, None left out, in order of appearance."""
    found = {json.dumps(jsonable(value), sort_keys=True): jsonable(value) for value in values if value is not None}
    return list(found.values())


def told(facts: Any) -> str:
    """A nested mapping in one line: "form: roofline; held_out_error: mean 0.03, p95 0.06"."""
    if not isinstance(facts, Mapping):
        return str(facts)
    parts = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {_short(v)}" for k, v in value.items()) or "none"
            parts.append(f"{key}: {value}")
        elif value is not None and value != []:
            parts.append(f"{key}: {_short(value)}")
    return "; ".join(parts)


def show(lines: Sequence[Line]) -> None:
    """Lines on standard output; in colour on a terminal."""
    if not sys.stdout.isatty():
        print("\n".join("".join(text for text, _ in line).rstrip() for line in lines), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text.assemble(*line), no_wrap=True, overflow="ignore", crop=False)


def _point(load: Any, rate: Any) -> str:
    if not _nothing(load):
        return f"load {load:g} "
    return "" if _nothing(rate) else f"{rate:.4g} requests/s "


def _nothing(value: Any) -> bool:
    return value is None or value != value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)


def _mirrored(told: Mapping[str, Any], mode: str) -> str:
    text = f"W&B ({mode}): {told['mirrored']} runs mirrored, {told['skipped']} were there"
    if told["predictors"]:
        text += f", {told['predictors']} predictors logged"
    if told["error"] and not told["failed"]:
        text += f"; NOT all (nothing else is affected): {told['error']}"
    if told["failed"]:
        text += f", {told['failed']} FAILED (nothing else is affected): {told['error']}"
    return text
