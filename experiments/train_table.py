"""One table of many training reports: a row per predictor and workload, baselines once each; and who predicts whose answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lengthwise.predictors.splits import SPLITS

from .train_report import number, reached_of

FILE = "report.json"
SCORES = ("kendall_tau", "spearman", "mae", "r2_log", "pinball", "crps", "top_decile_recall")
COVERED = ("50", "80", "95")


def read_reports(folder: Path | str) -> list[dict[str, Any]]:
    """Every report.json in or below `folder`, in order of path. Raises ValueError when there is none."""
    place = Path(folder).expanduser()
    files = sorted(place.rglob(FILE)) if place.is_dir() else []
    if not files:
        raise ValueError(f"no {FILE} in {place}: `lengthwise train` writes them")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def frame_of(reports: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per trained predictor and workload, then one per baseline of the workload that was not trained itself.

    Columns: predictor, workload, unit, kind (trained | baseline | ceiling), label_samples, num_rows, num_censored, SCORES as
    means over the named splits, kendall_tau_SPLIT, coverage_50/80/95; of the trained ones single_ms, single_p99_ms, batch_ms,
    batch_p99_ms (of one batch of batch_size), fit_s, artefact_bytes, artefact; where it was simulated (regret.py) e2e_P (s)
    and gap_closed_P, P being sjf and srpt, of the constant and the oracle too; where there is a re-sample ceiling, reached: the
    share of its tau.
    """
    rows = [
        _row(report, name_of(report), "trained", report["metrics"]) | _costs(report) | _regret(report, "predictor")
        for report in reports
    ]
    for workload in dict.fromkeys(map(rows_of, reports)):
        mine = [report for report in reports if rows_of(report) == workload]
        have = {name_of(report) for report in mine}
        for report in mine:
            for name, scores in report["baselines"].items():
                if name not in have and "skipped" not in scores:
                    have.add(name)
                    rows.append(_row(report, name, "baseline", scores) | _regret(report, name))
        ceiling = mine[0]["resample_ceiling"]["kendall_tau"]
        for row in rows:
            if row["workload"] == workload and (share := reached_of(row["kendall_tau"], ceiling)) is not None:
                row["reached"] = share
        if ceiling is not None:
            rows.append(_row(mine[0], "another answer", "ceiling", {"kendall_tau": ceiling}))
    return pd.DataFrame(rows)


def transfers_of(reports: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per predictor x workload it learned from x workload it was scored on, its own included: SCORES, coverages, mark
    (another unit), skipped (why there is no score). Empty where nothing was scored elsewhere."""
    rows = []
    for report in reports:
        if not report.get("transfer"):
            continue
        own = {"predictor": name_of(report), "learned_on": rows_of(report)}
        rows.append({**own, "scored_on": rows_of(report), "mark": "", "skipped": "", **_scores(report["metrics"])})
        for name, found in report["transfer"].items():
            notes = {"mark": found["mark"] or "", "skipped": found.get("skipped") or ""}
            rows.append({**own, "scored_on": name, **notes, **_scores(found)})
    return pd.DataFrame(rows)


def name_of(report: Mapping[str, Any]) -> str:
    """What was trained, as it was asked for."""
    return str(report.get("label") or report["predictor"])


def rows_of(report: Mapping[str, Any]) -> str:
    """The workload it was trained on, as it was asked for."""
    return str(report.get("rows_label") or report["workload"])


def _row(report: Mapping[str, Any], name: str, kind: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    split = scores.get("kendall_tau_by_split") or {}
    return {
        "predictor": name, "workload": rows_of(report), "unit": report["unit"], "kind": kind,
        "label_samples": report.get("label_samples") or np.nan, "num_rows": report["num_rows"],
        "num_censored": report["num_censored"], **_scores(scores),
        **{f"kendall_tau_{name}": _float(split.get(name)) for name in SPLITS},
    }  # fmt: skip


def _scores(scores: Mapping[str, Any]) -> dict[str, float]:
    covered = scores.get("coverage") or {}
    own = {key: _float(scores.get(key)) for key in SCORES}
    return own | {f"coverage_{level}": _float(covered.get(level)) for level in COVERED}


def _costs(report: Mapping[str, Any]) -> dict[str, Any]:
    volatile, cost = report["volatile"], report["volatile"]["latency"]
    keys = ("single", "single_p99", "batch", "batch_p99")
    return {
        **{f"{key}_ms": 1e3 * cost[key] for key in keys}, "batch_size": cost["batch_size"],
        "fit_s": volatile["fit_s"]["artefact"], "artefact_bytes": volatile.get("artefact_bytes"),
        "artefact": report.get("artefact"),
    }  # fmt: skip


def _regret(report: Mapping[str, Any], arm: str) -> dict[str, float]:
    found = report["volatile"].get("regret")
    out: dict[str, float] = {}
    for policy, arms in (found["policies"] if found else {}).items():
        own = arms.get(arm, {})
        out |= {f"e2e_{policy}": _float(own.get("e2e_mean")), f"gap_closed_{policy}": _float(own.get("gap_closed"))}
        if arm == "oracle":
            out[f"gap_closed_{policy}"] = 1.0
    return out


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)


def text_of(frame: pd.DataFrame, transfers: pd.DataFrame) -> str:
    """Both as text: a block a workload, then a matrix of tau-b a predictor."""
    heads = {
        "kendall_tau": "tau-b", "spread": "+-", "spearman": "Spearman", "mae": "MAE", "r2_log": "R2 log", "crps": "CRPS",
        "top_decile_recall": "top 10 %", "coverage_50": "in 50 %", "coverage_80": "80 %", "coverage_95": "95 %",
        "single_p99_ms": "ms p99", "batch_p99_ms": "of 64", "fit_s": "fit s", "kilobytes": "kB",
    }  # fmt: skip
    more = {"reached": "reached", "gap_closed_sjf": "SJF gap", "gap_closed_srpt": "SRPT gap"}
    heads |= {key: text for key, text in more.items() if key in frame}
    splits = frame[[f"kendall_tau_{name}" for name in SPLITS]]
    frame = frame.assign(spread=splits.max(axis=1) - splits.min(axis=1), kilobytes=frame["artefact_bytes"] / 1000)
    width = max(15, *(len(name) + 1 for name in frame["predictor"]))
    lines: list[str] = []
    for workload, block in frame.groupby("workload", sort=False):
        first = block.iloc[0]
        head = f"{workload}: {first['num_rows']} rows, {first['num_censored']} censored (not scored), in {first['unit']}"
        lines += ["", head, f"{'predictor':<{width}}" + "".join(f"{text:>9}" for text in heads.values())]
        for row in block.to_dict("records"):
            lines.append(f"{row['predictor']:<{width}}" + "".join(f"{number(row[key]):>9}" for key in heads))
    if len(transfers):
        lines += _matrices(transfers)
    return "\n".join(lines[1:])


def _matrices(transfers: pd.DataFrame) -> list[str]:
    lines: list[str] = []
    for predictor, block in transfers.groupby("predictor", sort=False):
        there = {name: str(k) for k, name in enumerate(dict.fromkeys(block["scored_on"]), 1)}
        width = max(15, *(len(name) + 5 for name in there))
        lines += ["", f"tau-b of {predictor}, learned on (down), scored on (across)"]
        lines.append(" " * width + "".join(f"{k:>9}" for k in there.values()))
        for here, row in block.groupby("learned_on", sort=False):
            found = row.to_dict("records")
            cells = {one["scored_on"]: number(one["kendall_tau"]) + "*" * bool(one["mark"]) for one in found}
            head = f"{there.get(str(here), '-'):>3} {here}"
            lines.append(f"{head:<{width}}" + "".join(f"{cells.get(name, '-'):>9}" for name in there))
        if (block["mark"] != "").any():
            lines.append("* lengths of another unit than those it learned: an order, no error")
        notes = block[block["skipped"] != ""].to_dict("records")
        lines += [f"{one['learned_on']} on {one['scored_on']}: {one['skipped']}" for one in notes]
    return lines
