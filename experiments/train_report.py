"""The training report's parts: means over splits, what the labels are, the re-sample ceiling, and the printed table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.predictors.scores import kendall_tau
from lengthwise.predictors.splits import SPLITS

from . import regret
from .dataset import Dataset

MIN_ROWS = 100  # fewer rows make splits, or a ceiling, that say nothing


def summarise(by_split: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Means over splits of every score, the values of each split beside them; None where any split has none."""
    first = next(iter(by_split.values()))
    out: dict[str, Any] = {}
    for key, value in first.items():
        if key == "bands":
            out["bands"] = [_mean_rows([split["bands"][i] for split in by_split.values()]) for i in range(len(value))]
        elif isinstance(value, Mapping) and all(isinstance(split[key], Mapping) for split in by_split.values()):
            out[key] = {k: float(np.mean([split[key][k] for split in by_split.values()])) for k in value}
        elif key in ("n", "num_censored"):
            out[f"{key}_by_split"] = {name: split[key] for name, split in by_split.items()}
        else:
            values = {name: split[key] for name, split in by_split.items()}
            out[key] = None if None in values.values() else float(np.mean(list(values.values())))
            out[f"{key}_by_split"] = values
    return out


def _mean_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out = {"from": rows[0]["from"], "to": rows[0]["to"], "share": float(np.mean([r["share"] for r in rows]))}
    out |= {key: sum(r[key] for r in rows) for key in ("n", "num_censored")}
    for key in ("mae", "bias"):
        known = [r for r in rows if r[key] is not None]
        out[key] = float(np.average([r[key] for r in known], weights=[r["n"] for r in known])) if known else None
    return out


def label_shares(lengths: NDArray[Any], cut: NDArray[Any]) -> dict[str, Any]:
    """What the labels are: quantiles, share censored, share of long ones. None are capped or dropped for their length."""
    y = np.asarray(lengths, dtype=np.float64)
    return {
        "mean": float(y.mean()), "p50": float(np.median(y)), "p90": float(np.quantile(y, 0.9)),
        "p99": float(np.quantile(y, 0.99)), "max": int(y.max()), "share_censored": float(np.mean(cut)),
        "share_512_and_longer": float(np.mean(y >= 512)), "share_1024_and_longer": float(np.mean(y >= 1024)),
        "num_capped_for_training": 0,
    }  # fmt: skip


def resample_ceiling(dataset: Dataset, cut: NDArray[Any]) -> dict[str, Any]:
    """Kendall's tau-b of one answer's length with the mean of the other answers to the same prompt: what no predictor beats.

    Needs `samples`, or a column `prompt_id` with several rows a prompt (uncensored); otherwise the value is None, and the
    reason is given. Of a sample that was cut off, the length that it had reached counts.
    """
    if dataset.samples is not None and dataset.samples.shape[1] > 1:
        keep = np.flatnonzero(~cut)
        if len(keep) < MIN_ROWS:
            return {"kendall_tau": None, "reason": f"only {len(keep)} rows are not censored, {MIN_ROWS} are needed"}
        y, num_others = dataset.output_len[keep].astype(np.float64), dataset.samples.shape[1] - 1
        others = (dataset.samples[keep].sum(axis=1) - y) / num_others  # y is one of them
        return {"kendall_tau": kendall_tau(others, y), "n": len(keep), "prompts": len(keep)}
    ids = dataset.columns.get("prompt_id")
    if ids is None:
        return {"kendall_tau": None, "reason": "the workload has one answer a prompt (no column prompt_id)"}
    keep = np.flatnonzero(~cut)
    _, at = np.unique(np.asarray(ids)[keep], return_inverse=True)
    y = dataset.output_len[keep].astype(np.float64)
    size, total = np.bincount(at), np.bincount(at, weights=y)
    many = np.flatnonzero(size[at] > 1)
    if len(many) < MIN_ROWS:
        return {"kendall_tau": None, "reason": f"only {len(many)} rows share their prompt with another, {MIN_ROWS} are needed"}
    others = (total[at[many]] - y[many]) / (size[at[many]] - 1)
    return {"kendall_tau": kendall_tau(others, y[many]), "n": len(many), "prompts": int(np.count_nonzero(size > 1))}


def reached_of(tau: float | None, ceiling: float | None) -> float | None:
    """The share of the ceiling's tau-b that a predictor reaches; None where either is unknown or the ceiling orders nothing."""
    return tau / ceiling if tau is not None and ceiling is not None and ceiling > 0 else None


def table(report: Mapping[str, Any]) -> str:
    """The report as text: one row a predictor, then error by length band."""
    columns = ("kendall_tau", "spearman", "mae", "r2_log", "crps", "top_decile_recall")
    splits = [f"split {name}" for name in SPLITS]
    heads = ("tau-b", *splits, "Spearman", "MAE", "R2 log", "CRPS", "top 10%", "in 50%", "80%", "95%")
    learned = report.get("label_samples")
    lines = [
        f"{report['predictor']} on {report['workload']}: {report['num_rows']} rows, {report['num_groups']} groups, "
        f"{report['num_censored']} censored (not scored), lengths in {report['unit']}",
        *([f"learned from the median of {learned} answers to each prompt, scored on another one"] if learned else []),
        "", f"{'predictor':<15}" + "".join(f"{h:>9}" for h in heads),
    ]  # fmt: skip
    for name, row in [(report["predictor"], report["metrics"]), *report["baselines"].items()]:
        if "skipped" in row:
            lines.append(f"{name:<15}  left out: {row['skipped']}")
            continue
        first, *rest = [row[c] for c in columns]
        covered = [row["coverage"][level] if row["coverage"] else None for level in ("50", "80", "95")]
        cells = [first, *row["kendall_tau_by_split"].values(), *rest, *covered]
        lines.append(f"{name:<15}" + "".join(f"{number(c):>9}" for c in cells))
    if said := report["metrics"]["reliability"]:
        shown = [level for level in said if level in ("0.05", "0.1", "0.25", "0.5", "0.75", "0.9", "0.95")]
        lines += ["", f"{'quantile':<15}" + "".join(f"{level:>9}" for level in shown)]
        lines.append(f"{'answers below':<15}" + "".join(f"{number(said[level]):>9}" for level in shown))
    lines += ["", f"{'answer tokens':<15}{'share':>10}{'censored':>10}{'MAE':>10}{'bias':>10}"]
    for band in report["metrics"]["bands"]:
        label = f"{band['from']}+" if band["to"] is None else f"{band['from']}-{band['to']}"
        cells = [band["share"], band["num_censored"], band["mae"], band["bias"]]
        lines.append(f"{label:<15}" + "".join(f"{number(c):>10}" for c in cells))
    if held := report.get("held_out"):
        lines += ["", f"held out by split {report['split']}: {held['n']} rows, tau-b {number(held['kendall_tau'])}, "
                  f"MAE {number(held['mae'])}"]  # fmt: skip
    if found := report["volatile"].get("regret"):
        lines += ["", *regret.lines(found, report["predictor"], number)]
    ceiling = report["resample_ceiling"]
    known = ceiling["kendall_tau"]
    reached = reached_of(report["metrics"]["kendall_tau"], known)
    share = "" if reached is None else f", of which {report['predictor']} reaches {reached:.0%}"
    lines += ["", "re-sample ceiling: " + (f"unknown, {ceiling['reason']}" if known is None else f"tau-b {known:.3f}{share}")]
    if report["dropped"]:
        lines.append("rows left out by the loader: " + ", ".join(f"{k} {v}" for k, v in report["dropped"].items()))
    volatile = report["volatile"]
    cost, size = volatile["latency"], volatile.get("artefact_bytes")
    lines.append(
        f"one prediction takes {1e3 * cost['single']:.2f} ms (p99 {1e3 * cost['single_p99']:.2f}), "
        f"{cost['batch_size']} at once {1e3 * cost['batch']:.2f} ms (p99 {1e3 * cost['batch_p99']:.2f}); "
        f"fit {volatile['fit_s']['artefact']:.1f} s" + ("" if size is None else f", {size / 1000:.1f} kB")
    )
    return "\n".join(lines)


def number(value: float | int | None) -> str:
    """A number of a printed table; "-" for none."""
    if value is None or value != value:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
