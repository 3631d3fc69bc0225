"""Waits: how long requests queued before their first step, as the share that waited longer; who waited longest.

A request that never ran counts with the time it has waited, a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...load_runs import OK, Cell, load_runs
from ...starvation import ccdf
from .points import by_point, counted_samples, presence

NUM_SHARES = 160


def load_waits(cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per setting x load x schedule x share: of n requests of all seeds, `share_above` waited longer than `wait` (s).

    Shares are thinned to about NUM_SHARES, evenly on a log scale; the longest wait is always there, with share 0. Columns:
    setting_name, load, rate, policy, predictor, variant, wait, share_above, n, num_open (had not run when their run stopped),
    max_open (whether the longest wait is one of them), num_seeds, num_cells, absent.
    """
    cells = list(cells)
    parts = []
    for key, index in by_point(load_runs(cells)):
        group = [cells[i] for i in index]
        found = [counted_samples(cell)["wait"] for cell in group if cell.status == OK]
        values = np.concatenate([part[0] for part in found]) if found else np.empty(0)
        is_open = np.concatenate([part[1] for part in found]) if found else np.empty(0, np.bool_)
        row: dict[str, Any] = key | presence(group) | {"n": len(values), "num_open": int(is_open.sum())}
        if not values.size:
            parts.append(pd.DataFrame([row | {"wait": np.nan, "share_above": np.nan, "max_open": False}]))
            continue
        wait, share = ccdf(values)
        keep = thinned(share, len(values))
        row["max_open"] = bool(is_open[values.argmax()])
        parts.append(pd.DataFrame({"wait": wait[keep], "share_above": share[keep]}).assign(**row))
    frame = pd.concat(parts, ignore_index=True)
    first = ["setting_name", "load", "rate", "policy", "predictor", "variant", "wait", "share_above"]
    return frame[[*first, *(key for key in frame if key not in first)]].astype({"load": float, "rate": float})


def thinned(share: np.ndarray, n: int) -> np.ndarray:
    """Positions of falling shares, about NUM_SHARES of them evenly on a log scale down to 1 / n, first and last included."""
    levels = np.logspace(0, -np.log10(max(n, 2)), NUM_SHARES)
    at = np.searchsorted(-share, -levels, side="left")
    return np.unique(np.clip(np.concatenate(([0], at, [len(share) - 1])), 0, len(share) - 1))
