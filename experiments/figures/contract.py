"""What every figure must do, and made-up results to try it on: for our tests and for figures from outside.

`canned_study` writes a small study in the format of a real one; its numbers are invented and say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..paths import MANIFEST

SETTINGS = (("poisson", "seqs256"), ("gamma", "seqs64"))
SCHEDULES = (
    ("fcfs", "none"),
    *(("sjf", predictor) for predictor in ("constant", "prompt_length", "gbdt", "oracle")),
    *(("srpt", predictor) for predictor in ("constant", "prompt_length", "gbdt", "oracle")),
)
CONFIG = """\
policy: {_target_: x}
kv: {_target_: lengthwise.sched.kv.Paged, _partial_: true, block_size: 16}
limits: {token_budget: 2048}
hardware:
  _target_: lengthwise.engine.simulated.hardware.Hardware
  name: invented
  model: none
  memory: 1.0e+9
  weights: 0
  activations: 0
  kv_bytes_per_token: 1
  cost: {_target_: lengthwise.engine.simulated.affine.Affine, base: 0.01, per_row: 0, per_context: 0, per_prefill: 0}
  provenance: {validated: made-up numbers}
"""
NUM_BLOCKS, NUM_STEPS = 1000, 40
SKILL = {"none": 0.0, "constant": 0.0, "prompt_length": 0.15, "gbdt": 0.6, "oracle": 1.0}


def canned_study(
    folder: Path,
    *,
    num_requests: int = 60,
    loads: Sequence[float] = (0.8, 0.95, 1.2),
    seeds: Sequence[int] = (0, 1, 2),
    settings: Sequence[tuple[str, str]] = SETTINGS,
    schedules: Sequence[tuple[str, str]] = SCHEDULES,
) -> list[dict[str, Any]]:
    """Write an invented study under `folder` and return its manifest rows. Same arguments, same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for k, (arrivals, limits) in enumerate(settings):
        for load in loads:
            for policy, predictor in schedules:
                for seed in seeds:
                    fields = {
                        "system": "vllm_like", "policy": policy, "predictor": predictor, "workload": "sharegpt",
                        "arrivals": arrivals, "limits": limits, "load": load, "rate": load * (20.0 - 8.0 * k), "seed": seed,
                        "num_requests": num_requests,
                    }  # fmt: skip
                    gain = 0.01 if k == 0 else 0.75
                    name = f"{arrivals}-{limits}-{policy}-{predictor}-{load:g}-{seed}"
                    code = f"{len(rows):012x}"
                    rows.append({"cell": name, "hash": code, "status": "ok", "folder": name, "fields": fields})
                    _write_cell(folder / name, fields, code, gain, num_requests)
    (folder / MANIFEST).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def canned_capacity(folder: Path) -> None:
    """Write invented capacities under `folder`: three schedules of one setting and two SLO classes, one of them without an
    upper end, one where no rate held, one not searched."""
    for k, (policy, predictor, slo, kind) in enumerate(
        (
            ("fcfs", "none", "chat", "between"), ("srpt", "gbdt", "chat", "between"), ("srpt", "oracle", "chat", "at_least"),
            ("fcfs", "none", "code", "none"), ("srpt", "oracle", "code", "between"),
        )
    ):  # fmt: skip
        rate = 0.0 if kind == "none" else 10.0 + k
        cell: dict[str, Any] = {
            "system": "vllm_like",
            "policy": policy,
            "predictor": predictor,
            "workload": "sharegpt",
            "arrivals": "poisson",
        }
        cell |= {"hardware": "invented", "limits": "seqs64", "slo": slo, "num_requests": 60, "preemption": "pause"}
        answer = {
            "rate": rate, "lo": rate, "hi": None if kind == "at_least" else rate + 0.5, "kind": kind, "tolerance": 0.05,
            "target": 0.9, "gpus": 1, "seeds": [0, 1], "probes": [{"rate": rate, "attainment": 0.93}], "cell": cell,
            "cost": {}, "fleet": None, "marks": [], "provenance": {"search_hash": f"{k:012x}", "marks": []},
        }  # fmt: skip
        (folder / f"capacity-{k}").mkdir(parents=True, exist_ok=True)
        (folder / f"capacity-{k}" / "capacity.json").write_text(json.dumps(answer, indent=1))


def check_figure(draw: Callable[..., pd.DataFrame], frame: pd.DataFrame) -> pd.DataFrame:
    """Draw `frame` twice on blank pages. Asserts that the frame is untouched, the table is not empty and is the same twice,
    and that something was drawn. Returns the table."""
    before = frame.copy(deep=True)
    tables = []
    for _ in range(2):
        figure = Figure()
        ax = figure.subplots()
        tables.append(draw(frame, ax))
        artists = [child for axes in [ax, *ax.child_axes] for child in (*axes.lines, *axes.collections, *axes.patches)]
        assert artists, "nothing was drawn"
    pd.testing.assert_frame_equal(frame, before)
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert len(tables[0]), "the plotted table is empty"
    return tables[0]


def _write_cell(folder: Path, fields: dict[str, Any], code: str, gain: float, n: int) -> None:
    rng = np.random.default_rng([fields["seed"], int(100 * fields["load"])])
    arrival = np.cumsum(rng.exponential(1 / fields["rate"], n))
    prompt_len = rng.integers(10, 900, n)
    output_len = np.minimum(rng.geometric(1 / 230, n) + 1, 2048)
    wait = rng.exponential(8.0 * fields["load"], n) + 2.0
    luck = np.random.default_rng([fields["seed"], int(code, 16)]).normal(0, 0.03)  # what no pairing removes
    wait *= 1 - gain * SKILL[fields["predictor"]] * (1.1 if fields["policy"] == "srpt" else 1.0) + luck
    first_scheduled = arrival + np.maximum(wait, 0.0)
    first_token = first_scheduled + 0.05
    finish = first_token + 0.012 * (output_len - 1)
    nothing = np.zeros(n, dtype=np.int64)
    requests = pd.DataFrame(
        {
            "rid": np.arange(n), "row": np.arange(n), "arrival": arrival, "eligible": arrival,
            "first_scheduled": first_scheduled, "first_token": first_token, "finish": finish, "prompt_len": prompt_len,
            "output_len": output_len, "max_new_tokens": 2048, "predicted": 230.0, "num_preemptions": nothing,
            "recomputed": nothing, "status": "finished", "reason": "stop", "client": 0, "priority": 0, "group": np.arange(n),
            "fold": np.arange(n) % 5, "censored": False, "ended": finish,
        }
    )  # fmt: skip
    series = {
        "ttft": first_token - arrival, "tpot": np.full(n, 0.012), "e2e": finish - arrival, "wait": wait,
        "normalised_latency": (finish - arrival) / output_len,
    }  # fmt: skip
    metrics: dict[str, Any] = {}
    for key, values in series.items():
        metrics |= {f"{key}_mean": float(values.mean()), f"{key}_p50": float(np.median(values))}
        metrics |= {f"{key}_p99": float(np.quantile(values, 0.99)), f"{key}_p999": None}
    met = series["ttft"] < 10
    metrics |= {
        "max_wait": float(wait.max()), "goodput_rps": float(met.sum() / finish.max()), "attainment": float(met.mean()),
        "requests_per_s": float(n / finish.max()), "num_finished": n, "num_rejected": 0, "num_unfinished": 0,
        "num_counted": n, "num_censored": 0, "num_met": int(met.sum()), "attainment_n": n,
    }  # fmt: skip
    summary = {
        "cell": fields,
        "metrics": metrics,
        "flags": {},
        "window": {"begin": None, "end": None, "whole": True, "horizon": n / fields["rate"], "run_end": float(finish.max())},
        "slo": {"ttft": 10.0},
        "volatile": {"wall": 0.1},
        "provenance": {
            "config_hash": code, "seed": fields["seed"], "marks": ["overload"] if fields["load"] >= 1 else [],
            "hardware": {"name": "invented", "form": "none", "held_out_error": None, "validated": "made-up numbers"},
            "kv_pool_tokens": 16 * NUM_BLOCKS,
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    requests.to_parquet(folder / "requests.parquet", index=False)
    _steps(arrival, first_scheduled, finish).to_parquet(folder / "steps.parquet", index=False)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    (folder / ".hydra").mkdir(exist_ok=True)
    (folder / ".hydra" / "config.yaml").write_text(CONFIG)


def _steps(arrival: np.ndarray, first_scheduled: np.ndarray, finish: np.ndarray) -> pd.DataFrame:
    """NUM_STEPS plans back to back, with who waits and who runs at the end of each."""
    ends = np.linspace(0.0, finish.max(), NUM_STEPS + 1)[1:]
    arrived, started, ended = (
        np.searchsorted(np.sort(times), ends, side="right") for times in (arrival, first_scheduled, finish)
    )
    return pd.DataFrame(
        {
            "start": np.concatenate(([0.0], ends[:-1])), "end": ends, "num_steps": 1, "num_waiting": arrived - started,
            "num_running": started - ended, "kv_free_blocks": NUM_BLOCKS - 10 * (started - ended),
        }
    )  # fmt: skip
