"""Attainment at other SLOs than the run's own: every limit times a factor, and the stored requests judged again.

The judge is the one of `metrics`, so at factor 1 this is the attainment of summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...comparison import COLUMNS
from ...load_runs import OK, Cell, load_runs, read_requests, run_end, window_of
from ...metrics import SLOS, judge
from .points import by_point, presence, ratio_interval

SCALES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
JUDGED = ("all", *SLOS)


def load_attainments(cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per setting x load x schedule x scale x judged: all limits together, or ttft, tpot, e2e alone.

    Columns: setting_name, load, rate, policy, predictor, variant, scale, judged, value (share met, seeds pooled), low, high,
    num_met, n (requests judged), num_undecided (cut off before it was known), num_seeds, num_cells, absent, slo (the limits at
    scale 1, in a line). Raises ValueError when no cell has an SLO, or one has limits by request, which are not stored.
    """
    cells = list(cells)
    rows: list[dict[str, Any]] = []
    for key, index in by_point(load_runs(cells)):
        group = [cells[i] for i in index]
        done = [cell for cell in group if cell.status == OK]
        limits = [limits_of(cell) for cell in done]
        if done and not any(limits):
            continue
        found = [judged(cell, limit) for cell, limit in zip(done, limits, strict=True)]
        told = "; ".join(dict.fromkeys(", ".join(f"{k} {v:g} s" for k, v in limit.items()) for limit in limits))
        row = {**key, **presence(group), "slo": told}
        for scale in SCALES:
            for name in JUDGED:
                parts = [counts[scale, name] for counts in found if (scale, name) in counts]
                if not parts and (done or name != "all"):
                    continue
                met, n, undecided = (np.array(column) for column in zip(*parts, strict=True)) if parts else (np.zeros(0),) * 3
                counted = {"num_met": int(met.sum()), "n": int(n.sum()), "num_undecided": int(undecided.sum())}
                rows.append(row | {"scale": scale, "judged": name, **ratio_interval(met, n), **counted})
    if not rows:
        raise ValueError("no cell has an SLO: there is nothing to scale")
    return pd.DataFrame(rows).astype({"load": float, "rate": float})


def limits_of(cell: Cell) -> dict[str, float]:
    """The SLO of a complete cell: name -> s. Raises ValueError where the limits differ by request."""
    limits = {}
    for name, limit in ((cell.summary or {}).get("slo") or {}).items():
        if isinstance(limit, Mapping):
            raise ValueError(f"{cell.name}: its {name} limits differ by request, and requests.parquet does not hold them")
        if limit is not None:
            limits[str(name)] = float(limit)
    return limits


def judged(cell: Cell, limits: Mapping[str, float]) -> dict[tuple[float, str], tuple[int, int, int]]:
    """(scale, judged) -> (met, decided, undecided) of the requests that the cell's metrics count.

    Raises ValueError where scale 1 is not what the summary says: then requests had limits of their own, which are not stored.
    """
    requests = read_requests(cell.folder, COLUMNS)
    counted = requests[window_of(cell).counts(requests["arrival"].to_numpy())]
    cut_off = (counted["status"] == "unfinished").to_numpy()
    out = {}
    for scale in SCALES:
        for name, verdict in judge(counted, {key: scale * limit for key, limit in limits.items()}, run_end(cell)).items():
            open_ = np.isnan(verdict)
            out[scale, name] = (int((verdict == 1).sum()), int((~open_).sum()), int((open_ & cut_off).sum()))
    told = cell.metrics.get("num_met"), cell.metrics.get("attainment_n")
    if None not in told and out[1.0, "all"][:2] != told:
        raise ValueError(
            f"{cell.name}: {out[1.0, 'all'][0]} of {out[1.0, 'all'][1]} requests meet its SLO, {told[0]} of {told[1]} when it "
            "ran: its requests have limits of their own, and requests.parquet does not hold them"
        )
    return out
