"""Points: one latency statistic per setting x load x schedule, over the requests of all seeds together.

A percentile is one of the pooled requests, never a mean of the seeds' percentiles. Its interval is a jackknife that leaves out
one seed at a time, because requests of one run are not independent. Cells are read one point at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ...comparison import COLUMNS, VARIANT, rates_apart, with_setting_names
from ...latencies import samples
from ...load_runs import OK, Cell, load_runs, read_requests, run_end, window_of
from ...statistics import LEVEL, QUANTILES, percentile, quantile

LATENCIES = ("ttft", "tpot", "e2e", "normalised_latency", "wait")
STATISTICS = ("mean", *QUANTILES)
SCHEDULE = ("policy", "predictor", "variant")
METHOD = "95 % jackknife over seeds"

Floats = NDArray[np.float64]
Part = tuple[Floats, NDArray[np.bool_]]  # values of one cell's requests, and which are only lower bounds


def load_points(cells: Sequence[Cell], *, latency: str | None = None) -> pd.DataFrame:
    """One row per setting x load x schedule x latency x statistic, in the order of the cells. latency: only this one.

    Columns: setting_name, load, rate (1/s), policy, predictor, variant (what tells two schedules of one name apart), latency,
    statistic, value, low, high (s; s a token), n (requests pooled), note (why there is no value, or ">= ..." for a lower
    bound), num_seeds, num_cells, absent ("seed: status" of the cells without a result). Raises ValueError on another latency.
    """
    if latency not in (None, *LATENCIES):
        raise ValueError(f"latency {latency!r}: choose from {', '.join(LATENCIES)}")
    cells, rows = list(cells), []
    for key, index in by_point(load_runs(cells)):
        group = [cells[i] for i in index]
        done = [cell for cell in group if cell.status == OK]
        parts: dict[str, list[Part]] = {name: [] for name in LATENCIES}
        for cell in done:
            for name, part in counted_samples(cell).items():
                parts[name].append(part)
        row = key | presence(group)
        for name in LATENCIES if latency is None else (latency,):
            rows += [row | {"latency": name, "statistic": s, **pooled(parts[name], s)} for s in STATISTICS]
    return pd.DataFrame(rows).astype({"value": float, "low": float, "high": float, "load": float, "rate": float})


def by_point(runs: pd.DataFrame) -> list[tuple[dict[str, Any], list[int]]]:
    """(setting_name, load, rate, policy, predictor, variant) and the positions in `runs` of its cells, in order of appearance.

    runs: as `load_runs` returns them. Cells that were given a rate and no load are told apart by their rate.
    """
    frame = with_variants(with_setting_names(runs)).reset_index(drop=True)
    at = rates_apart(frame)
    out = []
    keys = [frame["setting_name"], frame["load"].astype(float), at, *(frame[key] for key in SCHEDULE)]
    for key, group in frame.groupby(keys, sort=False, dropna=False):
        setting, load, _, *schedule = key
        point = {"setting_name": setting, "load": load, "rate": group["rate"].astype(float).mean()}
        out.append((point | dict(zip(SCHEDULE, schedule, strict=True)), group.index.tolist()))
    return out


def with_variants(frame: pd.DataFrame) -> pd.DataFrame:
    """The same rows with `variant`: of VARIANT, the fields that tell cells of one policy and predictor apart, else ""."""
    variant = np.full(len(frame), "", dtype=object)
    places = pd.Series(np.arange(len(frame)))
    for _, group in places.groupby([frame["policy"].astype(str).to_numpy(), frame["predictor"].astype(str).to_numpy()]):
        mine = frame.iloc[group.to_numpy()]
        telling = [key for key in VARIANT if key in mine and mine[key].dropna().nunique() > 1]
        if telling:
            variant[group.to_numpy()] = [" ".join(map(str, row)) for row in mine[telling].itertuples(index=False)]
    return frame.assign(variant=variant.astype(str))


def presence(cells: Sequence[Cell]) -> dict[str, Any]:
    """num_seeds with a result, num_cells, and absent: "seed: status" of the others."""
    seeds = {cell.fields.get("seed") for cell in cells if cell.status == OK}
    absent = ", ".join(f"{cell.fields.get('seed')}: {cell.status}" for cell in cells if cell.status != OK)
    return {"num_seeds": len(seeds), "num_cells": len(cells), "absent": absent}


def counted_samples(cell: Cell) -> dict[str, Part]:
    """latency -> (values, lower bounds) of the requests that the cell's metrics count."""
    requests = read_requests(cell.folder, COLUMNS)
    counted = requests[window_of(cell).counts(requests["arrival"].to_numpy())]
    return {name: (sample.values, sample.open) for name, sample in samples(counted, run_end(cell)).items() if name in LATENCIES}


def pooled(parts: Sequence[Part], statistic: str) -> dict[str, Any]:
    """value, low, high, n, note of mean | p50 | p99 | p999 over all parts (one per seed); value NaN where n is too small."""
    values = np.concatenate([part[0] for part in parts]) if parts else np.empty(0)
    is_open = np.concatenate([part[1] for part in parts]) if parts else np.empty(0, np.bool_)
    out = {"value": math.nan, "low": math.nan, "high": math.nan, "n": len(values), "note": ""}
    if statistic == "mean":
        if not values.size or is_open.any():
            return out | {"note": f"{int(is_open.sum())} of {len(values)} have not ended" if values.size else "n=0"}
        return out | interval([part[0] for part in parts], lambda x: float(x.mean()))
    found = quantile(values, statistic, is_open)
    if found.value is None:
        return out | {"note": found.flag or ""}
    level = QUANTILES[statistic]
    return out | interval([part[0] for part in parts], lambda x: percentile(x, level)) | {"note": found.flag or ""}


def interval(parts: Sequence[Floats], of: Callable[[Floats], float]) -> dict[str, float]:
    """value: `of` all parts together; low, high: its 95 % jackknife interval, NaN with fewer than two non-empty parts."""
    parts = [part for part in parts if len(part)]
    value = of(np.concatenate(parts))
    n = len(parts)
    if n < 2:
        return {"value": value, "low": math.nan, "high": math.nan}
    without = np.array([of(np.concatenate([p for j, p in enumerate(parts) if j != i])) for i in range(n)])
    half = student(n - 1) * math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    return {"value": value, "low": value - half, "high": value + half}


def ratio_interval(met: ArrayLike, of: ArrayLike) -> dict[str, float]:
    """The same of sum(met) / sum(of), a part per seed: shares are pooled, not averaged. NaN where nothing was asked."""
    up, down = np.asarray(met, dtype=np.float64), np.asarray(of, dtype=np.float64)
    up, down = up[down > 0], down[down > 0]
    if not down.size:
        return {"value": math.nan, "low": math.nan, "high": math.nan}
    value, n = float(up.sum() / down.sum()), len(down)
    if n < 2:
        return {"value": value, "low": math.nan, "high": math.nan}
    without = (up.sum() - up) / (down.sum() - down)
    half = student(n - 1) * math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    return {"value": value, "low": max(value - half, 0.0), "high": min(value + half, 1.0)}


def student(degrees: int) -> float:
    """Half the width of a LEVEL interval, in standard errors."""
    from scipy.stats import t  # half a second of import

    return float(t.ppf(0.5 + LEVEL / 2, degrees))


def schedules_of(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(policy, predictor, variant) of a frame, in order of appearance."""
    variant: Mapping[str, Any] | Any = frame["variant"] if "variant" in frame else [""] * len(frame)
    return list(dict.fromkeys(zip(frame["policy"], frame["predictor"], variant, strict=True)))
