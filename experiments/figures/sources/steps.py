"""Steps over time: what the engine held and who waited, of stored cells, on a common grid of time.

A state stands from the end of one plan to the end of the next; a bin of the grid holds its average over time. So a cell of a
million steps is a few hundred rows, and nothing more than one cell is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...load_runs import OK, Cell, load_runs
from ...nodes import new_kv
from ...stored import config_of
from .points import by_point

NUM_BINS = 240
STATES = {"waiting": "num_waiting", "running": "num_running", "kv": "kv_free_blocks"}
Floats = NDArray[np.float64]


def load_steps(cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per complete cell x bin of time. Columns: setting_name, load, rate, policy, predictor, variant, seed, time (s, a
    bin's middle), waiting, running (requests, averages over the bin), kv (share of the pool's blocks in use), busy (share of
    the bin with a step running), num_plans (of the cell), num_requests.

    All cells of one setting and load share a grid: NUM_BINS bins from 0 to the end of the longest. kv is NaN where the
    pool's size is not stored.
    """
    cells = list(cells)
    points = by_point(load_runs(cells))
    ends: dict[tuple[Any, ...], float] = {}
    for key, index in points:
        for cell in (cells[i] for i in index if cells[i].status == OK):
            at = key["setting_name"], key["load"] if key["load"] == key["load"] else key["rate"]
            ends[at] = max(ends.get(at, 0.0), float((cell.summary or {})["window"]["run_end"]))
    parts = []
    for key, index in points:
        for cell in (cells[i] for i in index if cells[i].status == OK):
            at = key["setting_name"], key["load"] if key["load"] == key["load"] else key["rate"]
            parts.append(binned(cell, np.linspace(0.0, ends[at], NUM_BINS + 1)).assign(**key, seed=cell.fields.get("seed")))
    if not parts:
        raise ValueError("no complete cell among the results")
    frame = pd.concat(parts, ignore_index=True)
    first = ["setting_name", "load", "rate", "policy", "predictor", "variant", "seed", "time"]
    return frame[[*first, *(key for key in frame if key not in first)]].astype({"load": float, "rate": float})


def binned(cell: Cell, edges: Floats) -> pd.DataFrame:
    """The states of one cell averaged over the bins between `edges` (s). Raises ValueError where no steps are known."""
    steps = pd.read_parquet(cell.folder / "steps.parquet", columns=["start", "end", *STATES.values()])
    start, end = steps["start"].to_numpy(np.float64), steps["end"].to_numpy(np.float64)
    middle, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    if not len(steps):
        raise ValueError(f"{cell.name} has no steps: its server does not tell them, so nothing can be drawn over time")
    out: dict[str, Any] = {"time": middle}
    blocks = num_blocks(cell)
    for name, column in STATES.items():
        values = steps[column].to_numpy(np.float64)
        if name == "kv":
            values = 1.0 - values / blocks
        idle = 0.0 if name != "kv" or blocks == blocks else np.nan
        out[name] = _average(end, np.concatenate(([idle], values)), edges) / widths
    ahead = np.searchsorted(start, edges, side="right")  # plans begun before each edge; the last may be under way
    done = np.concatenate(([0.0], np.cumsum(end - start)))
    last = np.maximum(ahead - 1, 0)
    under = np.where(ahead > 0, np.minimum(edges, end[last]) - start[last], 0.0) if len(start) else np.zeros(len(edges))
    busy = np.where(ahead > 0, done[last] + under, 0.0)
    out["busy"] = np.diff(busy) / widths
    return pd.DataFrame(out).assign(num_plans=len(steps), num_requests=int(cell.metrics.get("num_counted") or 0))


def num_blocks(cell: Cell) -> float:
    """Blocks of the cell's KV pool; NaN where it is not stored."""
    tokens = cell.provenance.get("kv_pool_tokens")
    cfg = config_of(cell)
    return float(new_kv(cfg, tokens).num_blocks) if tokens and cfg.get("kv") else float("nan")


def _average(times: Floats, values: Floats, edges: Floats) -> Floats:
    """The integral over each bin of the step function that is values[0] until times[0], then values[i + 1] from times[i]."""
    at = np.concatenate(([0.0], times, [max(edges[-1], times[-1] if len(times) else 0.0)]))
    total = np.concatenate(([0.0], np.cumsum(np.diff(at) * values)))
    return np.diff(np.interp(edges, at, total))
