"""Probes: the cells of a capacity search, run, judged and told about, one rate at a time.

Every probe is an ordinary cell a seed, kept and found again like any other, so that a search that was stopped goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .criterion import Criterion, Verdict, judge
from .job import run_job
from .load_runs import read_requests
from .manifest import Row
from .paths import root
from .run import Run

Say = Callable[[str], None]


class SearchFailed(RuntimeError):
    """A probe has no result, so the search has none."""


class Probes:
    """Runs and judges the probes of one search. rows: what was found, in the order in which it was asked for."""

    def __init__(self, cell: Mapping[str, Any], seeds: Sequence[int], criterion: Criterion, say: Say, n_jobs: int = 1) -> None:
        self.cell, self.seeds, self.criterion = cell, tuple(seeds), criterion
        self.rows: list[dict[str, Any]] = []
        self.summaries: dict[float, list[dict[str, Any]]] = {}  # rate -> the summary of each seed
        self._say, self._n_jobs = say, n_jobs

    def passes(self, rate: float) -> bool:
        """Probe `rate` requests/s. Raises SearchFailed, naming the probe, when one of its cells has no result."""
        number, start = len(self.rows) + 1, time.perf_counter()
        told = f"search failed at probe {number}"
        jobs = self._run([{**self.cell, "rate": rate, "seed": seed} for seed in self.seeds])
        for seed, job in zip(self.seeds, jobs, strict=True):
            if job["status"] != "ok":
                kept = f" (traceback: {job['traceback']})" if job.get("traceback") else ""
                raise SearchFailed(f"{told}: {rate:g} requests/s, seed {seed}: {job.get('error', 'no result')}{kept}")
        folder = root(self.cell["out"]) / self.cell["name"]
        runs = [_read(folder / job["folder"]) for job in jobs]
        try:
            verdict = judge(runs, self.criterion)
        except ValueError as error:
            raise SearchFailed(f"{told}: {rate:g} requests/s: {error}") from error
        self.summaries[rate] = [run.summary for run in runs]
        self.rows.append(self._row(rate, verdict, jobs))
        took = "found" if all(job["cached"] for job in jobs) else f"{time.perf_counter() - start:.1f} s"
        self._say(_line(number, rate, verdict, took))
        return verdict.passes

    def at(self, rate: float) -> dict[str, Any] | None:
        """The row of that rate."""
        return next((row for row in self.rows if row["rate"] == rate), None)

    def contradictions(self) -> list[str]:
        """Pairs of probes that no edge explains: a rate that passes above one that fails."""
        failed = [row for row in self.rows if not row["passes"]]
        return [
            f"{good['rate']:g} requests/s passes, {bad['rate']:g} fails ({bad['reasons'][0]})"
            for good in self.rows if good["passes"]
            for bad in failed if bad["rate"] < good["rate"]
        ]  # fmt: skip

    def _run(self, cells: list[dict[str, Any]]) -> list[Row]:
        if self._n_jobs == 1 or len(cells) == 1:
            return [run_job(cell) for cell in cells]
        from joblib import Parallel, delayed, parallel_config

        with parallel_config("loky", n_jobs=self._n_jobs, inner_max_num_threads=1):
            rows: list[Row] = Parallel()(delayed(run_job)(cell) for cell in cells)
        return rows

    def _row(self, rate: float, verdict: Verdict, jobs: Sequence[Row]) -> dict[str, Any]:
        def by_seed(values: Sequence[Any]) -> dict[str, Any]:
            return {str(seed): value for seed, value in zip(self.seeds, values, strict=True)}

        achieved = [summary["metrics"].get("arrival_rps") for summary in self.summaries[rate]]
        return {
            "rate": rate, "passes": verdict.passes, "reasons": list(verdict.reasons),
            "attainment": verdict.attainment, "attainment_by_seed": by_seed(verdict.by_seed),
            "steady": verdict.steady, "growth": dict(verdict.growth), "growth_by_seed": by_seed(verdict.growth_by_seed),
            "growth_allowed": dict(verdict.growth_allowed), "percentiles": dict(verdict.percentiles),
            "arrival_rps_by_seed": by_seed(achieved), "cells": by_seed([job["folder"] for job in jobs]),
        }  # fmt: skip


def _read(folder: Path) -> Run:
    """A stored run without its steps, which nothing here reads."""
    return Run(read_requests(folder), pd.DataFrame(), json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def _line(number: int, rate: float, verdict: Verdict, took: str) -> str:
    seeds = " ".join("n/a" if one is None else f"{one:.3f}" for one in verdict.by_seed)
    met = "" if verdict.attainment is None else f"  attainment {verdict.attainment:.4f} ({seeds})"
    found = "".join(f"  {key} {value:.4g} s" for key, value in verdict.percentiles.items())
    state = "steady" if verdict.steady else f"growing by {max(verdict.growth.values()):.1%}"
    return f"probe {number}: {rate:g} requests/s{met}{found}  {state}  {'pass' if verdict.passes else 'fail'}  [{took}]"
