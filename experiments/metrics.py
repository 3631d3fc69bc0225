"""Metrics: every number a run is judged by, defined once. Units: seconds and tokens.

Latencies start at the scheduled time (arrival). A request that was still there when the run stopped, failed or timed out has
not ended: its latencies are lower bounds, percentiles that rest on one are marked ">=", and no mean is shown over the rest.
Rejected requests and those a client aborted have no latency; they are counted.

ttft            first generated token - arrival
itl             gaps between successive tokens of a request, token-weighted, without the first (see recorder.py)
tpot            (last - first token) / (n - 1) per request; undefined for n <= 1, left out and counted
e2e             last token - arrival;  normalised_latency = e2e / n;  wait = first scheduled - arrival (queueing time)
slowdown        e2e / e2e alone on an idle engine, from the cost model;  slowdown_d1_mean .. slowdown_d10_mean: by decile of the
                output length, d1 the shortest tenth (lengths that are equal stay together)
wait_share      waiting before first scheduled / e2e, both summed: the head-of-line waiting share
goodput_rps     requests per second that meet every SLO they have
attainment      met / (finished + failed + timed out + rejected + cut-off ones that have already missed an SLO)
arrival_rps     1 / mean gap between the arrivals counted, arrival_cv their coefficient of variation: what was achieved
num_after_arrivals  requests counted that ended after the last arrival of the run, after_arrivals_share their share of all E2E:
                below load 1 they were spared whom they would have met had requests gone on coming, so they ended too soon
busy_share      time with a step running;  kv_use_mean: KV blocks held (before finishes free theirs), averaged over time, for
                each plan those at its end: up to about 1 % more than step by step
recompute_tax   KV tokens thrown away by preemption / all tokens computed, over the whole run
num_thrashed    requests preempted more than three times, over the whole run;  futile_preemptions: of a request that had not got
                a token since it was preempted before, so that it came back for nothing
jain            Jain's index over clients of their mean speed, 1 / slowdown (n / e2e without a cost model)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from .histogram import Histogram
from .latencies import OPEN, Idle, Sample, is_status, samples, tokens_inside
from .starvation import Overtakes, by_decile, jain
from .statistics import QUANTILES, quantile
from .windows import Window

__all__ = ["LATENCIES", "OPEN", "SLOS", "Measured", "Sample", "judge", "measure", "samples"]

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

UNTOLD = "the server does not tell"
LATENCIES = ("ttft", "tpot", "e2e", "normalised_latency", "wait", "slowdown")
SLOS = ("ttft", "tpot", "e2e")


@dataclass
class Measured:
    """metrics: name -> number, or None where none may be shown. flags: name -> why there is none, or what marks it."""

    metrics: dict[str, float | int | None]
    flags: dict[str, str]

    def put(self, name: str, value: float | int | None, flag: str | None = None) -> None:
        if value is not None and not math.isfinite(value):
            value, flag = None, flag or "undefined"
        self.metrics[name] = value
        if flag is not None:
            self.flags[name] = flag


def judge(requests: pd.DataFrame, slo: Mapping[str, ArrayLike | None], run_end: float) -> dict[str, Floats]:
    """Per request (N,) and SLO of `slo` (ttft, tpot, e2e: s, scalar or (N,), NaN none): 1 met, 0 missed, NaN not applicable
    or undecided; `all`: 1 if every SLO that applies is met, 0 if one is missed, else NaN."""
    unknown = set(slo) - set(SLOS)
    if unknown:
        raise ValueError(f"SLO {sorted(unknown)}: choose of {', '.join(SLOS)}")
    size = len(requests)
    sample = samples(requests, run_end)
    failed = is_status(requests, "failed", "timeout", "rejected")
    finished, aborted = is_status(requests, "finished"), is_status(requests, "aborted")
    verdicts: dict[str, Floats] = {}
    for name in SLOS:
        if (asked := slo.get(name)) is None:
            continue
        limit = np.broadcast_to(np.asarray(asked, dtype=np.float64), (size,))
        verdict = np.full(size, math.nan)
        rows = sample[name].rows
        met = sample[name].values <= limit[rows]
        verdict[rows] = np.where(finished[rows], met, np.where(met, math.nan, 0.0))  # cut off: only a miss is decided
        verdict[failed] = 0.0
        verdict[np.isnan(limit) | aborted] = math.nan
        verdicts[name] = verdict
    every = np.full(size, math.nan)
    if verdicts:
        table = np.stack(list(verdicts.values()))
        missed, met = (table == 0).any(axis=0), (table == 1).any(axis=0)
        every[met] = 1.0  # NaN among finished ones: n/a, as TPOT with one token
        every[missed] = 0.0
    return {**verdicts, "all": every}


def measure(
    requests: pd.DataFrame,
    *,
    window: Window | None = None,
    run_end: float | None = None,
    slo: Mapping[str, ArrayLike | None] | None = None,
    idle: Idle | None = None,
    itl: Histogram | None = None,
    totals: Mapping[str, float] | None = None,
    run_totals: Mapping[str, float] | None = None,
    num_blocks: int = 0,
    passes: Overtakes | None = None,
    fallback: Mask | None = None,
) -> Measured:
    """All metrics of one run. `requests` has the columns of requests.parquet (N rows), of which `window` says what counts.

    totals, run_totals, itl: the recorder's, over the window and over the whole run. passes: overtaking, (N,). fallback (N,):
    predictions that fell back. slo: s, scalar or (N,). What cannot be known is None, with its flag.
    """
    window = window or Window()
    if run_end is None:
        ends = requests["finish"].to_numpy(np.float64)
        run_end = float(np.nanmax(ends)) if (~np.isnan(ends)).any() else 0.0
    inside = window.counts(requests["arrival"].to_numpy(np.float64))
    counted = requests[inside]
    seconds = window.duration(run_end)
    out = Measured({}, {})
    found = samples(counted, run_end, idle)
    _latencies(out, found, itl)
    _by_size(out, counted, found.get("slowdown"))
    _counts(out, counted, found, fallback if fallback is None else fallback[inside])
    _after_arrivals(out, counted, found["e2e"], float(requests["arrival"].max()) if len(requests) else math.inf)
    _throughput(out, requests, window, seconds, run_end, totals)
    _engine(out, requests, counted, seconds, totals, run_totals, num_blocks)
    _fairness(out, counted, found, passes, inside)
    limits = {
        k: np.broadcast_to(np.asarray(v, np.float64), (len(requests),))[inside] for k, v in (slo or {}).items() if v is not None
    }
    _goodput(out, counted, judge(counted, limits, run_end), seconds)
    return out


def put_sample(out: Measured, name: str, sample: Sample) -> None:
    """Put n, mean and percentiles of a latency; no mean where some have not ended. Mutates out."""
    n, num_open = len(sample.values), int(sample.open.sum())
    out.put(f"{name}_n", n)
    if num_open:
        out.put(f"{name}_mean", None, f"{num_open} of {n} have not ended")
    else:
        out.put(f"{name}_mean", float(sample.values.mean()) if n else None, None if n else "n=0")
    for label in QUANTILES:
        q = quantile(sample.values, label, sample.open)
        out.put(f"{name}_{label}", q.value, q.flag)


def _latencies(out: Measured, found: Mapping[str, Sample], itl: Histogram | None) -> None:
    for name in LATENCIES:
        sample = found.get(name)
        if sample is None:
            for key in ("mean", *QUANTILES):
                out.put(f"{name}_{key}", None, "no cost model to tell the latency on an idle engine")
            continue
        put_sample(out, name, sample)
    gaps = itl or Histogram()
    out.put("itl_n", gaps.n)
    out.put("itl_mean", gaps.mean if gaps.n else None, None if gaps.n else "no token gaps recorded")
    for label in QUANTILES:
        q = gaps.quantile(label)
        out.put(f"itl_{label}", q.value, q.flag)


def _by_size(out: Measured, counted: pd.DataFrame, slowdown: Sample | None) -> None:
    means: dict[int, float] = {}
    why = "no cost model to tell the latency on an idle engine"
    if slowdown is not None:
        num_open = int(slowdown.open.sum())
        why = f"{num_open} of {len(slowdown.open)} have not ended" if num_open else "no request of this decile"
        if not num_open:
            table = by_decile(slowdown.values, counted["output_len"].to_numpy(np.float64)[slowdown.rows])
            means = dict(zip(table["decile"].astype(int), table["mean"], strict=True))
    for decile in range(1, 11):
        mean = means.get(decile)
        out.put(f"slowdown_d{decile}_mean", None if mean is None else float(mean), why if mean is None else None)


def _counts(out: Measured, counted: pd.DataFrame, found: Mapping[str, Sample], fallback: Mask | None) -> None:
    out.put("num_counted", len(counted))
    for status in ("finished", "rejected", "unfinished", "failed", "timeout", "aborted"):
        out.put(f"num_{status}", int(is_status(counted, status).sum()))
    gaps = np.diff(np.sort(counted["arrival"].to_numpy(np.float64)))
    mean = float(gaps.mean()) if len(gaps) > 1 else 0.0
    few = None if mean > 0 else "fewer than 3 arrivals, or all at once"
    out.put("arrival_rps", None if few else 1.0 / mean, few)
    out.put("arrival_cv", None if few else float(gaps.std()) / mean, few)
    short = is_status(counted, "finished") & (counted["output_len"].to_numpy() <= 1)
    out.put("tpot_undefined", int(short.sum()))
    out.put("num_censored", int(counted["censored"].sum()) if "censored" in counted else 0)
    share = None if fallback is None else (float(fallback.mean()) if len(fallback) else 0.0)
    out.put("fallback_share", share, "no predictor, or none whose fallbacks are counted" if share is None else None)
    wait, e2e = found["wait"], found["e2e"]
    if len(wait.values):
        worst = int(wait.values.argmax())
        out.put("max_wait", float(wait.values[worst]), ">=: it has not been scheduled" if wait.open[worst] else None)
    else:
        out.put("max_wait", None, "n=0")
    if len(wait.values) < len(e2e.values):
        out.put("wait_share", None, UNTOLD)
    elif e2e.open.any():
        out.put("wait_share", None, f"{int(e2e.open.sum())} of {len(e2e.open)} have not ended")
    else:
        total = float(e2e.values.sum())
        out.put("wait_share", float(wait.values.sum()) / total if total else None, None if total else "n=0")


def _after_arrivals(out: Measured, counted: pd.DataFrame, e2e: Sample, last_arrival: float) -> None:
    late = counted["arrival"].to_numpy(np.float64)[e2e.rows] + e2e.values > last_arrival
    total = float(e2e.values.sum())
    out.put("num_after_arrivals", int(late.sum()))
    out.put("after_arrivals_share", float(e2e.values[late].sum()) / total if total else None, None if total else "n=0")


def _throughput(
    out: Measured, requests: pd.DataFrame, window: Window, seconds: float, run_end: float, totals: Mapping[str, float] | None
) -> None:
    names = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    if not seconds > 0:
        for name in names:
            out.put(name, None, "the run took no time")
        return

    def between(name: str) -> Mask:
        at = np.asarray(requests[name], dtype=np.float64)
        return (at >= window.begin) & (at < window.end)

    out.put(names[0], int(between("finish").sum()) / seconds)
    spaced = "tokens taken as evenly spaced: steps were not recorded" if totals is None else None
    if totals is None:
        tokens: float = tokens_inside(requests, window.begin, window.end, run_end)
    else:
        tokens = totals.get("output_tokens", 0.0)
    prompts = int(
        requests["prompt_len"].to_numpy(np.int64)[between("first_token")].sum()
    )  # each prompt once, however often computed
    out.put(names[1], tokens / seconds, spaced)
    out.put(names[2], (tokens + prompts) / seconds, spaced)


def _engine(
    out: Measured,
    requests: pd.DataFrame,
    counted: pd.DataFrame,
    seconds: float,
    totals: Mapping[str, float] | None,
    run_totals: Mapping[str, float] | None,
    num_blocks: int,
) -> None:
    inside = "num_preemptions" in counted  # else only answers were seen
    preemptions = int(counted["num_preemptions"].sum()) if inside else None
    out.put("preemptions", preemptions, None if inside else UNTOLD)
    rate = None if preemptions is None or not seconds > 0 else preemptions / seconds
    out.put("preemptions_per_s", rate, UNTOLD if not inside else None if seconds > 0 else "the run took no time")
    began = counted["first_scheduled" if inside else "first_token"].to_numpy(np.float64)
    prompts = counted["prompt_len"].to_numpy(np.int64)[~np.isnan(began)].sum()
    told = inside or "cached" in counted
    found = int(counted["cached"].sum()) if "cached" in counted else 0  # without a prefix cache nothing is
    out.put("prefix_hit_tokens", found if told else None, None if told else UNTOLD)
    out.put("prefix_hit_share", (found / int(prompts) if prompts else 0.0) if told else None, None if told else UNTOLD)
    if totals is None or run_totals is None or not seconds > 0:
        for name in ("busy_share", "kv_use_mean", "recompute_tax"):
            out.put(name, None, "steps were not recorded" if seconds > 0 else "the run took no time")
        return
    out.put("busy_share", totals.get("busy", 0.0) / seconds)
    blocks = totals.get("kv_held_block_seconds", 0.0) / seconds
    out.put("kv_use_mean", blocks / num_blocks if num_blocks else None, None if num_blocks else "no step ran")
    computed = run_totals.get("computed_tokens", 0.0)
    again = int(requests["recomputed"].sum())
    out.put("recompute_tax", again / computed if computed else 0.0)


def _fairness(
    out: Measured, counted: pd.DataFrame, found: Mapping[str, Sample], passes: Overtakes | None, inside: Mask
) -> None:
    if passes is None:
        out.put("overtaking_max", None, "not counted")
    else:
        out.put("overtaking_max", int(passes.count[inside].max(initial=0)))
        out.put("overtaking_max_lead", float(passes.lead[inside].max(initial=0.0)))
    over = None if passes is None or passes.over_bound is None else int((passes.over_bound[inside] > 0).sum())
    out.put("num_over_bound", over, "no overtaking bound declared" if over is None else None)
    sample = found.get("slowdown", found["normalised_latency"])
    if not len(sample.values):
        out.put("jain", None, "n=0")
        return
    clients = pd.Series(counted["client"].to_numpy()[sample.rows]).fillna("").astype(str)
    if clients.nunique() == 1:
        out.put("jain", 1.0)
        return
    speed = np.divide(1.0, sample.values, out=np.zeros(len(sample.values)), where=sample.values > 0)
    flag = f"{int(sample.open.sum())} have not ended" if sample.open.any() else None
    out.put("jain", jain(pd.Series(speed).groupby(clients.to_numpy()).mean().to_numpy()), flag)


def _goodput(out: Measured, counted: pd.DataFrame, verdicts: Mapping[str, Floats], seconds: float) -> None:
    none = "no SLO" if len(verdicts) == 1 else None
    every = verdicts["all"]
    met, decided = int((every == 1).sum()), int((~np.isnan(every)).sum())
    out.put("num_met", met)
    out.put("attainment_n", decided)  # the denominator
    cut_off = is_status(counted, "unfinished") & np.isnan(every)
    out.put("attainment_undecided", int(cut_off.sum()) if none is None else 0)
    tokens = int(counted["output_len"].to_numpy(np.int64)[every == 1].sum())
    rate = none or (None if seconds > 0 else "the run took no time")
    out.put("goodput_rps", None if rate else met / seconds, rate)
    out.put("goodput_tokens_per_s", None if rate else tokens / seconds, rate)
    out.put("attainment", None if none or not decided else met / decided, none or (None if decided else "n=0"))
    for name in SLOS:
        if name in verdicts:
            verdict = verdicts[name]
            asked = int((~np.isnan(verdict)).sum())
            out.put(f"attainment_{name}", float(np.nansum(verdict)) / asked if asked else None, None if asked else "n=0")
            out.put(f"attainment_{name}_n", asked)
