"""Robustness: latency relative to FCFS of the same seed by the strength of a prediction's error, and where it stops helping.

The truth is strength 0 of every kind of error. Pure functions of a frame as `load_runs` returns it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from .comparison import VARIANT, rates_apart, with_setting_names
from .load_runs import OK
from .statistics import paired_ratio

METRICS = {"mean": "e2e_mean", "p99": "e2e_p99"}  # statistic -> metric
EXACT = "none"  # the error of the truth
POINT = ["setting_name", "load", "rate"]
UNSAID = {"victim": "last"}  # what a cell that does not say it has; of the others: none
LINE = [*POINT, "policy", "variant", "error", "error_axis", "statistic"]


class Stop(NamedTuple):
    """Where a line of ratios first reaches 1; NaN with the reason in `note` where it does not, or nobody knows. sure_to: the
    greatest strength up to which every interval lies below 1; NaN: none."""

    at: float
    sure_to: float
    note: str


def ratios(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per setting x load x policy x variant x error x strength x statistic, in the order of `runs`, strengths rising.

    Columns: setting_name, load, rate (1/s), policy, variant (of VARIANT, what tells cells of one policy apart), error,
    error_axis (what its strength is), strength, statistic (of METRICS), ratio to FCFS of the same seed with ratio_low and
    ratio_high (95 %), num_seeds, num_cells. Empty where no cell has an error. FCFS is that of the same variant, or the
    nearest. Raises ValueError where a seed comes twice.
    """
    columns = [*POINT, "policy", "variant", "error", "error_axis", "strength", "statistic", "ratio", "ratio_low", "ratio_high"]
    columns += ["num_seeds", "num_cells"]
    if "strength" not in runs or runs["strength"].isna().all():
        return pd.DataFrame(columns=columns)
    frame = with_setting_names(runs).reset_index(drop=True)
    frame = frame.reindex(columns=list(dict.fromkeys((*frame.columns, *VARIANT))))
    for name in VARIANT:
        frame[name] = frame[name].astype(object).where(frame[name].notna(), UNSAID.get(name, "none")).astype(str)
    rows = []
    for (setting, load, _), block in frame.groupby(
        [frame["setting_name"], frame["load"], rates_apart(frame)], sort=False, dropna=False
    ):
        fcfs = block[block["policy"] == "fcfs"]
        point = {"setting_name": setting, "load": load, "rate": block["rate"].astype(float).mean()}
        told = block[(block["policy"] != "fcfs") & block["strength"].notna()]
        for (policy, *variant), own in told.groupby(["policy", *VARIANT], sort=False):
            mine = told[told["policy"] == policy]
            said = " ".join(word for key, word in zip(VARIANT, variant, strict=True) if mine[key].nunique() > 1)
            base = _nearest(fcfs, variant)
            for kind, cells in own[own["error"] != EXACT].groupby("error", sort=False):
                line = pd.concat([own[own["error"] == EXACT], cells])
                for strength, at in line.groupby("strength"):
                    key = {"policy": policy, "variant": said, "error": kind, "error_axis": cells["error_axis"].iloc[0]}
                    key |= {"strength": strength}
                    rows += [point | key | {"statistic": name} | _against(at, base, m) for name, m in METRICS.items()]
    return pd.DataFrame(rows, columns=columns).astype({"load": float, "rate": float})


def stops(table: pd.DataFrame) -> pd.DataFrame:
    """One row per setting x load x policy x variant x error x statistic of `ratios`: LINE, stops_at, sure_to, note (see Stop),
    and strongest and its ratio, the end of what was measured."""
    rows = []
    for key, line in table.groupby(LINE, sort=False, dropna=False):
        line = line.sort_values("strength")
        found = stop(*(line[name].tolist() for name in ("strength", "ratio", "ratio_high")))
        end = {"stops_at": found.at, "sure_to": found.sure_to, "note": found.note}
        end |= {"strongest": line["strength"].iloc[-1], "ratio": line["ratio"].iloc[-1]}
        rows.append(dict(zip(LINE, key, strict=True)) | end)
    return pd.DataFrame(rows, columns=[*LINE, "stops_at", "sure_to", "note", "strongest", "ratio"])


def stop(strengths: Sequence[float], ratio: Sequence[float], high: Sequence[float]) -> Stop:
    """Where ratios (n,) at rising strengths (n,) first reach 1: linear between the two strengths around it. high (n,): upper
    ends of their intervals. A ratio that is NaN before that leaves the answer open."""
    if not strengths:
        return Stop(math.nan, math.nan, "not measured")
    sure = math.nan
    for x, top in zip(strengths, high, strict=True):
        if not top < 1.0:
            break
        sure = x
    for k, (x, r) in enumerate(zip(strengths, ratio, strict=True)):
        if math.isnan(r):
            return Stop(math.nan, sure, f"no value at {x:g}")
        if r >= 1.0:
            again = [y for y, later in zip(strengths[k:], ratio[k:], strict=True) if later < 1.0]
            note = f"below 1 again at {again[0]:g}" if again else ""
            if k == 0:
                if x > 0.0:  # the truth was not measured
                    return Stop(math.nan, sure, "; ".join(filter(None, (f"at or below {x:g}", note))))
                return Stop(x, sure, note or "never helps")
            before, r_before = strengths[k - 1], ratio[k - 1]
            return Stop(before + (1.0 - r_before) / (r - r_before) * (x - before), sure, note)
    return Stop(math.nan, sure, f"never up to {strengths[-1]:g}")


def _nearest(cells: pd.DataFrame, variant: Sequence[str]) -> pd.DataFrame:
    """Of these cells those of the variant that shares most with this one; the first of equals."""
    if cells.empty:
        return cells
    shared = (cells[list(VARIANT)] == list(variant)).sum(axis=1)
    best = cells.loc[shared.idxmax(), list(VARIANT)]
    return cells[(cells[list(VARIANT)] == best).all(axis=1)]


def _against(cells: pd.DataFrame, fcfs: pd.DataFrame, metric: str) -> dict[str, Any]:
    found = paired_ratio(_scores(cells, metric), _scores(fcfs, metric))
    numbers = {"ratio": found.mean, "ratio_low": found.low, "ratio_high": found.high}
    known = {key: np.nan if value is None else value for key, value in numbers.items()}
    return known | {"num_seeds": found.n, "num_cells": len(cells)}


def _scores(cells: pd.DataFrame, metric: str) -> dict[int, float | None]:
    done = cells[cells["status"] == OK]
    if (twice := done["seed"].duplicated()).any():
        row = done[twice].iloc[0]
        raise ValueError(f"{row['policy']} with {row['predictor']}: seed {row['seed']} comes twice; leave one of the cells out")
    return dict(zip(done["seed"].astype(int), done[metric].astype(float), strict=True))
