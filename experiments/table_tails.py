"""The second page of a long table: of the same schedules the far tails, who waited, who was passed, and what it cost."""

from __future__ import annotations

from typing import Any

import pandas as pd

from .table import Form, Row, interval, names_of, number, percent

MOST = 20  # rows of a block on a terminal; files have them all


def by_mean(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `compare`, in each setting and load by mean E2E, the least first; those without one last."""
    places = frame[["setting_name", "load"]].astype(str).agg(" ".join, axis=1)
    order = dict(zip(dict.fromkeys(places), range(len(places)), strict=False))
    at = frame.assign(place=places.map(order))
    return at.sort_values(["place", "e2e_mean"], kind="stable", na_position="last").drop(columns="place").reset_index(drop=True)


def render(row: Any, note: str = "") -> Row:
    """The cells of one row of `compare`, by group."""

    def tail(name: str, scale: float = 1.0) -> str:
        return (">" if row[f"{name}_open"] else "") + number(scale * row[name])

    return [
        names_of(row, note),
        [tail("e2e_p999")],
        [tail("ttft_p999")],
        [tail("normalised_latency_p999", 1e3)],
        [tail("wait_p99"), tail("wait_p999"), (">" if row["max_wait_open"] else "") + number(row["max_wait"])],
        [number(row["overtaking_max"])],
        [number(row[f"slowdown_{part}"]) for part in ("mean", "d1_mean", "d10_mean")],
        ["-" if pd.isna(row["jain"]) else f"{row['jain']:.3f}"],
        [number(1000 * row["preemptions_per_request"]), number(100 * row["recompute_tax"])],
        [number(100 * row["kv_use_mean"])],
        [interval([100 * row[f"regret{end}"] for end in ("", "_low", "_high")], percent) or "-"],
        [number(row["overhead_us"])],
    ]


TAILS = Form(
    (
        ("", ("policy", "predictor")),
        ("E2E (s)", ("P99.9",)),
        ("TTFT (s)", ("P99.9",)),
        ("E2E / token (ms)", ("P99.9",)),
        ("wait (s)", ("P99", "P99.9", "max")),
        ("passed by", ("max",)),
        ("slowdown", ("mean", "d1", "d10")),
        ("Jain", ("",)),
        ("preempted", ("/1000", "tax %")),
        ("KV", ("(%)",)),
        ("regret (%)", ("",)),
        ("plan", ("(us)",)),
    ),
    render,
    (
        "P99.9: of the pooled requests of all seeds, 20,000 or more; wait: until first scheduled; passed by: starts of later "
        "arrivals while one request waited, the most of any.",
        "slowdown: E2E over E2E alone on an idle engine, of all, of the tenth with the shortest answers (d1) and of that with "
        "the longest (d10); Jain: of the clients' mean speeds, 1: all are served alike.",
        "preempted: preemptions per 1,000 requests, and KV tokens thrown away of all computed (tax); KV: blocks held, mean.",
        "regret: mean E2E over that of the same policy with the oracle, less 1, paired by seed, 95 % interval.",
        "plan: CPU of the whole loop per plan, with the simulator's own work (FCFS tells how much); measured by a clock.",
    ),
)
