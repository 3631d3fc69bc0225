"""Slowdown by size: E2E over E2E alone on an idle engine, of stored requests, by decile of their output length.

The idle latency comes from the cost model in the cell's stored config. It is computed again, and refused where it does not give
the slowdown that the cell's summary holds: then the model's code has changed since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...comparison import COLUMNS
from ...latencies import Sample, idle_latency, samples
from ...load_runs import OK, Cell, load_runs, read_requests, run_end, window_of
from ...nodes import load_hardware
from ...starvation import by_decile
from ...statistics import LEAST, QUANTILES, percentile
from ...stored import config_of
from .points import by_point, interval, presence

MEASURES = ("slowdown", "normalised_latency", "e2e", "ttft", "wait")
STATISTICS = ("mean", "p50", "p99", "max")


def load_slowdowns(cells: Sequence[Cell], *, measure: str | None = None) -> pd.DataFrame:
    """One row per setting x load x schedule x measure x decile x statistic. measure: only this one.

    Columns: setting_name, load, rate, policy, predictor, variant, measure (slowdown; or a latency, s), decile (1 the shortest
    tenth of the outputs), least_size, greatest_size (tokens), n, statistic (mean, p50, p99, max of the requests of all seeds),
    value, low, high (95 % jackknife over seeds), note, num_open (requests of the decile that had not ended: their value is a
    lower bound), num_seeds, num_cells, absent. Raises ValueError where a slowdown cannot be had.
    """
    if measure not in (None, *MEASURES):
        raise ValueError(f"measure={measure!r}: choose {', '.join(MEASURES)}")
    measures = MEASURES if measure is None else (measure,)
    cells = list(cells)
    rows: list[dict[str, Any]] = []
    for key, index in by_point(load_runs(cells)):
        group = [cells[i] for i in index]
        parts = [_sampled(cell, measures) for cell in group if cell.status == OK]
        row = key | presence(group)
        for name in measures:
            rows += [row | {"measure": name} | found for found in _deciles([part[name] for part in parts])]
    return pd.DataFrame(rows).astype({"load": float, "rate": float})


def slowdown(cell: Cell, counted: pd.DataFrame) -> Sample:
    """The slowdowns of `counted`, requests of the cell. Raises ValueError when they are not those of its summary."""
    config = config_of(cell)
    if "hardware" not in config:
        raise ValueError(f"{cell.name}: its config names no hardware, so no latency on an idle engine is known")
    cost, budget = load_hardware(config).cost, config["limits"]["token_budget"]
    found = samples(counted, run_end(cell), lambda p, n: idle_latency(cost, p, n, budget))["slowdown"]
    stored = cell.metrics.get("slowdown_mean")
    if stored is not None and len(found.values) and not math.isclose(found.values.mean(), stored, rel_tol=1e-9):
        raise ValueError(
            f"{cell.name}: mean slowdown {found.values.mean():.9g} by the cost model here, {stored:.9g} when it ran: "
            "the model has changed since; run the study again"
        )
    return found


def _sampled(cell: Cell, measures: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """measure -> (values, lower bounds, output lengths) of the counted requests."""
    requests = read_requests(cell.folder, COLUMNS)
    counted = requests[window_of(cell).counts(requests["arrival"].to_numpy())].reset_index(drop=True)
    found = samples(counted, run_end(cell))
    if "slowdown" in measures:
        found["slowdown"] = slowdown(cell, counted)
    sizes = counted["output_len"].to_numpy(np.float64)
    return {name: (found[name].values, found[name].open, sizes[found[name].rows]) for name in measures}


def _deciles(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[dict[str, Any]]:
    if not parts:
        nothing = {"n": 0, "num_open": 0, "value": math.nan, "low": math.nan, "high": math.nan, "note": "no cell"}
        sizes = {"least_size": math.nan, "greatest_size": math.nan}
        return [{"decile": d, **sizes, **nothing, "statistic": s} for d in range(1, 11) for s in STATISTICS]
    table = by_decile(np.concatenate([part[0] for part in parts]), np.concatenate([part[2] for part in parts]))
    edges = table["greatest_size"].to_numpy()
    rows = []
    for k, found in enumerate(table.to_dict("records")):
        inside = [np.searchsorted(edges, part[2], side="left") == k for part in parts]
        own = [part[0][mask] for part, mask in zip(parts, inside, strict=True)]
        num_open = int(sum(part[1][mask].sum() for part, mask in zip(parts, inside, strict=True)))
        row = {name: found[name] for name in ("decile", "least_size", "greatest_size", "n")} | {"num_open": num_open}
        few = found["n"] < LEAST["p99"]
        for statistic in STATISTICS:
            if statistic == "max":
                got = {"value": found["max"], "low": math.nan, "high": math.nan, "note": ""}
            elif statistic == "p99" and few:
                note = f"n={found['n']}, p99 wants {LEAST['p99']}"
                got = {"value": math.nan, "low": math.nan, "high": math.nan, "note": note}
            elif statistic == "mean" and num_open:
                got = {"value": math.nan, "low": math.nan, "high": math.nan, "note": f"{num_open} have not ended"}
            elif statistic == "mean":
                got = {**interval(own, lambda x: float(x.mean())), "note": ""}
            else:
                level = QUANTILES[statistic]
                got = {**interval(own, lambda x, at=level: percentile(x, at)), "note": ">=" if num_open else ""}  # type: ignore[misc]
            rows.append(row | {"statistic": statistic} | got)
    return rows
