"""Compare the schedules of a study: paired differences to FCFS, share of the gap to the oracle closed, pooled percentiles, who
waited and what it cost.

A point is one setting at one load; within it all schedules saw the same arrivals, prompts and lengths, seed by seed.
Percentiles are of the requests of all seeds together, never means of percentiles. What is missing is counted, never filled in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .latencies import Sample, samples
from .load_runs import OK, Cell, load_runs, marks, num_plans, num_requests, read_requests, run_end, window_of
from .statistics import gap_closed, quantile
from .statistics import paired as paired_over_seeds

SETTING = ("setting", "workload", "arrivals", "population", "reshape", "limits", "hardware", "system", "slo", "executor")
SCHEDULE = ("policy", "predictor")
VARIANT = ("refine", "batching", "kv", "preemption", "admission", "victim")  # of a schedule's name where they tell two apart
SERIES = ("e2e", "ttft", "tpot", "normalised_latency")
POOLED = (*SERIES, "wait")
PERCENTILES = ("p50", "p99", "p999")
MEANS = ("slowdown_mean", *(f"slowdown_d{k}_mean" for k in range(1, 11)), "jain", "recompute_tax", "kv_use_mean")
CLOCKED = ("overhead_us",)  # measured by a clock: another number each time
COLUMNS = (
    "arrival", "first_scheduled", "first_token", "finish", "ended", "prompt_len", "output_len", "max_new_tokens", "status",
)  # fmt: skip
SHARE = re.compile(r"^([\d.]+)(?: to ([\d.]+))?%")
SCORE = "e2e_mean"  # what is compared with FCFS and with the oracle

Key = tuple[Any, ...]
Scores = dict[int, float]


def paired(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per setting x load x schedule, in the order of `runs` (as `load_runs` returns them); cells that have no load are
    told apart by their rate. Pure.

    Columns: SETTING fields, setting_name, load, rate (1/s), policy, predictor, variant, is_oracle, num_seeds, num_cells, absent
    ("seed: status"); of mean E2E over common seeds: difference to FCFS (s), ratio to FCFS, each with _low and _high (95 %) and
    difference_seeds; gap_closed, gap_closed_low, gap_closed_high, gap_note (why there is no number); regret: the ratio to the
    same policy with the oracle, less 1, with _low and _high.
    """
    keys = (*SETTING, "load", *SCHEDULE, *VARIANT)
    runs = runs.reindex(columns=list(dict.fromkeys((*runs.columns, *keys, "rate", SCORE))))
    runs_at = rates_apart(runs)
    columns = [[None if _nothing(value) else value for value in runs[key]] for key in keys]
    identity = list(zip(*columns, strict=True))
    names = _setting_names([key[: len(SETTING)] for key in identity])
    points: dict[Key, dict[Key, list[int]]] = {}
    for i, (key, at) in enumerate(zip(identity, runs_at, strict=True)):
        point, schedule = (*key[: len(SETTING) + 1], None if math.isnan(at) else at), key[len(SETTING) + 1 :]
        points.setdefault(point, {}).setdefault(schedule, []).append(i)
    rows = []
    for point, schedules in points.items():
        groups = {schedule: runs.iloc[index] for schedule, index in schedules.items()}
        for schedule, group in groups.items():
            done = group[group["status"] == OK]
            absent = group[group["status"] != OK]
            rows.append(
                {
                    **dict(zip((*SETTING, "load"), point[:-1], strict=True)),
                    "setting_name": names[point[:-2]],
                    "rate": done["rate"].mean() if point[-1] is None else point[-1],
                    **dict(zip(SCHEDULE, schedule, strict=False)),
                    "variant": _variant(schedule, list(groups)),
                    "is_oracle": _is_oracle(group),
                    "num_seeds": done["seed"].nunique(),
                    "num_cells": len(group),
                    "absent": ", ".join(f"{seed}: {s}" for seed, s in zip(absent["seed"], absent["status"], strict=True)),
                    **_against(schedule, groups),
                    "cells": list(schedules[schedule]),
                }
            )
    table = pd.DataFrame(rows)
    numbers = [f"{name}{end}" for name in ("difference", "ratio", "gap_closed", "regret") for end in ("", "_low", "_high")]
    return table.astype(dict.fromkeys(numbers, np.float64))


def rates_apart(frame: pd.DataFrame) -> pd.Series:
    """The rate (1/s) that tells a row's point apart: NaN where it has a load. A cell without a result does not know the rate
    of arrivals that keep their own times; it is that of its setting, when there is one."""
    at = frame["rate"].where(frame["load"].isna()).astype(np.float64)
    unknown = at.isna() & frame["load"].isna()
    if unknown.any() and not unknown.all():
        setting = with_setting_names(frame)["setting_name"]
        known = at.groupby(setting.to_numpy()).agg(lambda rates: rates.dropna().iloc[0] if rates.nunique() == 1 else math.nan)
        at = at.where(~unknown, setting.map(known))
    return at


def with_setting_names(frame: pd.DataFrame) -> pd.DataFrame:
    """The same rows with `setting_name`, as `paired` names them. SETTING fields that are absent count as None."""
    columns = [[None if _nothing(value) else value for value in frame[key]] if key in frame else None for key in SETTING]
    keys = list(zip(*(column or [None] * len(frame) for column in columns), strict=True))
    names = _setting_names(keys)
    return frame.assign(setting_name=[names[key] for key in keys])


def compare(cells: Sequence[Cell]) -> pd.DataFrame:
    """`paired`, and what the cells measured: num_requests (a cell), num_counted, num_unfinished, num_rejected, num_censored
    (pooled); {series}_{mean,p50,p99,p999} of SERIES and wait (s; s a token), {series}_{p50,p99,p999}_open: only known to be at
    least that; goodput_rps and those of MEANS (mean over seeds), attainment (pooled), attainment_n, wait_share (of E2E, mean
    over seeds), max_wait (s), max_wait_open, overtaking_max (the greatest of the seeds), preemptions_per_request, horizon (s),
    load_least and load_greatest (achieved by a seed's arrivals), num_after_arrivals (pooled) and after_arrivals_share (the
    greatest of the seeds; see metrics.py), marks, and CLOCKED: overhead_us, CPU of the whole loop per plan, microseconds. Reads
    requests.parquet."""
    table = paired(load_runs(list(cells)))
    extra = [_measured([cells[i] for i in index]) for index in table["cells"]]
    return pd.concat([table.drop(columns="cells"), pd.DataFrame(extra)], axis=1)


def _measured(cells: Sequence[Cell]) -> dict[str, Any]:
    done = [cell for cell in cells if cell.status == OK]
    row: dict[str, Any] = {"num_requests": max(map(num_requests, done), default=0)}
    for key in (
        "num_counted",
        "num_unfinished",
        "num_rejected",
        "num_censored",
        "num_met",
        "attainment_n",
        "attainment_undecided",
        "num_after_arrivals",
    ):
        row[key] = int(sum(cell.metrics.get(key) or 0 for cell in done))
    row |= _pooled(done)
    for key in ("goodput_rps", *MEANS):
        row[key] = _over([cell.metrics.get(key) for cell in done], np.mean)
    row["attainment"] = row["num_met"] / row["attainment_n"] if row["attainment_n"] else np.nan
    row["wait_share"] = _over([cell.metrics.get("wait_share") for cell in done], np.mean)
    row["after_arrivals_share"] = _over([cell.metrics.get("after_arrivals_share") for cell in done], np.max)
    achieved = [_achieved_load(cell) for cell in done]
    row["load_least"], row["load_greatest"] = _over(achieved, np.min), _over(achieved, np.max)
    row["max_wait"] = _over([cell.metrics.get("max_wait") for cell in done], np.max)
    row["max_wait_open"] = any(str(((cell.summary or {}).get("flags") or {}).get("max_wait")).startswith(">=") for cell in done)
    row["overtaking_max"] = _over([cell.metrics.get("overtaking_max") for cell in done], np.max)
    preempted = [cell.metrics.get("preemptions") for cell in done]
    row["preemptions_per_request"] = _over(preempted, np.sum) / row["num_counted"] if row["num_counted"] else np.nan
    row["overhead_us"] = _over([_overhead_us(cell) for cell in done], np.mean)
    row["horizon"] = _over([((cell.summary or {}).get("window") or {}).get("horizon") for cell in done], np.mean)
    found = merge_marks(mark for cell in done for mark in marks(cell))
    if len({cell.fields.get("seed") for cell in done}) < len(done):
        found.append("several cells share this row and a seed: they differ in a field that has no column here")
    row["marks"] = "; ".join(found)
    return row


def _achieved_load(cell: Cell) -> float | None:
    """The load that the counted arrivals came to; None where it is not known."""
    load, rate, achieved = cell.fields.get("load"), cell.fields.get("rate"), cell.metrics.get("arrival_rps")
    return load * achieved / rate if load and rate and achieved else None


def _overhead_us(cell: Cell) -> float | None:
    """CPU microseconds of the loop per plan; None where it was not measured."""
    volatile = (cell.summary or {}).get("volatile") or {}
    cpu = volatile.get("simulate_cpu", volatile.get("host_seconds"))
    return None if cpu is None else 1e6 * cpu / max(num_plans(cell), 1)


def mark_kind(mark: str) -> str:
    """A mark without the share it may begin with: "3.1% of the busy time ..." -> "% of the busy time ..."."""
    return SHARE.sub("%", mark)


def merge_marks(marks: Iterable[str]) -> list[str]:
    """Marks of one kind as one, in order of appearance; shares become their range: "1.2 to 3.1% of the busy time ..."."""
    kinds: dict[str, list[str]] = {}
    for mark in marks:
        kinds.setdefault(mark_kind(mark), []).append(mark)
    merged = []
    for kind, found in kinds.items():
        shares = sorted({float(share) for mark in found if (match := SHARE.match(mark)) for share in match.groups() if share})
        merged.append(found[0] if len(shares) < 2 else f"{shares[0]:g} to {shares[-1]:g}{kind}")
    return merged


def _pooled(cells: Sequence[Cell]) -> dict[str, Any]:
    """Mean, P50, P99, P99.9 over the counted requests of all cells; no mean where one has not ended."""
    parts: dict[str, list[Sample]] = {name: [] for name in POOLED}
    for cell in cells:
        requests = read_requests(cell.folder, COLUMNS)
        counted = requests[window_of(cell).counts(requests["arrival"].to_numpy())]
        found = samples(counted, run_end(cell))
        for name, part in parts.items():
            part.append(found[name])
    row: dict[str, Any] = {}
    for name, part in parts.items():
        values = np.concatenate([sample.values for sample in part]) if part else np.empty(0)
        is_open = np.concatenate([sample.open for sample in part]) if part else np.empty(0, dtype=np.bool_)
        row[f"{name}_mean"] = float(values.mean()) if values.size and not is_open.any() else np.nan
        for label in PERCENTILES:
            found_quantile = quantile(values, label, is_open)
            row[f"{name}_{label}"] = np.nan if found_quantile.value is None else found_quantile.value
            row[f"{name}_{label}_open"] = found_quantile.lower_bound
    return row


def _over(values: Sequence[float | None], join: Callable[[Any], Any]) -> float:
    """`join` of the values; NaN where there is none, or one is missing."""
    known = [value for value in values if value is not None]
    return float(join(known)) if known and len(known) == len(values) else np.nan


def _against(schedule: Key, groups: Mapping[Key, pd.DataFrame]) -> dict[str, Any]:
    """The paired difference and ratio to FCFS, the share of the gap between FCFS and the same policy with the oracle, and the
    regret to that oracle."""
    names = ("difference", "ratio", "gap_closed", "regret")
    row: dict[str, Any] = {f"{name}{end}": np.nan for name in names for end in ("", "_low", "_high")}
    row |= {"difference_seeds": 0, "gap_note": ""}
    oracle = _closest(schedule, [other for other in groups if other[0] == schedule[0] and other[1] == "oracle"])
    if oracle is not None and schedule[1] not in ("oracle", "none"):
        regret = paired_over_seeds(_log(_scores(groups[schedule])), _log(_scores(groups[oracle])))
        for end, x in (("", regret.mean), ("_low", regret.low), ("_high", regret.high)):
            row[f"regret{end}"] = np.nan if x is None else math.expm1(x)
    base = _closest(schedule, [other for other in groups if other[0] == "fcfs"])
    if base is None:
        return row | {"gap_note": "no FCFS"}
    if base == schedule:
        return row
    fcfs, own = _scores(groups[base]), _scores(groups[schedule])
    difference, ratio = paired_over_seeds(own, fcfs), paired_over_seeds(_log(own), _log(fcfs))
    row["difference_seeds"] = difference.n
    if difference.n == 0:
        return row | {"gap_note": "no common seed"}
    row |= {"difference": difference.mean, "difference_low": difference.low, "difference_high": difference.high}
    row |= {f"ratio{end}": _exp(x) for end, x in (("", ratio.mean), ("_low", ratio.low), ("_high", ratio.high))}
    if oracle is None:
        return row | {"gap_note": "no oracle"}
    gap = gap_closed(fcfs, own, _scores(groups[oracle]))
    if gap.share is None:
        return row | {"gap_note": "n/a"}
    return row | {"gap_closed": gap.share, "gap_closed_low": gap.low, "gap_closed_high": gap.high}


def _scores(group: pd.DataFrame) -> Scores:
    """Seed -> SCORE of the complete cells; NaN where the cell has none, so that the seed counts as missing."""
    done = group[group["status"] == OK]
    return dict(zip(done["seed"].astype(int), done[SCORE].astype(float), strict=True))


def _log(scores: Scores) -> Scores:
    return {seed: math.log(value) for seed, value in scores.items()}


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


def _closest(schedule: Key, others: Sequence[Key]) -> Key | None:
    """The one of `others` that shares most of the variant; the first of equals."""
    if not others:
        return None
    return max(others, key=lambda other: sum(a == b for a, b in zip(schedule[2:], other[2:], strict=True)))


def _variant(schedule: Key, schedules: Sequence[Key]) -> str:
    twins = [other for other in schedules if other[:2] == schedule[:2]]
    telling = [i for i in range(2, len(schedule)) if len({other[i] for other in twins}) > 1]
    return " ".join(str(schedule[i]) for i in telling)


def _setting_names(settings: Sequence[Key]) -> dict[Key, str]:
    """Setting -> "(a) poisson, seqs256": the fields that tell settings apart, lettered in order of appearance."""
    keys = list(dict.fromkeys(settings))
    telling = [i for i, _ in enumerate(SETTING) if len({key[i] for key in keys}) > 1]
    if not telling:
        telling = [i for i, field in enumerate(SETTING) if field in ("workload", "arrivals", "limits")]
    at = SETTING.index("setting")
    if len({key[at] for key in keys} - {None}) == len(keys):
        telling = [at]  # a named setting says it all
    simulated = {SETTING.index("executor"): "simulated"}  # a cell of no engine does not say so
    names = [", ".join(str(word) for i in telling if (word := key[i] or simulated.get(i)) is not None) for key in keys]
    return {key: f"({chr(97 + k % 26)}) {name}" for k, (key, name) in enumerate(zip(keys, names, strict=True))}


def _is_oracle(group: pd.DataFrame) -> bool:
    if (group["policy"] == "fcfs").all():  # reads no prediction, whatever it is given
        return False
    named = group["predictor"].astype(str).str.contains("oracle").any()
    return bool(named or ("is_oracle" in group and group["is_oracle"].eq(True).any()))


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
