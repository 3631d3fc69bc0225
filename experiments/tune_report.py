"""The end of a search: trials with the best first, the best on held-out seeds, tune.json and tune.csv, the mirror."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .jsonable import jsonable
from .launch import say
from .load_runs import read_cells
from .statistics import Paired, paired
from .tracking import mirror

if TYPE_CHECKING:
    from .tune import Tried

SHOWN = 10


def report(
    folder: Path,
    tried: Sequence[Tried],
    best: Tried | None,
    again: Sequence[Tried],
    settings: Mapping[str, Any],
    version: str,
    wandb: str,
) -> None:
    """Print what was found and write it under `folder`. again: the nodes' own values, and the best if another, on other seeds.

    Raises SystemExit when no trial has a value.
    """
    held_out = _held_out(again)
    record = {
        "objective": settings["objective"],
        "direction": settings["direction"],
        "seeds": sorted(tried[0].cells),
        "sampler": {**settings["sampler"], "optuna": version},
        "batch": settings["batch"],
        "trials": [_as_dict(trial) for trial in tried],
        "best": None if best is None else {**_as_dict(best), "held_out": held_out},
    }
    (folder / "tune.json").write_text(json.dumps(jsonable(record), indent=1, allow_nan=False) + "\n")
    frame = pd.DataFrame([_row(trial) for trial in tried])
    frame.to_csv(folder / "tune.csv", index=False, float_format="%.10g", lineterminator="\n")
    for trial in tried:
        if trial.error:
            say(f"trial {trial.number} failed: {_text(trial.params)}: {trial.error}")
    if best is None:
        raise SystemExit(f"none of {len(tried)} trials has a value of {settings['objective']}")
    print("\n".join(lines(tried, best, held_out, settings)))
    print(f"\nwritten to {folder}: tune.json, tune.csv")
    if wandb != "off":
        told = mirror(folder, read_cells(folder), mode=wandb)
        failed = f", {told['failed']} FAILED: {told['error']}" if told["failed"] else ""
        print(f"W&B ({wandb}): {told['mirrored']} runs mirrored, {told['skipped']} were there{failed}")


def lines(tried: Sequence[Tried], best: Tried, held_out: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> list[str]:
    """The page: the best trials and the nodes' own values, then what the best changes."""
    objective, sign = settings["objective"], 1.0 if settings["direction"] == "minimize" else -1.0
    done = sorted((trial for trial in tried if trial.value is not None), key=lambda trial: sign * (trial.value or 0.0))
    shown = done[:SHOWN] + [trial for trial in done[SHOWN:] if trial.number == 0]
    own = tried[0]
    out = [
        f"{settings['direction']} {objective}: {len(done)} of {len(tried)} trials, each the mean over seeds "
        f"{', '.join(map(str, sorted(own.cells)))}; trial 0 has the nodes' own values",
        *pd.DataFrame([_row(trial) for trial in shown]).drop(columns="error").to_string(index=False).splitlines(),
    ]
    if len(done) > len(shown):
        out.append(f"... and {len(done) - len(shown)} more in tune.csv")
    out.append(f"best: {_text(best.params)}")
    if best is own:
        return [*out, "no trial is better than the nodes' own values (trial 0)"]
    change = f", {_change(best.value, own.value)} against the nodes' own values" if own.value else ""
    out.append(f"{objective} {best.value:.6g}{change} on the seeds it was chosen on, which flatters it")
    if held_out is not None:
        seeds = ", ".join(held_out["values"])
        out.append(f"held out (seeds {seeds}): {held_out['value']:.6g}, {held_out['text']} against the nodes' own values")
    return out


def _held_out(again: Sequence[Tried]) -> dict[str, Any] | None:
    """How the best does on other seeds, paired with the nodes' own values; None without both."""
    if len(again) < 2 or any(trial.value is None for trial in again):
        return None
    own, best = again
    found: Paired = paired(best.values, own.values)
    relative = [None if x is None or not own.value else x / own.value for x in (found.mean, found.low, found.high)]
    mean, low, high = relative
    text = "n/a" if mean is None else f"{100 * mean:+.1f} %"
    if low is not None and high is not None:
        text += f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    values = {str(seed): value for seed, value in best.values.items()}
    return {"value": best.value, "own": own.value, "values": values, "relative": mean, "low": low, "high": high, "text": text}


def _row(trial: Tried) -> dict[str, Any]:
    seeds = {f"seed {seed}": trial.values.get(seed) for seed in sorted(trial.cells)}
    return {"trial": trial.number, **trial.params, "value": trial.value, **seeds, "error": trial.error or ""}


def _as_dict(trial: Tried) -> dict[str, Any]:
    by_seed = {str(seed): {"cell": cell, "value": trial.values.get(seed)} for seed, cell in trial.cells.items()}
    return {
        "number": trial.number, "params": trial.params, "value": trial.value, "seeds": by_seed, "error": trial.error,
    }  # fmt: skip


def _text(params: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in params.items())


def _change(value: float | None, other: float | None) -> str:
    return "n/a" if value is None or not other else f"{100 * (value / other - 1):+.1f} %"
