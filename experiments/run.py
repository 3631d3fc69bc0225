"""Run: one cell's records as data frames and a summary, built from a Recorder, saved as Parquet and JSON, loaded back.

Same inputs, same bytes: columns in a fixed order, JSON with sorted keys, and whatever was measured by a clock of the machine
only under `volatile`. A number that may not be shown is null, and `flags` says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from lengthwise.engine.simulated.cost import CostModel
from lengthwise.predictors.predictions import Predictions
from lengthwise.sched import SLO
from lengthwise.sched.prediction import mean_lengths

from .dataset import Workload
from .histogram import Histogram
from .jsonable import jsonable
from .latencies import idle_latency
from .metrics import SLOS, measure
from .recorder import STATUSES, Recorder
from .starvation import Overtakes, overtakes
from .utilisation import window_utilisation
from .windows import Window

REQUEST_COLUMNS = (
    "rid", "row", "arrival", "eligible", "first_scheduled", "first_token", "finish", "prompt_len", "output_len",
    "max_new_tokens", "predicted", "num_preemptions", "recomputed", "status", "reason", "client", "priority", "group", "fold",
    "censored", "ended",
)  # fmt: skip
OPTIONAL_COLUMNS = ("class", "session", "turn", "program")  # where the workload has them; `cached` where prefixes are kept
TOKENS = "tokens.parquet"  # of a client's run: when each token came
FILES = ("requests.parquet", "steps.parquet", "preemptions.parquet", "summary.json")


@dataclass
class Run:
    """What came of one cell. requests: one row per request of the workload, sorted by rid; `finish` only where it finished,
    `ended` (s) whenever and however it left, NaN where it had not. steps: one row per plan. preemptions: rid, left, back.
    summary: cell, metrics, flags, window, slo, histograms, volatile, provenance. workload: what was asked, not saved with it
    (see saved.py). tokens: rid, time (s), num: tokens as they came to a client; None where nobody waited for them."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    summary: dict[str, Any]
    preemptions: pd.DataFrame = field(default_factory=lambda: pd.DataFrame({"rid": [], "left": [], "back": []}))
    workload: Workload | None = None
    tokens: pd.DataFrame | None = None
    raw: Path | None = None  # what was written line by line while it ran, of no use once it is saved

    @property
    def metrics(self) -> dict[str, float | int | None]:
        metrics: dict[str, float | int | None] = self.summary["metrics"]
        return metrics

    @property
    def itl(self) -> Histogram:
        """The token-weighted histogram of gaps between tokens, to be pooled with others."""
        return Histogram.from_json(self.summary["histograms"]["itl"])

    def overtakes(self, bound: ArrayLike | None = None) -> Overtakes:
        """Overtaking per request; bound (N,): declared leads in s."""
        return _overtakes(self.requests, self.preemptions, bound)

    def save(self, folder: Path | str) -> None:
        """Write the files into `folder`, made if absent; existing ones are replaced, summary.json last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        frames = dict(zip(FILES, (self.requests, self.steps, self.preemptions), strict=False))
        for name, frame in (frames if self.tokens is None else {**frames, TOKENS: self.tokens}).items():
            pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), folder / name, compression="zstd")
        text = json.dumps(jsonable(self.summary), sort_keys=True, indent=2, allow_nan=False)
        (folder / FILES[-1]).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Read what `save` wrote. Raises FileNotFoundError, naming what is missing, when the run is not whole."""
        folder = Path(folder)
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} is not a whole run: it lacks {', '.join(missing)}")
        frames = [pq.read_table(folder / name).to_pandas() for name in FILES[:-1]]
        for name in ("status", "reason", "client"):  # a column of no strings forgets that it had strings
            coded = frames[0][name].cat
            frames[0][name] = _coded(coded.codes.to_numpy(), coded.categories.tolist())
        tokens = pq.read_table(folder / TOKENS).to_pandas() if (folder / TOKENS).is_file() else None
        summary = json.loads((folder / FILES[-1]).read_text(encoding="utf-8"))
        return cls(frames[0], frames[1], summary, frames[2], tokens=tokens)


def build(
    recorder: Recorder,
    workload: Workload,
    *,
    predictions: Predictions | None = None,
    eligible: ArrayLike | None = None,
    fold: ArrayLike | None = None,
    fallback: ArrayLike | None = None,
    slo: SLO | Mapping[str, ArrayLike | None] | None = None,
    window: Window | None = None,
    bound: ArrayLike | None = None,
    cost: CostModel | None = None,
    token_budget: int = 2048,
    run_end: float | None = None,
    engine: Mapping[str, float | int] | None = None,
    cell: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    volatile: Mapping[str, Any] | None = None,
) -> Run:
    """Make a Run of what `recorder` saw (its columns are used up) and of what only the composition knows.

    All columns have one entry per request of the workload, (N,). predictions: as given to the scheduler. eligible: when each
    prediction was there, s (default: at arrival). fold: the cross-validation fold that predicted it, -1 none. fallback:
    predictions that fell back. slo: objectives in s; those a request carries itself go before. window: as the recorder's.
    bound: declared overtaking leads, s. engine: further numbers that the engine counted, by name. cost, token_budget: for the
    latency on an idle engine. Requests that never entered the engine are unfinished. Raises ValueError on a column of another
    length, or on a window other than the recorder's.
    """
    window = window or Window()
    if (window.begin, window.end) != recorder.window:
        raise ValueError(f"the recorder's window is {recorder.window} s, the run's [{window.begin}, {window.end}) s")
    n = len(workload)
    for name, column in (
        ("predictions", predictions), ("eligible", eligible), ("fold", fold), ("fallback", fallback), ("bound", bound),
    ):  # fmt: skip
        if column is not None and len(column) != n:  # type: ignore[arg-type]
            raise ValueError(f"{name} has {len(column)} rows, the workload {n} requests")  # type: ignore[arg-type]
    requests = _requests(recorder, workload, predictions, eligible, fold)
    steps = pd.DataFrame(recorder.steps(), copy=False)
    preemptions = pd.DataFrame(recorder.preemptions(), copy=False)
    end = recorder.end if run_end is None else run_end
    limits = _limits(slo, recorder, n)
    passes = _overtakes(requests, preemptions, bound) if recorder.inside else None
    measured = measure(
        requests,
        window=window,
        run_end=end,
        slo=limits,
        idle=None if cost is None else lambda p, m: idle_latency(cost, p, m, token_budget),
        itl=recorder.itl,
        totals=recorder.window_totals,
        run_totals=recorder.run_totals if recorder.inside else None,
        num_blocks=recorder.num_blocks,
        passes=passes,
        fallback=None if fallback is None else np.asarray(fallback, dtype=np.bool_),
    )
    for name, count in (engine or {}).items():
        measured.put(name, count)
    used, why = window_utilisation(steps, cost, window.begin, window.end, window.duration(end))
    for name, share in used.items():
        measured.put(name, share, why)
    summary = {
        "cell": dict(cell or {}),
        "metrics": measured.metrics,
        "flags": measured.flags,
        "window": {
            "begin": window.begin, "end": window.end, "whole": window.whole, "horizon": window.horizon, "run_end": end,
            "seconds": window.duration(end), "text": window.describe(end),
        },
        "slo": _describe(slo),
        "histograms": {"itl": recorder.itl.to_json()},
        "volatile": dict(volatile or {}),
        "provenance": dict(provenance or {}),
    }  # fmt: skip
    return Run(requests, steps, jsonable(summary), preemptions)


def _requests(
    recorder: Recorder, workload: Workload, predictions: Predictions | None, eligible: ArrayLike | None, fold: ArrayLike | None
) -> pd.DataFrame:
    seen = recorder.requests()
    n, rid = len(workload), seen["rid"].astype(np.int64)
    if len(rid) and not (rid[0] >= 0 and rid[-1] < n):
        raise ValueError(f"recorded rids from {rid[0]} to {rid[-1]}, the workload has {n} requests")

    def spread(name: str, default: float | NDArray[Any], dtype: Any) -> NDArray[Any]:
        """A recorded column over all n requests, `default` where a request never entered the engine."""
        out = np.array(np.broadcast_to(default, (n,)), dtype=dtype)
        out[rid] = seen[name]
        return out

    dataset, rows = workload.dataset, workload.rows
    arrival = spread("arrival", workload.arrival, np.float64)  # one that waits for an answer comes when it is there
    status = spread("status", STATUSES.index("unfinished"), np.int8)
    ended = spread("ended", math.nan, np.float64)
    ended[status == STATUSES.index("unfinished")] = math.nan
    reasons = [*recorder.reasons, "never entered"]
    if predictions is None:
        predicted = spread("score", math.nan, np.float64)
    elif predictions.point is not None:
        predicted = predictions.point
    else:
        predicted = (
            predictions.score if predictions.survival is None else mean_lengths(np.asarray(predictions.survival, np.float64))
        )
    clients = [c for c in recorder.clients[1:] if c is not None]
    columns = {
        "rid": np.arange(n, dtype=np.int32),
        "row": rows.astype(np.int32),
        "arrival": arrival,
        "eligible": arrival if eligible is None else np.asarray(eligible, dtype=np.float64),
        "first_scheduled": spread("first_scheduled", math.nan, np.float64),
        "first_token": spread("first_token", math.nan, np.float64),
        "finish": np.where(status == 0, ended, math.nan),
        "prompt_len": workload.prompt_len.astype(np.int32),
        "output_len": spread("output_len", 0, np.int32),
        "max_new_tokens": spread("max_new_tokens", dataset.max_new_tokens, np.int32),
        "predicted": predicted,
        "num_preemptions": spread("num_preemptions", 0, np.int32),
        "recomputed": spread("recomputed", 0, np.int32),
        "status": _coded(status, list(STATUSES)),
        "reason": _coded(spread("reason", len(reasons) - 1, np.int32), reasons),
        "client": _coded(spread("client", 0, np.int32) - 1, clients),
        "priority": spread("priority", 0.0, np.float64),
        "group": np.full(n, -1, np.int64) if dataset.group is None else dataset.group[rows],
        "fold": np.full(n, -1, np.int32) if fold is None else np.asarray(fold, dtype=np.int32),
        "censored": np.zeros(n, np.bool_) if dataset.censored is None else dataset.censored[rows],
        "ended": ended,
    }
    if recorder.indexes:
        columns["cached"] = spread("cached", 0, np.int32)
    if not recorder.inside:
        del columns["num_preemptions"], columns["recomputed"]
    more = {name: column for name in OPTIONAL_COLUMNS if (column := workload.column(name)) is not None}
    more |= recorder.further(n)
    kept = [name for name in (*REQUEST_COLUMNS, "cached") if name in columns]
    return pd.DataFrame({name: columns[name] for name in kept} | more, copy=False)


def _coded(codes: NDArray[Any], names: list[str]) -> Any:
    """Strings as codes, -1 for none."""
    return pd.Categorical.from_codes(codes, categories=pd.Index(names, dtype="str"))


def _overtakes(requests: pd.DataFrame, preemptions: pd.DataFrame, bound: ArrayLike | None) -> Overtakes:
    return overtakes(
        requests["arrival"], requests["eligible"], requests["first_scheduled"],
        ended=requests["ended"], rows=preemptions["rid"], left=preemptions["left"], back=preemptions["back"], bound=bound,
    )  # fmt: skip


def _limits(slo: SLO | Mapping[str, ArrayLike | None] | None, recorder: Recorder, n: int) -> dict[str, NDArray[np.float64]]:
    """SLO limits (n,) in s by name, NaN where a request has none; names that nobody has are left out."""
    asked = {name: getattr(slo, name) for name in SLOS} if isinstance(slo, SLO) else dict(slo or {})
    own = np.array([(rid, *limits) for rid, limits in sorted(recorder.slos.items())]).reshape(-1, 4)
    out = {}
    for i, name in enumerate(SLOS):
        limit = np.array(np.broadcast_to(np.asarray(math.nan if (x := asked.pop(name, None)) is None else x, float), (n,)))
        limit[own[:, 0].astype(np.int64)] = own[:, i + 1]
        if not np.isnan(limit).all():
            out[name] = limit
    if asked:
        raise ValueError(f"SLO {sorted(asked)}: choose of {', '.join(SLOS)}")
    return out


def _describe(slo: SLO | Mapping[str, ArrayLike | None] | None) -> dict[str, Any]:
    """Limits as numbers; where they differ by request, their range."""
    asked = {name: getattr(slo, name) for name in SLOS} if isinstance(slo, SLO) else dict(slo or {})
    out: dict[str, Any] = {}
    for name, limit in asked.items():
        if limit is not None:
            x = np.asarray(limit, dtype=np.float64)
            out[name] = float(x) if x.ndim == 0 else {"least": float(np.nanmin(x)), "greatest": float(np.nanmax(x))}
    return out
